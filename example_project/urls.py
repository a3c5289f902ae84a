"""The pages of the shop, its admin, and the rendered images."""

from django.conf import settings
from django.contrib import admin
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.templatetags.static import static
from django.urls import include, path
from django.views.generic import RedirectView
from django.views.static import serve
from drf_spectacular.views import SpectacularAPIView


def media(request: HttpRequest, path: str) -> HttpResponseBase:
    """Serve a rendered image. Fit for an example: a real site lets its web server do this."""
    return serve(request, path, document_root=str(settings.MEDIA_ROOT))


urlpatterns = [
    path("", include("example_project.prices.urls")),
    path("orders/", include("example_project.orders.urls")),
    path("sets/", include("example_project.product_sets.urls")),
    path("admin/", admin.site.urls),
    path("api/rmq/", include("django_rmq.api.urls")),
    path("api/schema/", SpectacularAPIView.as_view(), name="schema"),
    # What browsers ask for on every page that names no icon, such as those of the admin.
    path("favicon.ico", RedirectView.as_view(url=static("shop/icon.svg"))),
    path("media/<path:path>", media),
]
