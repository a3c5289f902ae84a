"""What worker processes tell: events, spans and metrics by OTLP, and what they log while a server is unavailable."""

from __future__ import annotations

import gzip
import importlib.util
import os
import re
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from django_rmq.core.monitoring import events
from tests.e2e.load import shares
from tests.e2e.processes import WORK, Happened, Start, make_app, named
from tests.support.brokers import Broker
from tests.support.servers import RedisServer, absent, serving
from tests.support.workers import client_of, eventually, send


def test_each_process_tells_what_it_does_to_the_last(
    start: Start, broker: Broker, happened: Happened
) -> None:
    subscription = broker.events()
    worker = start("work", "--processes", "2", "--burst", WORKER_EVENTS="1")
    send(broker, WORK, named(*range(40)))
    heard: defaultdict[str, list[str]] = defaultdict(list)
    processes: set[int] = set()
    end = time.monotonic() + 30
    while len(heard["committed"]) < 40:
        assert time.monotonic() < end, (heard, worker.output)
        for payload in subscription.get(0.2):
            for event in events.decode_events(payload):
                heard[event["event"]] += event["ids"]
                processes.add(event["pid"])
    subscription.close()
    assert worker.wait() == 0
    assert len(set(heard["started"])) == len(set(heard["committed"])) == 40
    assert worker.process.pid not in processes
    assert processes <= {int(line) for line in happened.processes()}
    times = broker.times(WORK)
    assert sum(times.took) == 40 <= sum(times.late), "every process gave its counts away before it ended"


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
        self.url = ""

    def handler(self) -> type[BaseHTTPRequestHandler]:
        bodies = self.bodies

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                bodies.setdefault(self.path, []).append(body)
                self.send_response(200)
                self.end_headers()

        return Handler

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
    package = None
    with suppress(ModuleNotFoundError):
        package = importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http")
    if package is None:
        absent("opentelemetry-exporter-otlp-proto-http is not installed: make install")
    found = Receiver()
    with serving(found.handler()) as found.url:
        yield found


def texts(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


def test_what_workers_do_arrives_by_otlp(
    start: Start, broker: Broker, happened: Happened, receiver: Receiver, tmp_path: Path, redis_url: str
) -> None:
    listeners = "from tests.e2e.worker_project.listeners import *\n"
    more = make_app(tmp_path, "observed_app", apps=APP, listeners=listeners)
    more["PYTHONPATH"] = os.pathsep.join([more["PYTHONPATH"], *sys.path])
    send(broker, WORK, named(*range(6)))
    worker = start("work", "--burst", WORKER_OTEL="1", OTEL_EXPORTER_OTLP_ENDPOINT=receiver.url, **more)
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


AWAY_SECONDS = 12.0


def test_an_outage_of_redis_costs_a_few_lines_even_if_a_process_dies_meanwhile(
    start: Start, prefix: str, happened: Happened
) -> None:
    with RedisServer(appendonly=True, appendfsync="always") as server:
        client = client_of(server.url)
        broker = Broker(client, prefix)
        send(broker, WORK, named("a"))
        worker = start("work", "-p", "2", "-t", "2", url=server.url)
        happened.wait("done", 1)
        eventually(lambda: sorted(shares(broker, "work").values()) == [2, 2], "both being at work")
        before = len(worker.output.splitlines())
        server.kill()
        time.sleep(1)
        os.kill(worker.children[0], signal.SIGKILL)
        time.sleep(AWAY_SECONDS)
        lines = worker.output.splitlines()[before:]
        server.start()
        eventually(client.ping, "Redis", 30)
        send(broker, WORK, named(*range(20)))
        happened.wait("done", 21)
        worker.end()
        client.close()
    # Two processes, of each some lines per kind of trouble; and the death with its follower.
    assert 4 <= len(lines) <= 30, "\n".join(lines)
    assert sum("started" in line for line in lines) == 1
    assert "Traceback" not in "\n".join(lines)
    assert all(line.split()[3].isdigit() for line in lines), "each line names its process"
    workers = {line.split()[4] for line in lines}
    assert "-" in workers, "the parent has none"
    assert len(workers) >= 2 and all(re.fullmatch("[0-9a-f]{8}|-", worker) for worker in workers)


@pytest.mark.parametrize("is_async", [False, True], ids=["threads", "async"])
def test_with_v_2_each_message_that_is_done_has_one_line_with_process_and_worker(
    start: Start, broker: Broker, is_async: bool
) -> None:
    topic = replace(WORK, name="ledger", slots=16)
    send(broker, topic, [{"name": f"m{n}", "ms": 1} for n in range(20)])
    worker = start("ledger", "-p", "1", "-v", "2", "--burst", WORKER_ASYNC=str(int(is_async)))
    assert worker.wait() == 0
    lines = [line for line in worker.output.splitlines() if line.endswith("of topic ledger done")]
    assert len(lines) == 20 == len({line.split()[-5] for line in lines}), worker.output
    pattern = r"[\d-]+ [\d:,]+ DEBUG \d+ [0-9a-f]{8} rmq-[a-z]+-[a-z0-9]+ Message \S+ of topic ledger done"
    assert all(re.fullmatch(pattern, line) for line in lines), lines


def test_a_dependency_that_is_down_costs_one_traceback_for_each_process(
    start: Start, broker: Broker, happened: Happened
) -> None:
    send(broker, replace(WORK, name="brief", slots=1), named(*range(300), do="raise"))
    worker = start("brief", "-p", "1", "--burst")
    assert worker.wait(60) == 0
    assert len(happened.lines("begun")) == 600, "all are tried again"
    assert worker.output.count("Traceback") == 2, worker.output  # one while retries are left, one at death
    failed = [line for line in worker.output.splitlines() if "of topic brief failed" in line]
    assert {line.split()[2] for line in failed} == {"WARNING", "ERROR"} and len(failed) <= 10
