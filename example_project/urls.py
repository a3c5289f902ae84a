"""The pages of the shop, its admin, and the rendered images."""

from django.conf import settings
from django.contrib import admin
from django.urls import include, path
from django.views.static import serve

urlpatterns = [
    path("", include("example_project.prices.urls")),
    path("orders/", include("example_project.orders.urls")),
    path("admin/", admin.site.urls),
    # Fit for an example: a real site lets its web server do this.
    path("media/<path:path>", serve, {"document_root": settings.MEDIA_ROOT}),
]
