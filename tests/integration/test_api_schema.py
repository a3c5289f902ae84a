"""The OpenAPI schema of the API, and schemathesis: whatever is asked by it or against it, the answer is in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import schemathesis
from django.core.wsgi import get_wsgi_application
from drf_spectacular.generators import SchemaGenerator
from hypothesis import HealthCheck, Phase, given, settings
from rest_framework.authtoken.models import Token
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from django_rmq.conf import get_config
from django_rmq.core.model.delivered_message import message_id
from django_rmq.core.model.keys import background_actions_key
from django_rmq.core.model.replies import Failure
from django_rmq.core.model.schedule import Schedule
from django_rmq.core.model.worker_report import RunningCall
from django_rmq.core.producer.placement import slot_of
from django_rmq.message_ids import sealed_id
from django_rmq.operations import Actor, Operations, Permission
from django_rmq.operations.consumption import Deliveries
from tests.support.brokers import Broker
from tests.support.programs import broker_of_project, user_with, views
from tests.support.reports import join, report

ROOT = Path(__file__).parents[2]
TOPICS: dict[str, Any] = {
    "ranked": {"TYPE": "priority", "SLOTS": 2, "BACKOFF": 0},
    "timed": {"TYPE": "fixed_time", "SLOTS": 2, "IDENTITY": "key"},
    "merging": {"TYPE": "range_merge", "SLOTS": 2, "TIME_RANGE": 1, "BODY": "text"},
}
MEMBERS = [b"1", b'{"n":2}']
SECONDS = float(os.environ.get("SCHEMA_SECONDS", "0"))
"""For how long to ask, with other requests in each round. 0: one round, whose requests are always the same."""
POSITIVE, NEGATIVE = (80, 40) if SECONDS else (8, 4)
"""Requests of each kind for each operation."""


@pytest.mark.slow
def test_the_schema_is_valid_and_made_without_a_warning() -> None:
    command = ["manage.py", "spectacular", "--validate", "--fail-on-warn", "--format", "openapi-json"]
    options: dict[str, Any] = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 120}
    made = subprocess.run([sys.executable, *command], check=False, **options)
    assert made.returncode == 0, made.stderr
    assert "Warning" not in made.stderr
    schema = json.loads(made.stdout)
    ours = {path: item for path, item in schema["paths"].items() if path.startswith("/api/rmq/")}
    assert len(ours) == len(views())
    operations = [operation for item in ours.values() for operation in item.values()]
    assert all(operation["operationId"].startswith("rmq_") for operation in operations)
    bodies = [
        operation["requestBody"]["content"]["application/json"]
        for operation in operations
        if "requestBody" in operation
    ]
    assert len(bodies) > 8
    assert all(body["examples"] for body in bodies)


def type_or_null(validator: Any, types: Any, value: object, shape: Any) -> Iterator[Any]:
    """Yield the errors of a value's type. OpenAPI 3.0 says ``nullable`` where JSON Schema has the type ``null``."""
    if value is not None or not shape.get("nullable"):
        yield from jsonschema.Draft4Validator.VALIDATORS["type"](validator, types, value, shape)


WithNullable = jsonschema.validators.extend(jsonschema.Draft4Validator, {"type": type_or_null})


def test_an_example_of_an_answer_has_the_fields_that_its_schema_requires() -> None:
    schema = json.loads(json.dumps(SchemaGenerator().get_schema(public=True)))
    checked = 0
    for item in schema["paths"].values():
        for operation in item.values():
            for answer in operation["responses"].values():
                for content in answer.get("content", {}).values():
                    for example in content.get("examples", {}).values():
                        shape = {**content["schema"], "components": schema["components"]}
                        WithNullable(shape).validate(example["value"])
                        checked += 1
    assert checked


def test_the_schema_says_which_texts_and_lists_must_not_be_empty() -> None:
    schema = json.loads(json.dumps(SchemaGenerator().get_schema(public=True)))
    shapes = {
        f"{name}.{field}": shape
        for name, found in schema["components"]["schemas"].items()
        for field, shape in found.get("properties", {}).items()
    }
    least = {name: shape.get("minLength", shape.get("minItems")) for name, shape in shapes.items()}
    one = [
        "SendFields.key",
        "BuryFields.why",
        "DeliveryFields.id",
        "DeliveryFields.receipt",
        "StrictFilter.text",
    ]
    several = ["SettleFields.deliveries", "SendsFields.messages", "ReplayNamedFields.ids"]
    assert {name: least[name] for name in one + several} == dict.fromkeys(one + several, 1)
    assert least["FailedFields.error"] is None
    listed = schema["paths"]["/api/rmq/v1/topics/{topic}/messages/"]["get"]["parameters"]
    empty = {found["name"] for found in listed if found["schema"].get("minLength") == 1}
    assert empty >= {"text", "error", "cursor"}


def statuses_of(schema: Any, part: str) -> dict[str, set[str]]:
    """The statuses of the answers of each operation, by its name, of the paths with this part."""
    paths = [item for path, item in schema["paths"].items() if part in path]
    return {one["operationId"]: set(one["responses"]) for item in paths for one in item.values()}


def test_each_route_lists_the_answers_that_any_request_may_get() -> None:
    schema = json.loads(json.dumps(SchemaGenerator().get_schema(public=True)))
    statuses = statuses_of(schema, "/api/rmq/")
    public = {"rmq_live": {"406"}, "rmq_ready": {"400", "401", "403", "406", "429", "503"}}
    assert statuses.keys() > public.keys()
    # 409: a key of Redis has a value of another program.
    of_all = {"401", "403", "406", "409", "429", "503"}
    assert [name for name, listed in statuses.items() if not listed >= public.get(name, of_all)] == []


def test_each_route_to_a_message_lists_the_answer_to_a_wrong_id() -> None:
    schema = json.loads(json.dumps(SchemaGenerator().get_schema(public=True)))
    operations = statuses_of(schema, "/messages/{id}/")
    assert len(operations) >= 5
    assert [name for name, statuses in operations.items() if not statuses >= {"400", "404"}] == []


def test_without_drf_spectacular_the_api_answers_as_well() -> None:
    code = """
import sys
sys.modules["drf_spectacular"] = None
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "drf_spectacular" else real(name, *more)
from django.conf import settings
settings.configure(
    INSTALLED_APPS=["django.contrib.auth", "django.contrib.contenttypes", "rest_framework", "django_rmq"],
    ROOT_URLCONF="django_rmq.api.urls", ALLOWED_HOSTS=["*"],
    RMQ={"BROKER": "memory", "TOPICS": {"smoke": {"TYPE": "priority", "LISTENER": False}}},
)
import django
django.setup()
from django.test import Client
answers = [Client().get(path) for path in ("/health/live", "/health/ready", "/topics/")]
print([(answer.status_code, answer.json().get("code")) for answer in answers])
"""
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    # The REST framework's own default, Session before Basic, says 403 where it could say who to be.
    assert ran.stdout.strip() == "[(200, None), (200, None), (403, 'not_authenticated')]"


@pytest.fixture
def broker(request: pytest.FixtureRequest) -> Iterator[Broker]:
    yield from broker_of_project(request, TOPICS=TOPICS, API={"SEND_RATE": None})


class Furniture:
    """Messages in every state before each request, so that what a request is for is there."""

    CONSUMER = uuid.UUID(int=1)

    def __init__(self, broker: Broker, user: Any) -> None:
        self.broker = broker
        self.topic = get_config().topic("ranked")
        self.deliveries = Deliveries(Actor.of_user(user, "rest"), self.topic, broker)
        broker.change_schedule("nightly", "spec", Schedule("nightly", "timed", 1, every=60).text)
        self.ids = [message_id(slot_of(member, 2), member) for member in MEMBERS]

    def put(self, state: str) -> None:
        """Let all messages of the topic be in one state."""
        for slot in range(2):
            self.broker.pause(self.topic, slot, False)
        for slot, member in [(slot_of(member, 2), member) for member in MEMBERS]:
            self.broker.remove(self.topic, slot, [member], "live")
            self.broker.remove(self.topic, slot, [member], "dead")
            self.broker.send_replace(self.topic, slot, [100], [member])
            if state == "dead":
                taken = self.broker.prepare(self.topic, slot, "W", None, 10)
                failures = [Failure(one.member, "rejected", None, "Boom: bad") for one in taken.deliveries]
                self.broker.rollback(self.topic, slot, taken.receipt, failures)

    def taken(self) -> list[dict[str, str]]:
        """Take what there is, as a consumer names it."""
        self.put("store")
        found = self.deliveries.take(self.CONSUMER, 10)
        return [{"id": one.id, "receipt": self.deliveries.receipt(one)} for one in found]

    def end(self) -> None:
        """Settle what is in flight."""
        for slot in range(2):
            for entry in self.broker.list_messages(self.topic, slot, "prepare").entries:
                receipt = int((entry.record or b"0").split(b" ")[0])
                self.broker.commit(self.topic, slot, receipt, [entry.member])

    def furnish(self, operation: str, case: Any, turn: int) -> None:
        """Make a request, which fits the schema, fit what is there: most of the time."""
        self.end()
        self.put("dead" if "replay" in operation else "store")
        if turn % 4 == 3:
            return
        if "topic" in (case.path_parameters or {}):
            case.path_parameters["topic"] = "ranked"
        if "id" in (case.path_parameters or {}):
            case.path_parameters["id"] = self.ids[turn % 2]
        if operation.endswith("_schedule"):
            case.path_parameters["name"] = "nightly"
        if operation.endswith("_worker"):
            case.path_parameters["worker"] = "0123456789"
            join(self.broker, "0123456789")
            report(self.broker, "0123456789", state="working")
        if operation.endswith("_stack"):
            sealed = [sealed_id("ranked", slot_of(member, 2), member) for member in MEMBERS]
            join(self.broker, "0123456789")
            calls = tuple(RunningCall("ranked", one, 1, 1, "thread") for one in sealed)
            report(self.broker, "0123456789", state="working", calls=calls)
        # What is drawn changes with the package's code, and some options exclude each other: one request has none of them.
        if turn % 4 == 2 and case.query:
            case.query = {name: value for name, value in case.query.items() if name in ("state", "topic")}
        if operation == "rmq_slots":
            case.query["topic"] = "ranked"
        body = case.body if isinstance(case.body, dict) else {}
        if operation == "rmq_start_action":
            self.put("dead")
            body |= {"action": "replay", "state": "dead", "filter": {}}
        if operation in ("rmq_start_action", "rmq_stop_action"):
            self.broker.client.delete(background_actions_key(self.broker.prefix))
        if operation == "rmq_stop_action":
            self.put("dead")
            case.path_parameters["action"] = (
                Operations(Actor("ada", "rest")).start_action("ranked", "replay").action.id
            )
        if operation == "rmq_undo":
            self.put("waiting")
            case.path_parameters["deletion"] = (
                Operations(Actor("ada", "rest")).purge("ranked", "waiting").result().undo
            )
        if "deliveries" in body:
            body["deliveries"] = [
                {**one, **named} for one, named in zip(body["deliveries"] * 2, self.taken(), strict=False)
            ]
        if operation == "rmq_prepare":
            body["wait"] = 0
        if operation == "rmq_send":
            for one in body.get("messages", [body]):
                for name in ("time_range_ms", "fixed_time", "slot_basis", "key", "headers", "expires"):
                    one.pop(name, None)
                one["priority"] = 100 + turn
        if operation in ("rmq_reschedule", "rmq_reschedule_all"):
            body.pop("due", None)
            body["priority"] = 200 + turn
        if operation == "rmq_reschedule_all" and turn % 2:
            body |= {"state": "store", "filter": {}}
        if operation == "rmq_replay" and turn % 2:
            body.pop("ids", None)
            body["filter"] = {}


def answers_of(
    broker: Broker, user: Any, asker: Any, positive: int = POSITIVE, negative: int = NEGATIVE
) -> dict[str, Counter[int]]:
    """Ask every operation as ``asker``, with what ``user`` has furnished; return the statuses of each."""
    headers = {"Authorization": f"Token {Token.objects.create(user=asker).key}"}
    raw = json.loads(json.dumps(SchemaGenerator().get_schema(public=True)))
    raw["paths"] = {path: item for path, item in raw["paths"].items() if path.startswith("/api/rmq/")}
    schema = schemathesis.openapi.from_dict(raw)
    schema.app = get_wsgi_application()
    furniture = Furniture(broker, user)
    answered: defaultdict[str, Counter[int]] = defaultdict(Counter)
    end, is_over = time.monotonic() + SECONDS, False
    while not is_over:
        for found in schema.get_all_operations():
            operation: Any = found.ok()  # type: ignore[union-attr] # an error raises itself
            raw_operation = operation.definition.raw
            name = raw_operation["operationId"]
            ask(operation, name, GenerationMode.POSITIVE, positive, furniture, headers, answered[name])
            # Where a request has neither query nor body, nothing can be wrong with it: a path takes any text.
            queries = [one for one in raw_operation.get("parameters", []) if one["in"] == "query"]
            if queries or "requestBody" in raw_operation:
                ask(operation, name, GenerationMode.NEGATIVE, negative, furniture, headers, answered[name])
        is_over = time.monotonic() >= end
    print(sum(answered.values(), Counter[int]()))
    return answered


@pytest.mark.slow
@pytest.mark.django_db
def test_whatever_is_asked_the_answer_is_in_the_schema(broker: Broker) -> None:
    user = user_with(*Permission)
    answered = answers_of(broker, user, user)
    total = sum(answered.values(), Counter[int]())
    good = sum(count for status, count in total.items() if 200 <= status < 300)
    assert good >= 0.2 * total.total(), total
    assert not total[500]
    barren = {
        name: tally for name, tally in answered.items() if not any(200 <= status < 300 for status in tally)
    }
    assert barren == {}


@pytest.mark.slow
@pytest.mark.django_db
def test_whatever_is_asked_by_somebody_with_few_rights_the_answer_is_in_the_schema(broker: Broker) -> None:
    # Most of the answers are a 403, whatever else is asked.
    few = (POSITIVE // 2, NEGATIVE // 2)
    answered = answers_of(broker, user_with(*Permission), user_with(Permission.VIEW), *few)
    total = sum(answered.values(), Counter[int]())
    assert not total[500]
    assert total[403] >= 0.2 * total.total(), total


def ask(
    operation: Any,
    name: str,
    mode: GenerationMode,
    examples: int,
    furniture: Furniture,
    headers: dict[str, str],
    answered: Counter[int],
) -> None:
    """Ask one operation with what fits the schema, or with what does not, and look at each answer."""
    turns = count()

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=not SECONDS,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        if mode is GenerationMode.POSITIVE:
            furniture.furnish(name, case, next(turns))
        response = case.call(headers=headers)
        # Not asked: whether all that fits the schema is taken. What fits depends on the topic's type, which a schema
        # cannot say. And that not all is well is what `ready` is there to say, by a 503.
        excluded = [positive_data_acceptance, *([not_a_server_error] if name == "rmq_ready" else [])]
        case.validate_response(response, excluded_checks=excluded, headers=headers)
        answered[response.status_code] += 1

    check()
