"""Metrics of OpenTelemetry: which are recorded, with which attributes, and that they cost nothing while they are off."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import transaction
from django.test import override_settings
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import HistogramDataPoint, InMemoryMetricReader, NumberDataPoint
from opentelemetry.semconv._incubating.attributes import messaging_attributes
from opentelemetry.semconv._incubating.metrics import messaging_metrics
from opentelemetry.semconv.attributes import error_attributes, server_attributes

from django_rmq import Message, Reject, TopicFull, connections, send_message, send_messages
from django_rmq.conf import get_config, parsers
from django_rmq.core.consumer import Hooks
from django_rmq.exceptions import ConfigurationError, InvalidMessage, ServerUnavailable
from django_rmq.observability import announcements, telemetry
from django_rmq.testing import Clock
from tests.support.brokers import OracleBroker
from tests.support.embedded_server import free_port
from tests.support.workers import LONG, Worker, eventually

KIND = {"TYPE": "range_merge", "SLOTS": 1, "TIME_RANGE": "1ms", "MAX_RETRIES": 0}
RMQ = {
    "BROKER": "memory",
    "METRICS": {"OPENTELEMETRY": True},
    "TOPICS": {"work": KIND, "full": {**KIND, "MAX_BACKLOG": 2}},
}
SENT, CONSUMED = "messaging.client.sent.messages", "messaging.client.consumed.messages"
OPERATION, PROCESS = "messaging.client.operation.duration", "messaging.process.duration"

Points = dict[str, dict[tuple[str | None, ...], Any]]


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemoryMetricReader]:
    """What an SDK of the project would export; its provider is global there."""
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    monkeypatch.setattr(metrics, "get_meter", provider.get_meter)
    telemetry.instruments.cache_clear()
    yield reader
    telemetry.instruments.cache_clear()


def recorded(reader: InMemoryMetricReader) -> Points:
    """Return the points of each metric by operation, topic and type of error: a count, or the number of durations."""
    found: Points = {}
    data = reader.get_metrics_data()
    for resource in data.resource_metrics if data else ():
        for scope in resource.scope_metrics:
            assert scope.scope.name == "django_rmq" and scope.schema_url == telemetry.SCHEMA_URL
            for metric in scope.metrics:
                for point in metric.data.data_points:
                    attributes = dict(point.attributes or {})
                    assert attributes.pop("messaging.system") == "rmq"
                    kind = attributes.pop("messaging.operation.type", None)
                    labels = ("messaging.operation.name", "messaging.destination.name", "error.type")
                    key = tuple(str(attributes.pop(label, "")) or None for label in labels)
                    assert not attributes, "no label of high cardinality"
                    assert (kind is not None) == isinstance(point, HistogramDataPoint)
                    assert isinstance(point, (HistogramDataPoint, NumberDataPoint))
                    value = point.count if isinstance(point, HistogramDataPoint) else point.value
                    found.setdefault(metric.name, {})[key] = value
    return found


def names(module: Any) -> set[str]:
    """Return the names that a module has as constants."""
    return {value for name, value in vars(module).items() if name.isupper() and isinstance(value, str)}


def test_the_names_are_those_of_the_conventions() -> None:
    theirs = {value for name, value in vars(messaging_metrics).items() if name.isupper()}
    assert {SENT, CONSUMED, OPERATION, PROCESS} <= theirs
    attributes = set().union(*map(names, (messaging_attributes, error_attributes, server_attributes)))
    ours = names(telemetry) - {telemetry.SCHEMA_URL, SENT, CONSUMED, OPERATION, PROCESS}
    assert {name for name in ours if not name.startswith("messaging.rmq.")} <= attributes
    types = {value.value for value in messaging_attributes.MessagingOperationTypeValues}
    assert types >= {*telemetry.TYPES.values(), "send", "create", "process"}


def test_sends_are_counted_and_timed(broker: OracleBroker, reader: InMemoryMetricReader) -> None:
    send_message("work", 1)
    send_messages("work", [1, 2, 3])
    send_messages("full", range(5))
    with pytest.raises(TopicFull):
        send_message("full", 6)
    with pytest.raises(InvalidMessage):
        send_message("work", 1, priority=20)
    found = recorded(reader)
    full, invalid = "django_rmq.exceptions.TopicFull", "django_rmq.exceptions.InvalidMessage"
    assert found[SENT] == {("send", "work", None): 4, ("send", "full", None): 2, ("send", "full", full): 4}
    assert found[OPERATION] == {
        ("send", "work", None): 2,
        ("send", "full", None): 1,
        ("send", "full", full): 1,
        ("send", "work", invalid): 1,
    }


@pytest.mark.django_db(transaction=True)
def test_what_waits_for_a_commit_is_counted_when_it_is_sent(
    broker: OracleBroker, reader: InMemoryMetricReader
) -> None:
    with transaction.atomic():
        send_message("work", 1)
        send_messages("work", [2, 3])
        assert recorded(reader) == {}
    found = recorded(reader)
    assert found == {SENT: {("send", "work", None): 3}, OPERATION: {("send", "work", None): 1}}
    with transaction.atomic():
        send_message("work", 4)
        transaction.set_rollback(True)
    assert recorded(reader) == found


@pytest.mark.django_db(transaction=True)
def test_sends_that_fail_are_counted_with_their_error(reader: InMemoryMetricReader) -> None:
    port = free_port()
    away = {**RMQ, "BROKER": "redis", "REDIS": f"redis://127.0.0.1:{port}/3"}
    with override_settings(RMQ=away):
        for _ in range(2):
            with pytest.raises(ServerUnavailable):
                send_message("work", 1)
        with pytest.raises(ServerUnavailable):
            send_messages("work", [1, 2, 3])
        with transaction.atomic():
            send_message("work", 1)
    connections.close()
    data = reader.get_metrics_data()
    assert data is not None
    points = {
        metric.name: [(dict(point.attributes or {}), point) for point in metric.data.data_points]
        for metric in data.resource_metrics[0].scope_metrics[0].metrics
    }
    ((attributes, point),) = points[SENT]
    assert isinstance(point, NumberDataPoint) and point.value == 6
    assert attributes["error.type"] == "django_rmq.exceptions.ServerUnavailable"
    assert (attributes["server.address"], attributes["server.port"]) == ("127.0.0.1", port)
    ((_, durations),) = points[OPERATION]
    assert isinstance(durations, HistogramDataPoint) and durations.count == 4
    assert tuple(durations.explicit_bounds) == telemetry.EDGES


def test_a_worker_records_what_it_processes_and_settles(
    broker: OracleBroker, clock: Clock, reader: InMemoryMetricReader
) -> None:
    def listen(messages: list[Message]) -> None:
        if messages[0].body == "bad":
            raise Reject("never")

    send_messages("work", ["good", "fine"])
    clock.advance(1)
    reporter, work = announcements.Reporter(), get_config().topic("work")
    hooks = Hooks(around=announcements.around)
    with Worker(broker, work, listen, hooks=hooks, watcher=reporter, batch_size=10):
        eventually(lambda: ("commit", "work", None) in recorded(reader).get(OPERATION, {}), "a commit")
        send_message("work", "bad")
        clock.advance(1)
        eventually(lambda: ("rollback", "work", None) in recorded(reader)[OPERATION], "a rollback")
    reporter.stop(LONG)
    found = recorded(reader)
    reject = "django_rmq.exceptions.Reject"
    assert found[CONSUMED] == {("process", "work", None): 2, ("process", "work", reject): 1}
    assert found[PROCESS] == {("process", "work", None): 1, ("process", "work", reject): 1}


def test_off_nothing_is_made(broker: OracleBroker, reader: InMemoryMetricReader) -> None:
    with override_settings(RMQ={**RMQ, "METRICS": {}}), connections.replaced_broker(broker):
        send_message("work", 1)
        assert telemetry.around(get_config().topic("work"), print) is print
        assert not announcements.Reporter().wants("work")
    assert reader.get_metrics_data() is None
    assert telemetry.instruments.cache_info().currsize == 0


def test_without_the_package_the_setting_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsers, "find_spec", lambda name: None)
    said = r"opentelemetry-api is not installed.*rmq\[otel\]"
    with override_settings(RMQ=RMQ), pytest.raises(ConfigurationError, match=said):
        get_config()
