"""``include("django_rmq.metrics.urls")``: the page for Prometheus, at the path at which it is included."""

from django.urls import path

from django_rmq.metrics.collector import metrics

app_name = "rmq_metrics"

urlpatterns = [path("", metrics, name="metrics")]
