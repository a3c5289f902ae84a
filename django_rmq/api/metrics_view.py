"""The metrics among the routes: for clients with the metrics token, and for users of the API.

Only this module of the API needs the extra ``prometheus``.
"""

from __future__ import annotations

from django.contrib.auth.decorators import login_not_required
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from rest_framework.renderers import BaseRenderer
from rest_framework.request import Request

from django_rmq.api.view import RmqView
from django_rmq.metrics.collector import page, shows_token
from django_rmq.operations import Permission


class MetricsView(RmqView):
    """``metrics``, with the API's own authentication."""

    needs = {"GET": Permission.VIEW}
    schema = None  # type: ignore[assignment]

    def perform_content_negotiation(self, request: Request, force: bool = False) -> tuple[BaseRenderer, str]:
        """Choose the format of errors; the page itself chooses the format for Prometheus."""
        # A scraper may accept only formats of Prometheus, which no renderer of the API has: that is no 406.
        return super().perform_content_negotiation(request, force=True)

    def get(self, request: Request) -> HttpResponse:
        """Show the metrics of all topics to users who may know of all."""
        if len(self.known()) < len(self.operations.config.topics):
            self.permission_denied(request, "The metrics cover all topics, and you may not see all of them.")
        return page(request._request)  # noqa: SLF001 - the framework has no other way to it


_by_login = MetricsView.as_view()


# LoginRequiredMiddleware knows neither the token nor the logins of the API.
@login_not_required
def metrics(request: HttpRequest) -> HttpResponseBase:
    """Return the metrics, or an error of the API."""
    if request.method in ("GET", "HEAD") and shows_token(request):
        answer = page(request)
        answer["Cache-Control"] = "no-store"
        return answer
    return _by_login(request)
