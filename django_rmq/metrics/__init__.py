"""Metrics for Prometheus (extra ``prometheus``): a collector for any registry, and a separate page.

    # urls.py: the page, for users who may see topics and requests with RMQ["METRICS"]["TOKEN"]
    path("metrics/rmq", include("django_rmq.metrics.urls"))

    # or, beside django-prometheus and other collectors, in AppConfig.ready
    from prometheus_client import REGISTRY
    from django_rmq.metrics import RmqCollector

    REGISTRY.register(RmqCollector())

Everything is read from Redis, where it is counted. Every process reports the same values, so scrape one
target. ``docs/reference/metrics.md`` lists names and meanings; ``monitoring/`` has a dashboard and alert
rules.
"""

try:
    from django_rmq.metrics.collector import RmqCollector
except ModuleNotFoundError as error:
    if str(error.name).partition(".")[0] != "prometheus_client":
        raise
    told = 'django_rmq.metrics needs prometheus-client: pip install "django-redis-rmq[prometheus]"'
    raise ModuleNotFoundError(told, name="prometheus_client") from None

__all__ = ["RmqCollector"]
