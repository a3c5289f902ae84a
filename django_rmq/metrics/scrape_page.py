"""The page that Prometheus scrapes."""

from __future__ import annotations

from secrets import compare_digest

from django.contrib.auth.decorators import login_not_required
from django.http import HttpRequest, HttpResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe
from prometheus_client.exposition import choose_encoder

from django_rmq.conf import get_config
from django_rmq.metrics.collector import RmqCollector, scrape
from django_rmq.operations import Actor, Permission

_collector = RmqCollector()


@require_safe
@never_cache
@login_not_required
def metrics(request: HttpRequest) -> HttpResponse:
    """Return the metrics. The status is 200 for users who may see topics and for requests with the token.

    Other requests get 403, or 401 if a token would permit them.
    """
    if not _may_see(request):
        if get_config().metrics.token is None:
            return HttpResponse("Forbidden.\n", status=403, content_type="text/plain")
        refused = HttpResponse("Bearer token required.\n", status=401, content_type="text/plain")
        refused["WWW-Authenticate"] = 'Bearer realm="RMQ metrics"'
        return refused
    return page(request)


def page(request: HttpRequest) -> HttpResponse:
    """Return all metrics, in the format that the request accepts."""
    _, content_type = choose_encoder(request.headers.get("Accept", ""))
    is_openmetrics = content_type.startswith("application/openmetrics-text")
    return HttpResponse(scrape(_collector, is_openmetrics=is_openmetrics), content_type=content_type)


def shows_token(request: HttpRequest) -> bool:
    """Return whether the request contains ``METRICS["TOKEN"]``."""
    token, header = get_config().metrics.token, request.headers.get("Authorization", "")
    scheme, _, value = header.partition(" ")
    return token is not None and scheme.lower() == "bearer" and compare_digest(value.encode(), token.encode())


def _may_see(request: HttpRequest) -> bool:
    if shows_token(request):
        return True
    user = getattr(request, "user", None)
    return user is not None and Actor.of_user(user, "metrics").may(Permission.VIEW)
