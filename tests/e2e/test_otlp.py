"""Spans and metrics of real worker processes reach a receiver by OTLP, those of their last moment, too."""

from __future__ import annotations

import gzip
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import pytest

from django_rmq.core.model.topic import Topic, TopicType
from tests.e2e.processes import ROOT, Happened, Start, named
from tests.support.brokers import Broker
from tests.support.servers import absent
from tests.support.workers import send

WORK = Topic("work", TopicType.RANGE_MERGE, slots=4, time_range_ms=1)

APP = """
from django.apps import AppConfig
from opentelemetry import metrics, trace
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from django_rmq.worker import worker_process

worker_process.LEAVE_SECONDS = 60.0


class ObservedConfig(AppConfig):
    name = "observed_app"

    def ready(self):
        # Both wait for an hour: what arrives earlier was flushed at the end of a worker.
        spans = BatchSpanProcessor(OTLPSpanExporter(), schedule_delay_millis=3_600_000)
        provider = TracerProvider()
        provider.add_span_processor(spans)
        trace.set_tracer_provider(provider)
        reader = PeriodicExportingMetricReader(OTLPMetricExporter(), export_interval_millis=3_600_000)
        metrics.set_meter_provider(MeterProvider([reader]))
"""


class Receiver:
    """A receiver of OTLP over HTTP."""

    def __init__(self) -> None:
        self.bodies: dict[str, list[bytes]] = {}
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                receiver.bodies.setdefault(self.path, []).append(body)
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None: ...  # noqa: A002 - the name of its parent

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self._thread = threading.Thread(target=self.server.serve_forever)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self._thread.join()
        self.server.server_close()

    def spans(self) -> list[Any]:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        return [
            span
            for body in self.bodies.get("/v1/traces", [])
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans
            for scope in resource.scope_spans
            if scope.scope.name == "django_rmq"
            for span in scope.spans
        ]

    def metrics(self) -> dict[str, list[Any]]:
        """Return the last points of each metric."""
        from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

        return {
            metric.name: list(getattr(metric, metric.WhichOneof("data")).data_points)
            for body in self.bodies.get("/v1/metrics", [])
            for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics
            for scope in resource.scope_metrics
            if scope.scope.name == "django_rmq"
            for metric in scope.metrics
        }


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    found = None
    with suppress(ModuleNotFoundError):
        found = importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http")
    if found is None:
        absent("opentelemetry-exporter-otlp-proto-http is not installed: make install")
    with Receiver() as running:
        yield running


def texts(attributes: Any) -> dict[str, Any]:
    """Return attributes as they are in a span or a point."""
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


def test_what_workers_do_arrives_by_otlp(
    start: Start, broker: Broker, happened: Happened, receiver: Receiver, tmp_path: Path, redis_url: str
) -> None:
    app = tmp_path / "observed_app"
    app.mkdir()
    (app / "__init__.py").touch()
    (app / "apps.py").write_text(APP)
    (app / "listeners.py").write_text("from tests.e2e.worker_project.listeners import *\n")
    send(broker, WORK, named(*range(6)))
    worker = start(
        "work",
        "--burst",
        WORKER_APP="observed_app",
        WORKER_OTEL="1",
        PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT), *sys.path]),
        OTEL_EXPORTER_OTLP_ENDPOINT=receiver.url,
    )
    assert worker.wait() == 0, worker.output
    assert len(happened.lines("done")) == 6
    spans, points = receiver.spans(), receiver.metrics()
    assert sum(span.name == "process work" for span in spans) == 6
    settled = [texts(span.attributes) for span in spans if span.name == "commit work"]
    assert sum(each.get("messaging.batch.message_count", 1) for each in settled) == 6
    host, port = redis_url.split("/")[2].rsplit("@", 1)[-1].split(":")
    for each in settled:
        assert each["messaging.system"] == "rmq"
        assert (each["server.address"], each["server.port"]) == (host, int(port))
    (consumed,) = points["messaging.client.consumed.messages"]
    assert consumed.as_int == 6
    (processed,) = points["messaging.process.duration"]
    assert (processed.count, texts(processed.attributes)["messaging.destination.name"]) == (6, "work")
    assert "messaging.client.operation.duration" in points
    assert "Traceback" not in worker.output
