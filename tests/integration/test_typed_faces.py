"""Typed bodies in REST, its OpenAPI description and the admin: schemas, and errors by field."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.test import Client, override_settings
from drf_spectacular.generators import SchemaGenerator
from drf_spectacular.settings import spectacular_settings
from drf_spectacular.validation import validate_schema
from jsonschema import Draft202012Validator

from django_rmq.api.schema import components
from django_rmq.conf import get_config
from tests.support.brokers import OracleBroker, direct, project_on
from tests.support.programs import ALL, Program, kill_all, user_with

pytestmark = pytest.mark.django_db

PLAIN = {
    "shop": 7,
    "lines": [{"sku": 1, "price": "9.90"}],
    "at": "2026-11-23T12:00:00Z",
    "reason": "campaign",
}
PRICES = {"TYPE": "priority", "SLOTS": 1, "BODY": "tests.support.typed_bodies.PriceChanged"}
TOPICS: dict[str, Any] = {
    "prices": PRICES,
    "views.all": {"TYPE": "priority", "SLOTS": 1, "BODY": "tests.support.typed_bodies.Shapes"},
    "plain": {"TYPE": "priority", "SLOTS": 1},
}
SEND = "v1/topics/prices/messages/"


@pytest.fixture
def broker() -> Iterator[OracleBroker]:
    found = OracleBroker("m:")
    with project_on(found, TOPICS=TOPICS):
        yield found


@pytest.fixture
def program(broker: OracleBroker) -> Program:
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
    topics = {"prices": {**PRICES, "BODY": "tests.nowhere.Missing"}}
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
    with override_settings(RMQ={"REDIS": "redis://nowhere", "TOPICS": {"plain": TOPICS["plain"]}}):
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
