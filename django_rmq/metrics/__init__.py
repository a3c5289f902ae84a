"""Metrics for Prometheus (extra ``prometheus``): a collector for any registry, and a page of its own.

    # urls.py: the page, for whoever may see topics or shows RMQ["METRICS"]["TOKEN"]
    path("metrics/rmq", include("django_rmq.metrics.urls"))

    # or, beside django-prometheus and other collectors, in AppConfig.ready
    from prometheus_client import REGISTRY
    from django_rmq.metrics import RmqCollector

    REGISTRY.register(RmqCollector())

Everything is read from Redis, where it is counted: each process tells the same about all of them, so scrape one target.
Names and meanings: ``docs/metrics.md``; a dashboard and alert rules: ``monitoring/``.
"""

from django_rmq.metrics.collector import RmqCollector

__all__ = ["RmqCollector"]
