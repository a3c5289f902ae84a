"""Spans of sends and of listeners: what they are called, how they are linked, and that messages stay what they are."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from django.db import transaction
from django.test import override_settings
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from django_rmq import (
    Message,
    Reject,
    Send,
    connections,
    ensure_message,
    observability,
    remove_message,
    send_message,
    send_messages,
)
from django_rmq.conf import get_config, parsers
from django_rmq.core.consumer import Hooks
from django_rmq.core.producer.placement import MAX_HEADER_BYTES
from django_rmq.exceptions import ConfigurationError, InvalidMessage
from django_rmq.observability import announcements, telemetry
from django_rmq.testing import Clock, captured_messages, drain
from django_rmq.worker import listener_registry
from tests.support.brokers import OracleBroker
from tests.support.embedded_server import free_port
from tests.support.workers import LONG, Worker, eventually

KIND = {"TYPE": "range_merge", "SLOTS": 1, "TIME_RANGE": "1ms", "MAX_RETRIES": 0}
RMQ = {"BROKER": "memory", "TRACING": True, "TOPICS": {"plain": KIND, "keyed": {**KIND, "IDENTITY": "key"}}}


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """What an SDK of the project would export; its provider is global there."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    return exporter


def one(exporter: InMemorySpanExporter) -> ReadableSpan:
    (span,) = exporter.get_finished_spans()
    exporter.clear()
    return span


def consumed(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, topic: str, function: Any, batch_size: int | None = None
) -> int:
    """Let time pass and a listener run, in the way of a worker."""
    found = {topic: listener_registry.Listener(topic, function, batch_size, "here:1", "here")}
    monkeypatch.setattr(listener_registry, "autodiscover", lambda: None)
    monkeypatch.setattr(listener_registry, "listeners", lambda: found)
    clock.advance(1)
    return drain(raise_errors=False)


def test_processing_is_linked_to_its_send_where_the_identity_is_a_key(
    broker: OracleBroker, clock: Clock, spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = send_message("keyed", {"n": 1}, key="k", headers={"mine": "1"})
    sent = one(spans)
    assert (sent.name, sent.kind) == ("send keyed", SpanKind.PRODUCER)
    assert dict(sent.attributes or {}) == {
        "messaging.system": "rmq",
        "messaging.destination.name": "keyed",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.destination.partition.id": "0",
        "messaging.message.id": "k",
        "messaging.rmq.message.outcome": "stored",
    }
    assert (result.status, result.member) == ("stored", b"k")
    seen: list[Any] = []

    def listen(message: Message) -> None:
        seen.append((message.headers, trace.get_current_span().get_span_context().span_id))

    assert consumed(clock, monkeypatch, "keyed", listen) == 1
    processed = one(spans)
    assert (processed.name, processed.kind) == ("process keyed", SpanKind.CONSUMER)
    assert sent.context and processed.context
    ((headers, inside),) = seen
    assert set(headers) == {"mine", "traceparent"} and inside == processed.context.span_id
    (link,) = processed.links
    assert (link.context.trace_id, link.context.span_id) == (sent.context.trace_id, sent.context.span_id)
    assert processed.parent is None and processed.context.trace_id != sent.context.trace_id
    attributes = dict(processed.attributes or {})
    assert (attributes["messaging.operation.type"], attributes["messaging.message.id"]) == ("process", "k")
    assert attributes["messaging.rmq.message.retries_left"] == 0
    assert processed.status.status_code is StatusCode.UNSET


def test_where_the_body_is_the_identity_nothing_travels_and_merging_stays(
    broker: OracleBroker, clock: Clock, spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert send_message("plain", {"iban": "secret"}).status == "stored"
    assert send_message("plain", {"iban": "secret"}).status == "merged"
    outcomes = [
        dict(span.attributes or {})["messaging.rmq.message.outcome"] for span in spans.get_finished_spans()
    ]
    assert outcomes == ["stored", "merged"]
    assert "secret" not in repr([span.to_json() for span in spans.get_finished_spans()])
    spans.clear()
    assert consumed(clock, monkeypatch, "plain", lambda message: None) == 1
    processed = one(spans)
    assert processed.links == () and "secret" not in processed.to_json()
    assert "messaging.message.id" not in (processed.attributes or {})


def test_a_keyed_message_merges_whatever_trace_it_came_from(
    broker: OracleBroker, clock: Clock, spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert send_message("keyed", 1, key="k").status == "stored"
    assert send_message("keyed", 2, key="k").status == "merged"
    first, second = (span.context for span in spans.get_finished_spans())
    spans.clear()
    seen: list[Any] = []
    assert consumed(clock, monkeypatch, "keyed", lambda message: seen.append(message.body)) == 1
    assert first and second
    # The link leads to whoever sent the body that is processed.
    assert one(spans).links[0].context.span_id == {1: first.span_id, 2: second.span_id}[seen[0]]


def test_many_messages_are_one_span_and_a_batch_links_to_each_sender(
    broker: OracleBroker, clock: Clock, spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    send_messages("keyed", [Send(1, key="a"), Send(2, key="b", headers={"h": "x"})])
    sent = one(spans)
    assert dict(sent.attributes or {})["messaging.batch.message_count"] == 2
    ensure_message("keyed", 3, key="c")
    alone = one(spans)
    given: list[dict[str, str]] = []

    def listen(messages: list[Message]) -> None:
        given.extend(message.headers for message in messages)
        messages[0].reject("no")

    consumed(clock, monkeypatch, "keyed", listen, 10)
    processed = one(spans)
    assert sent.context and alone.context
    found = {str((link.attributes or {})["messaging.message.id"]): link for link in processed.links}
    linked = {key: link.context.span_id for key, link in found.items()}
    assert linked == {"a": sent.context.span_id, "b": sent.context.span_id, "c": alone.context.span_id}
    assert dict(found["a"].attributes or {})["messaging.rmq.message.retries_left"] == 0
    attributes = dict(processed.attributes or {})
    assert attributes["messaging.batch.message_count"] == 3
    assert attributes["messaging.rmq.batch.failed_message_count"] == 1
    assert processed.status.status_code is StatusCode.UNSET
    assert [sorted(headers) for headers in given] == [["traceparent"], ["h", "traceparent"], ["traceparent"]]


@pytest.mark.parametrize("how", ["raises", "rejects", "returns", "decides"])
def test_a_failure_is_an_error_of_its_span(
    broker: OracleBroker, clock: Clock, spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    def listen(message: Message) -> bool | None:
        if how == "raises":
            raise ValueError("broken")
        if how == "rejects":
            raise Reject("never")
        if how == "decides":
            message.reject("never")
        return False if how == "returns" else None

    send_message("plain", 1)
    spans.clear()
    consumed(clock, monkeypatch, "plain", listen)
    span = one(spans)
    assert span.status.status_code is StatusCode.ERROR
    assert [event.name for event in span.events] == (["exception"] if how in ("raises", "rejects") else [])
    assert (span.attributes or {})["error.type"] == {
        "raises": "ValueError",
        "rejects": "django_rmq.exceptions.Reject",
        "returns": "returned_false",
        "decides": "rejected",
    }[how]


def test_what_cannot_be_sent_is_an_error_and_says_so_as_ever(
    broker: OracleBroker, spans: InMemorySpanExporter
) -> None:
    for topic, options in (
        ("plain", {"headers": {"a": "b"}}),
        ("keyed", {"key": "k", "headers": {1: "b"}}),
        ("keyed", {"key": "k", "headers": ["b"]}),
        ("keyed", {"key": "k", "headers": {"a": "\ud800"}}),
    ):
        with pytest.raises(InvalidMessage):
            send_message(topic, 1, **options)
        span = one(spans)
        assert span.status.status_code is StatusCode.ERROR
        assert (span.attributes or {})["error.type"] == "django_rmq.exceptions.InvalidMessage"


def test_headers_of_a_sender_win_and_full_ones_stay_as_they_are(
    broker: OracleBroker, clock: Clock, spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = {"a": "x" * (MAX_HEADER_BYTES - 10)}
    send_message("keyed", 1, key="full", headers=full)
    send_message("keyed", 2, key="own", headers={"traceparent": "own", "b": "c"})
    spans.clear()
    seen: dict[str | None, dict[str, str]] = {}

    def listen(message: Message) -> None:
        seen[message.key] = message.headers

    consumed(clock, monkeypatch, "keyed", listen)
    assert seen == {"full": full, "own": {"traceparent": "own", "b": "c"}}
    assert [span.links for span in spans.get_finished_spans()] == [(), ()]


def test_tests_of_projects_see_what_they_sent(broker: OracleBroker, spans: InMemorySpanExporter) -> None:
    with captured_messages() as sent:
        send_message("keyed", 1, key="k", headers={"a": "b"})
    assert sent[0].options == {"key": "k", "headers": {"a": "b"}}


def test_a_context_that_the_sender_gave_is_linked_to_by_the_send(
    broker: OracleBroker, spans: InMemorySpanExporter
) -> None:
    given = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    send_message("keyed", 1, key="k", headers={"traceparent": given})
    ((link,),) = (span.links for span in spans.get_finished_spans())
    assert f"{link.context.trace_id:032x}-{link.context.span_id:016x}" in given


@pytest.mark.django_db(transaction=True)
def test_in_a_transaction_the_call_creates_and_the_commit_sends(
    broker: OracleBroker, clock: Clock, spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    with transaction.atomic():
        send_message("keyed", 1, key="k")
        send_messages("plain", [1, 2, 3])
        remove_message("plain", 9)
    created, several, sent = spans.get_finished_spans()
    spans.clear()
    assert [(span.name, span.kind) for span in (created, several, sent)] == [
        ("create keyed", SpanKind.PRODUCER),
        ("create plain", SpanKind.PRODUCER),
        ("send", SpanKind.CLIENT),
    ]
    assert dict(created.attributes or {})["messaging.rmq.message.outcome"] == "pending"
    assert dict(several.attributes or {})["messaging.batch.message_count"] == 3
    attributes = dict(sent.attributes or {})
    assert attributes["messaging.operation.type"] == "send"
    assert attributes["messaging.batch.message_count"] == 4
    assert "messaging.destination.name" not in attributes
    assert created.context and several.context
    assert [
        (link.context.span_id, (link.attributes or {})["messaging.destination.name"]) for link in sent.links
    ] == [(created.context.span_id, "keyed"), (several.context.span_id, "plain")]
    consumed(clock, monkeypatch, "keyed", lambda message: None)
    assert [link.context.span_id for link in one(spans).links] == [created.context.span_id]


@pytest.mark.django_db(transaction=True)
def test_a_commit_that_sends_to_one_topic_names_it_and_a_removal_alone_is_no_send(
    broker: OracleBroker, spans: InMemorySpanExporter
) -> None:
    with transaction.atomic():
        send_message("plain", 1)
    _, sent = spans.get_finished_spans()
    assert sent.name == "send plain"
    assert "messaging.batch.message_count" not in (sent.attributes or {})
    spans.clear()
    with transaction.atomic():
        remove_message("plain", 1)
    assert spans.get_finished_spans() == ()


@pytest.mark.django_db(transaction=True)
def test_a_commit_that_cannot_send_is_an_error_of_its_span(spans: InMemorySpanExporter) -> None:
    port = free_port()
    away = {**RMQ, "BROKER": "redis", "REDIS": f"redis://127.0.0.1:{port}/3"}
    with override_settings(RMQ=away), transaction.atomic():
        result = send_message("plain", 1)
    assert result.status == "failed"
    _, sent = spans.get_finished_spans()
    connections.close()
    attributes = dict(sent.attributes or {})
    assert attributes["error.type"] == "django_rmq.exceptions.ServerUnavailable"
    assert (attributes["server.address"], attributes["server.port"]) == ("127.0.0.1", port)
    assert sent.status.status_code is StatusCode.ERROR


@pytest.mark.parametrize(
    ("server", "told"),
    [
        (
            "redis://user:secret@redis.example:7000/1",
            {"server.address": "redis.example", "server.port": 7000},
        ),
        ("redis://redis.example", {"server.address": "redis.example", "server.port": 6379}),
        ("unix:///run/my%20redis.sock", {"server.address": "/run/my redis.sock"}),
        ({"CLUSTER": ["redis://a:7001", "redis://b:7002"]}, {"server.address": "a", "server.port": 7001}),
    ],
    ids=str,
)
def test_spans_say_where_redis_is(server: Any, told: dict[str, Any]) -> None:
    with override_settings(RMQ={**RMQ, "BROKER": "redis", "REDIS": server}):
        found = telemetry.attributes_of("plain", "send")
    assert {name: value for name, value in found.items() if name.startswith("server.")} == told


def test_what_redis_confirms_is_a_span_that_is_linked_to_the_senders(
    broker: OracleBroker, clock: Clock, spans: InMemorySpanExporter
) -> None:
    def listen(message: Message) -> None:
        if message.body == 2:
            raise Reject("never")

    first, second = (send_message("keyed", body, key=f"k{body}") for body in (1, 2))
    assert first.ok and second.ok
    senders = [span.context.span_id for span in spans.get_finished_spans() if span.context]
    spans.clear()
    reporter, keyed = announcements.Reporter(), get_config().topic("keyed")
    clock.advance(1)
    with Worker(broker, keyed, listen, hooks=Hooks(around=announcements.around), watcher=reporter):
        eventually(lambda: len(spans.get_finished_spans()) >= 4, "two calls and their ends")
    reporter.stop(LONG)
    ends = {span.name: span for span in spans.get_finished_spans() if span.kind is SpanKind.CLIENT}
    assert set(ends) == {"commit keyed", "rollback keyed"}
    for name, key, sender in (("commit keyed", "k1", senders[0]), ("rollback keyed", "k2", senders[1])):
        span = ends[name]
        attributes = dict(span.attributes or {})
        assert attributes["messaging.operation.type"] == "settle"
        assert attributes["messaging.operation.name"] == name.split()[0]
        assert attributes["messaging.message.id"] == key
        assert [link.context.span_id for link in span.links] == [sender]
        assert span.parent is None
        assert span.start_time and span.end_time and 0 <= span.end_time - span.start_time < 60e9


def test_without_an_sdk_everything_works_and_nothing_travels(
    broker: OracleBroker, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert send_message("keyed", 1, key="k").status == "stored"
    seen: list[dict[str, str]] = []
    assert consumed(clock, monkeypatch, "keyed", lambda message: seen.append(message.headers)) == 1
    assert seen == [{}]


def test_off_there_is_no_span_and_the_listener_itself_is_called(
    broker: OracleBroker, spans: InMemorySpanExporter
) -> None:
    def listen(message: Message) -> None: ...

    off = {**RMQ, "TRACING": False}
    with override_settings(RMQ=off), connections.replaced_broker(broker):
        assert telemetry.around(get_config().topic("keyed"), listen) is listen
        observer = observability.observe_send(get_config().topic("keyed"), waits=False)
        assert observer is observability._UNOBSERVED_SEND
        send_message("keyed", 1, key="k")
    assert spans.get_finished_spans() == ()


def test_without_the_package_the_setting_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsers, "find_spec", lambda name: None)
    said = r"opentelemetry-api is not installed.*rmq\[otel\]"
    with override_settings(RMQ=RMQ), pytest.raises(ConfigurationError, match=said):
        get_config()


def hide(topic: str, body: Any) -> str:
    return "hidden"


@pytest.mark.parametrize("error", [ValueError("S3CRET"), Reject("S3CRET"), SystemExit("S3CRET")])
def test_spans_of_a_redacted_topic_tell_the_class_of_an_error_alone(
    broker: OracleBroker,
    clock: Clock,
    spans: InMemorySpanExporter,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
) -> None:
    def listen(message: Message) -> None:
        raise error

    with override_settings(RMQ={**RMQ, "ADMIN": {"FORMATTER": {"keyed": f"{__name__}.hide"}}}):
        send_message("keyed", "S3CRET", key="S3CRET", on_commit=False)
        with suppress(SystemExit):
            consumed(clock, monkeypatch, "keyed", listen)
        with pytest.raises(InvalidMessage):
            send_message("keyed", {"S3CRET": object()}, key="x", on_commit=False)
    assert len(spans.get_finished_spans()) == 3
    told = "".join(span.to_json() for span in spans.get_finished_spans())
    assert "S3CRET" not in told
    (processed,) = (span for span in spans.get_finished_spans() if span.kind is SpanKind.CONSUMER)
    assert processed.status.status_code is StatusCode.ERROR
    assert processed.status.description == type(error).__name__
    assert "messaging.message.id" in told
