"""Typed bodies from the settings to the listener: every way to send, what a listener gets, and what does not fit.

REST, its OpenAPI description and the admin show schemas, and errors by field.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.core.checks import run_checks
from django.core.management import CommandError, call_command
from django.db import transaction
from django.test import Client, override_settings
from drf_spectacular.generators import SchemaGenerator
from drf_spectacular.settings import spectacular_settings
from drf_spectacular.validation import validate_schema
from jsonschema import Draft202012Validator

from django_rmq import (
    ConfigurationError,
    InvalidBody,
    Message,
    Reject,
    Send,
    asend_messages,
    listener,
    remove_message,
    send_message,
    send_messages,
)
from django_rmq import schedules as scheduling
from django_rmq.api.schema import components
from django_rmq.conf import get_config
from django_rmq.models import OutboxMessage
from django_rmq.operations import Actor, Operations
from django_rmq.testing import (
    Clock,
    assert_message_sent,
    captured_messages,
    clock_from_now,
    drain,
    memory_broker,
)
from django_rmq.worker.listener_registry import isolated
from django_rmq.worker.startup import check_start
from tests.support.brokers import OracleBroker, direct, project_on
from tests.support.programs import ALL, Program, kill_all, user_with
from tests.support.reports import printed
from tests.support.sends import waiting
from tests.support.typed_bodies import Line, PriceChanged, Reason

MERGING = {"TYPE": "range_merge", "SLOTS": 2, "TIME_RANGE": 5}
PRICES = "tests.support.typed_bodies.PriceChanged"
TOPICS: dict[str, dict[str, Any]] = {
    "prices": {
        **MERGING,
        "BODY": PRICES,
        "SLOT_BASIS": "shop",
        "UPCAST": "tests.support.typed_bodies.upcast",
    },
    "orders": {
        "TYPE": "fixed_time",
        "SLOTS": 2,
        "IDENTITY": "key",
        "BODY": "tests.support.typed_bodies.Ordered",
    },
    "views": {**MERGING, "IDENTITY": "key", "ACCUMULATE": 5, "BODY": "tests.support.typed_bodies.Viewed"},
    "line": {"TYPE": "fifo", "SLOTS": 1, "BODY": "tests.support.typed_bodies.Line"},
    "plain": MERGING,
}
CHANGED = PriceChanged(7, [Line(1, Decimal("9.90"))], datetime(2026, 11, 23, 12, tzinfo=UTC), Reason.CAMPAIGN)
PLAIN = {
    "shop": 7,
    "lines": [{"sku": 1, "price": "9.90"}],
    "at": "2026-11-23T12:00:00Z",
    "reason": "campaign",
}
STORED = (
    b'{"at":"2026-11-23T12:00:00Z","batch":null,"extra":{},"lines":[{"price":"9.90","sku":1}],"note":null,'
    b'"reason":"campaign","shop":7}'
)


@pytest.fixture
def clock() -> Iterator[Clock]:
    rmq = {"REDIS": "redis://nowhere", "TOPICS": TOPICS, "AUTODISCOVER": None}
    with override_settings(RMQ=rmq), isolated(), memory_broker(found := clock_from_now()):
        yield found


def heard(topic: str, **options: Any) -> list[Any]:
    """Where a listener puts the bodies of its messages."""
    found: list[Any] = []

    @listener(topic, **options)
    def hear(message: Any) -> None:
        found.append([one.body for one in message] if options else message.body)

    return found


def dead(name: str) -> list[Any]:
    """The dead messages of a topic, as operations show them."""
    return list(Operations(Actor("test", "command")).listing(name, "dead").copies)


def test_an_instance_and_its_plain_data_are_one_message(clock: Clock) -> None:
    found = heard("prices")
    assert send_message("prices", CHANGED, on_commit=False).status == "stored"
    assert send_message("prices", PLAIN, on_commit=False).status == "merged"
    assert waiting("prices") == [STORED]
    clock.advance(6)
    drain()
    assert found == [CHANGED]


def test_a_message_is_taken_back_by_an_instance(clock: Clock) -> None:
    send_message("prices", CHANGED, on_commit=False)
    assert remove_message("prices", PLAIN, on_commit=False).status == "waiting"
    send_message("prices", PLAIN, on_commit=False)
    assert remove_message("prices", CHANGED, on_commit=False).status == "waiting"


@pytest.mark.parametrize(
    "bodies", [[CHANGED, {"shop": 7}], [Send(CHANGED), Send({"shop": 7})]], ids=["plain", "Send"]
)
def test_nothing_is_sent_of_a_list_with_a_bad_body(clock: Clock, bodies: list[Any]) -> None:
    with pytest.raises(InvalidBody, match=r"^item 1: body does not fit") as error:
        send_messages("prices", bodies, on_commit=False)
    assert list(error.value.fields) == ["lines", "at"]
    with pytest.raises(InvalidBody):
        async_to_sync(asend_messages)("prices", bodies, on_commit=False)
    assert not waiting("prices")


def test_a_list_of_instances_and_plain_data_is_sent(clock: Clock) -> None:
    found = heard("prices", batch_size=10)
    others = [CHANGED, replace(CHANGED, note="b"), {**PLAIN, "note": "b"}]
    statuses = [one.status for one in send_messages("prices", others, on_commit=False)]
    assert statuses == ["stored", "stored", "merged"]
    clock.advance(6)
    drain()
    (group,) = found
    assert sorted(group, key=lambda body: body.note or "") == [CHANGED, replace(CHANGED, note="b")]


def test_collected_bodies_are_instances_and_one_that_does_not_fit_kills_the_message(clock: Clock) -> None:
    found: list[list[Any]] = []

    @listener("views")
    def hear(message: Message[Any]) -> None:
        assert message.body is message.bodies[-1]
        found.append(message.bodies)

    for ms in ("1", "2"):
        send_message("views", {"page": "/", "ms": ms}, key="a", on_commit=False)
    clock.advance(6)
    drain()
    assert found == [[{"page": "/", "ms": 1}, {"page": "/", "ms": 2}]]

    topics = {"views": {**TOPICS["views"], "BODY": "json"}}
    with override_settings(RMQ={"REDIS": "redis://nowhere", "TOPICS": topics}):
        send_message("views", {"page": "/"}, key="b", on_commit=False)
    send_message("views", {"page": "/", "ms": 3}, key="b", on_commit=False)
    clock.advance(6)
    with pytest.raises(InvalidBody, match=r"body 1 of 2: body does not fit .*: ms: Field required"):
        drain()
    assert [one.failed for one in dead("views")] == ["rejected"]


def test_what_no_longer_fits_is_dead_at_once_with_its_fields(clock: Clock) -> None:
    found = heard("line")
    untyped = {"line": {**TOPICS["line"], "BODY": "json"}}
    with override_settings(RMQ={"REDIS": "redis://nowhere", "TOPICS": untyped}):
        send_message("line", {"sku": 1}, on_commit=False)
    send_message("line", Line(2, Decimal(3)), on_commit=False)
    drain(raise_errors=False)
    (one,) = dead("line")
    assert (one.failed, one.failures) == ("rejected", 1)
    assert one.error_class == "django_rmq.exceptions.InvalidBody"
    assert one.error.endswith("body does not fit tests.support.typed_bodies.Line: price: Field required")
    assert found == [Line(2, Decimal(3))]  # a strict line goes on behind it
    with override_settings(RMQ={"REDIS": "redis://nowhere", "TOPICS": untyped}):
        Operations(Actor("test", "command")).replay("line", [one.id])
        drain()
    assert found[-1] == {"sku": 1}


def test_a_rejected_body_that_fits_raises_nothing_in_a_test(clock: Clock) -> None:
    @listener("prices")
    def hear(message: Message[Any]) -> None:
        raise Reject(message.body.note)

    send_message("prices", CHANGED, on_commit=False)
    clock.advance(6)
    assert drain() == 1
    assert len(dead("prices")) == 1


@pytest.mark.django_db
def test_the_outbox_keeps_what_was_validated(clock: Clock) -> None:
    topics = {"prices": {**TOPICS["prices"], "OUTBOX": True}}
    with override_settings(RMQ={"REDIS": "redis://nowhere", "TOPICS": topics}), transaction.atomic():
        send_message("prices", CHANGED)
        with pytest.raises(InvalidBody):
            send_message("prices", {})
        assert [bytes(row.member) for row in OutboxMessage.objects.all()] == [STORED]


def test_captured_messages_are_found_by_instance_and_by_plain_data(clock: Clock) -> None:
    with captured_messages():
        send_message("prices", CHANGED, on_commit=False)
        send_message("plain", {"a": 1}, on_commit=False)
        assert_message_sent("prices", body=CHANGED)
        assert_message_sent("prices", body=PLAIN)
        assert_message_sent("plain", body={"a": 1})
        for other in (replace(CHANGED, shop=8), {}, {**PLAIN, "note": "b"}):
            with pytest.raises(AssertionError):
                assert_message_sent("prices", body=other)


@pytest.mark.parametrize(
    ("body", "why"), [({"number": 1}, "orderNumber: Field required"), (None, "Input should be")]
)
def test_a_schedule_has_a_body_of_the_type(clock: Clock, body: Any, why: str) -> None:
    good = {"orderNumber": 1, "placed": "2026-11-23T12:00:00Z", "total": "1"}
    bodies = {"good": good, "bad": body}
    schedules = {name: {"TOPIC": "orders", "BODY": each, "EVERY": 60} for name, each in bodies.items()}
    rmq = {"REDIS": "redis://nowhere", "TOPICS": TOPICS, "SCHEDULES": schedules}
    with override_settings(RMQ=rmq):
        config = get_config()
        assert not list(scheduling.problems(config, config.schedules["good"]))
        (problem,) = scheduling.problems(config, config.schedules["bad"])
    assert problem.id == "django_rmq.E072"
    assert why in problem.message


def test_the_command_names_the_fields_and_the_line(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    assert printed("rmqsend", "prices", json.dumps(PLAIN)).startswith("stored in slot")
    with pytest.raises(CommandError, match=r"shop: Field required; lines: Input should be a valid array"):
        call_command("rmqsend", "prices", '{"lines": 3, "at": 5}')
    lines = io.BytesIO(f'{json.dumps({**PLAIN, "shop": 8})}\n\n{{"shop":1,"lines":[]}}\n'.encode())
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(lines))
    said = r"^line 3: body does not fit .*: at: Field required \(nothing was sent\)"
    with pytest.raises(CommandError, match=said):
        call_command("rmqsend", "prices", "-", jsonl=True)
    assert waiting("prices") == [STORED]


@pytest.mark.parametrize(
    ("options", "check"),
    [
        ({"BODY": "tests.nowhere.Missing"}, "E101"),
        ({"BODY": "tests.support.typed_bodies.convert"}, "E102"),
        ({"BODY": PRICES, "UPCAST": "tests.support.typed_bodies.missing"}, "E103"),
        ({"BODY": PRICES, "SLOT_BASIS": "store"}, "E104"),
    ],
    ids=["E101", "E102", "E103", "E104"],
)
def test_a_type_that_cannot_be_used_is_found_by_checks_and_stops_workers(
    options: dict[str, Any], check: str
) -> None:
    topics = {"prices": {**MERGING, **options}, "plain": MERGING}
    rmq = {"REDIS": "redis://nowhere", "TOPICS": topics, "AUTODISCOVER": None}
    with override_settings(RMQ=rmq), isolated(), memory_broker():
        (found,) = [one for one in run_checks(tags=["rmq"]) if one.id and one.id.startswith("django_rmq.E")]
        assert found.id == f"django_rmq.{check}"
        with pytest.raises(ConfigurationError, match="prices"):
            check_start([get_config().topic("prices")])
        assert check_start([get_config().topic("plain")])


RANKED = {"TYPE": "priority", "SLOTS": 1, "BODY": PRICES}
FACES: dict[str, Any] = {
    "prices": RANKED,
    "views.all": {"TYPE": "priority", "SLOTS": 1, "BODY": "tests.support.typed_bodies.Shapes"},
    "plain": {"TYPE": "priority", "SLOTS": 1},
}
SEND = "v1/topics/prices/messages/"


@pytest.fixture
def broker() -> Iterator[OracleBroker]:
    found = OracleBroker("m:")
    with project_on(found, TOPICS=FACES):
        yield found


@pytest.fixture
def program(broker: OracleBroker, db: None) -> Program:
    return Program(user_with(*ALL))


def held(broker: OracleBroker, state: str = "store") -> list[Any]:
    entries = direct(broker).list_messages(get_config().topic("prices"), 0, state).entries
    return [json.loads(entry.member) for entry in entries]


def test_rest_validates_and_stores_what_the_type_makes_of_it(program: Program, broker: OracleBroker) -> None:
    program.ok("POST", SEND, {"body": {**PLAIN, "shop": "7"}, "priority": 50}, 202)
    assert held(broker) == [{**PLAIN, "note": None, "batch": None, "extra": {}}]


def test_rest_says_what_is_wrong_where(program: Program, broker: OracleBroker) -> None:
    bad = {**PLAIN, "lines": [{"sku": "secret", "price": 0}]}
    many = {"messages": [{"body": PLAIN, "priority": 50}, {"body": bad, "priority": 50}]}
    answer = program.refused(400, "invalid_body", "POST", SEND, many).json()
    assert answer["detail"].startswith("item 1: body does not fit tests.support.typed_bodies.PriceChanged: ")
    assert answer["errors"] == {
        "lines[0].sku": ["Input should be a valid integer, unable to parse string as an integer"],
        "lines[0].price": ["Input should be greater than 0"],
    }
    assert "secret" not in json.dumps(answer)
    assert not held(broker)


def test_rest_shows_the_schema_of_a_topic(program: Program) -> None:
    schema = program.ok("GET", "v1/topics/prices/")["body_schema"]
    Draft202012Validator.check_schema(schema)
    assert Draft202012Validator(schema).is_valid(PLAIN)
    assert not Draft202012Validator(schema).is_valid({"shop": 7})
    assert program.ok("GET", "v1/topics/plain/")["body_schema"] is None


def test_a_topic_whose_type_cannot_be_used_is_shown_all_the_same(program: Program) -> None:
    topics = {"prices": {**RANKED, "BODY": "tests.nowhere.Missing"}}
    with override_settings(RMQ={"REDIS": "redis://nowhere", "TOPICS": topics}):
        assert program.ok("GET", "v1/topics/prices/")["body_schema"] is None
        program.refused(503, "misconfigured", "POST", SEND, {"body": PLAIN, "priority": 50})


@pytest.mark.parametrize("version", ["3.0.3", "3.1.0"])
def test_the_schema_of_the_project_has_the_bodies(broker: OracleBroker, version: str) -> None:
    spectacular_settings.apply_patches({"OAS_VERSION": version})
    try:
        schema: Any = SchemaGenerator().get_schema(public=True)
        validate_schema(schema)
    finally:
        spectacular_settings.clear_patches()
    schemas = schema["components"]["schemas"]
    assert schemas["SendFields"]["properties"]["body"]["anyOf"] == [
        {"$ref": "#/components/schemas/Body_prices"},
        {"$ref": "#/components/schemas/Body_views.all"},
        {"description": "The body of another topic"},
    ]
    assert schemas["EditFields"]["properties"]["body"]["anyOf"]
    prices = schemas["Body_prices"]["properties"]
    assert prices["lines"]["items"] == {"$ref": "#/components/schemas/Body_prices_Line"}
    assert schemas["Body_prices_Line"]["required"] == ["sku", "price"]
    note = (
        {"type": "string", "nullable": True}
        if version == "3.0.3"
        else {"anyOf": [{"type": "string"}, {"type": "null"}]}
    )
    assert {**prices["note"], "title": "", "default": None} == {**note, "title": "", "default": None}
    assert "Body_plain" not in schemas


def test_a_project_without_types_has_the_schema_of_before(broker: OracleBroker) -> None:
    with override_settings(RMQ={"REDIS": "redis://nowhere", "TOPICS": {"plain": FACES["plain"]}}):
        schema: Any = SchemaGenerator().get_schema(public=True)
    assert "anyOf" not in schema["components"]["schemas"]["SendFields"]["properties"]["body"]
    assert not [name for name in schema["components"]["schemas"] if name.startswith("Body_")]


def test_what_openapi_3_0_lacks_is_rewritten(broker: OracleBroker) -> None:
    found = components(get_config().topics, is_3_0=True)
    shapes = found["Body_views.all"]["properties"]
    assert shapes["const"] == {"enum": ["x"], "title": "Const", "type": "string"}
    assert shapes["pair"]["items"] == {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    assert shapes["share"] == {
        "minimum": 0,
        "exclusiveMinimum": True,
        "maximum": 1,
        "title": "Share",
        "type": "number",
        "example": 0.5,
    }
    assert shapes["nothing"] == {"nullable": True, "title": "Nothing"}
    assert shapes["choice"]["discriminator"]["mapping"] == {
        "a": "#/components/schemas/Body_views.all_OneA",
        "b": "#/components/schemas/Body_views.all_OneB",
    }
    assert shapes["maybe"]["nullable"] is True
    assert shapes["maybe"]["anyOf"] == [{"$ref": "#/components/schemas/Body_views.all_OneA"}]


def test_the_form_shows_the_schema_and_errors_by_field(
    broker: OracleBroker, staff: Callable[..., Client]
) -> None:
    client = staff("view_topic", "send_messages")
    place = "/admin/django_rmq/topic/prices/send/"
    page = client.get(place).content.decode()
    assert "JSON of the type tests.support.typed_bodies.PriceChanged." in page
    assert "JSON schema of the body" in page
    assert "&quot;lines&quot;" in page
    assert "JSON schema of the body" not in client.get("/admin/django_rmq/topic/plain/send/").content.decode()
    bad = json.dumps({"shop": "x", "lines": [{"sku": 1, "price": 0}], "at": 0})
    page = client.post(place, {"body": bad, "priority": 50}).content.decode()
    assert "<li>shop: Input should be a valid integer, unable to parse string as an integer</li>" in page
    assert "<li>lines[0].price: Input should be greater than 0</li>" in page
    assert "<li>Input should be a dictionary or an instance of PriceChanged</li>" not in page
    assert not held(broker)
    assert client.post(place, {"body": json.dumps(PLAIN), "priority": 50}).status_code == 302
    assert len(held(broker)) == 1


def test_an_edited_body_has_to_fit(
    broker: OracleBroker, program: Program, staff: Callable[..., Client]
) -> None:
    program.ok("POST", SEND, {"body": PLAIN, "priority": 50}, 202)
    kill_all(direct(broker), "prices")
    (dead,) = program.ok("GET", f"{SEND}?state=dead")["results"]
    replay = f"{SEND}{dead['id']}/replay/"
    answer = program.refused(400, "invalid_body", "POST", replay, {"body": {"shop": 7}}).json()
    assert set(answer["errors"]) == {"lines", "at"}
    client = staff("view_topic", "view_bodies", "replay_messages", "edit_messages")
    place = f"/admin/django_rmq/topic/prices/message/{dead['id']}/edit/"
    assert "<li>lines: Field required</li>" in client.post(place, {"body": '{"shop": 7}'}).content.decode()
    assert held(broker, "dead")
    assert client.post(place, {"body": json.dumps({**PLAIN, "shop": 8})}).status_code == 302
    assert [body["shop"] for body in held(broker)] == [8]
