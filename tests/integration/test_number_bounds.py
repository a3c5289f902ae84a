"""Numbers out of bounds, at every face: REST, the admin's forms and the commands answer with a sentence, and do nothing."""

from __future__ import annotations

import io
import json
import sys
import uuid
from collections.abc import Iterator

import pytest
from django.contrib.auth.models import User
from django.core.management import CommandError
from django.test import Client
from django.urls import reverse

from tests.support.brokers import OracleBroker, project_on
from tests.support.programs import ALL, Program, user_with
from tests.support.reports import printed

pytestmark = pytest.mark.django_db

TOPICS = {
    "timed": {"TYPE": "fixed_time", "SLOTS": 1},
    "ranked": {"TYPE": "priority", "SLOTS": 1},
    "merging": {"TYPE": "range_merge", "SLOTS": 1, "TIME_RANGE": 1},
    "keyed": {"TYPE": "fixed_time", "SLOTS": 1, "IDENTITY": "key"},
    "line": {"TYPE": "fifo", "SLOTS": 1},
}
NINES = "9" * 400
HOSTILE = [
    *(NINES, "-" + NINES, "9" * 4000, "1e400", "-1e400", "1e308", "9007199254740993"),
    *("true", "-1", '"5"', "[]"),
]


@pytest.fixture
def broker() -> Iterator[OracleBroker]:
    found = OracleBroker("m:")
    with project_on(found, TOPICS=TOPICS, API={"SEND_RATE": None}):
        yield found


REQUESTS = {
    "send time_range_ms": ("topics/merging/messages/", '{"body": 1, "time_range_ms": NUMBER}'),
    "send priority": ("topics/ranked/messages/", '{"body": 1, "priority": NUMBER}'),
    "send fixed_time": ("topics/timed/messages/", '{"body": 1, "fixed_time": NUMBER}'),
    "send expires": ("topics/keyed/messages/", '{"body": 1, "fixed_time": 4000000000000, "expires": NUMBER}'),
    "send delay_ms": ("topics/line/messages/", '{"body": 1, "delay_ms": NUMBER}'),
    "send max_retries": ("topics/line/messages/", '{"body": 1, "max_retries": NUMBER}'),
    "send timeout": ("topics/line/messages/", '{"body": 1, "timeout": NUMBER}'),
    "reschedule due": ("topics/timed/messages/0.MQ/reschedule/", '{"due": NUMBER}'),
    "reschedule priority": ("topics/ranked/messages/0.MQ/reschedule/", '{"priority": NUMBER}'),
    "replay limit": ("topics/timed/replay/", '{"filter": {}, "limit": NUMBER}'),
    "replay older_than": ("topics/timed/replay/", '{"filter": {"older_than": NUMBER}}'),
    "replay slot": ("topics/timed/replay/", '{"filter": {"slot": NUMBER}}'),
    "purge older_than": ("topics/timed/purge/", '{"state": "dead", "older_than": NUMBER}'),
    "prepare max": ("topics/timed/prepare/", '{"consumer": "CONSUMER", "max": NUMBER}'),
    "prepare wait": ("topics/timed/prepare/", '{"consumer": "CONSUMER", "wait": NUMBER}'),
    "prepare first": ("topics/timed/prepare/", '{"consumer": "CONSUMER", "held": true, "first": NUMBER}'),
    "rollback delay": (
        "topics/timed/rollback/",
        '{"deliveries": [{"id": "0.MQ", "receipt": "1.0", "delay": NUMBER}]}',
    ),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_rest_refuses_a_number_out_of_bounds(broker: OracleBroker, name: str) -> None:
    program, (path, body) = Program(user_with(*ALL)), REQUESTS[name]
    for number in HOSTILE:
        asked = body.replace("NUMBER", number).replace("CONSUMER", str(uuid.UUID(int=1)))
        answer = program("POST", path, asked)
        assert answer.status_code == 400, (number[:20], answer.content)
        assert answer.json()["code"] in ("invalid", "invalid_json", "invalid_message", "invalid_request")
    # Requests count against the rate of their user, whatever they hold.
    assert not [key for key in broker.keyspace if not key.startswith(b"bucket_")]


@pytest.mark.parametrize(
    "query", ["older_than=NUMBER", "newer_than=NUMBER", "slot=NUMBER", "page_size=NUMBER"]
)
def test_rest_refuses_such_a_number_in_an_address(broker: OracleBroker, query: str) -> None:
    program = Program(user_with(*ALL))
    for number in [*HOSTILE, "nan", "inf", "-inf"]:
        asked = query.replace("NUMBER", number)
        program.refused(400, "invalid", "GET", f"topics/timed/messages/?{asked}&state=dead")


ADMIN = {
    "merging": ("time_range", [NINES, "9" * 5000, "-1", "0", "1e400", "nan", "inf", "31622400001"]),
    "ranked": ("priority", [NINES, "9" * 5000, "-1", "16", "1e400", "nan", "8796093022209"]),
    "timed": ("fixed_time", ["9999-12-31T23:59:59", "0001-01-01T00:00:00", "2100-01-01T00:00:01", NINES]),
}


@pytest.mark.parametrize("topic", ADMIN)
def test_the_admins_forms_refuse_a_number_out_of_bounds(broker: OracleBroker, topic: str) -> None:
    client = Client()
    client.force_login(User.objects.create_superuser(f"boss-{topic}"))
    field, hostile = ADMIN[topic]
    for number in hostile:
        answer = client.post(
            reverse("admin:django_rmq_topic_send", args=(topic,)), {"body": "1", field: number}
        )
        assert answer.status_code == 200
        assert b"errorlist" in answer.content, number[:20]
    assert not any(key.startswith(b"m:") for key in broker.keyspace)


COMMANDS = [
    ("rmqsend", "merging", "1", "--time-range"),
    ("rmqsend", "ranked", "1", "--priority"),
    ("rmqsend", "timed", "1", "--in"),
    ("rmqreplay", "timed", "--all", "--limit"),
    ("rmqreplay", "timed", "--all", "--rate"),
    ("rmqreplay", "timed", "--older-than"),
    ("rmqreplay", "timed", "--slot"),
    ("rmqpurge", "timed", "--state", "dead", "--no-input", "--older-than"),
    ("rmqhealth", "--max-age"),
    ("rmqhealth", "--max-dead"),
    ("rmqstats", "--interval"),
    ("rmqreslot", "timed"),
    ("rmqreslot", "timed", "2", "--at-once"),
    ("runrmqconsumers", "--shutdown-timeout"),
    ("runrmqconsumers", "--max-memory"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_the_commands_refuse_a_number_out_of_bounds(broker: OracleBroker, command: tuple[str, ...]) -> None:
    for number in (NINES, "9" * 5000, "1e400", "nan", "inf", "1e308"):
        with pytest.raises(CommandError) as caught:
            printed(*command, number)
        assert caught.value.returncode in (1, 2)
        assert len(str(caught.value)) < 6_000


@pytest.mark.parametrize("name", ["time_range", "priority", "fixed_time", "expires"])
def test_json_lines_with_a_number_out_of_bounds_are_refused(
    broker: OracleBroker, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = {"time_range": "merging", "priority": "ranked"}.get(name, "keyed")
    rest = ', "fixed_time": 4000000000000' if name == "expires" else ""
    # A duration may be text, and have a fraction.
    refused = [number for number in HOSTILE if not (name == "time_range" and number in ('"5"', "0.5", "1.5"))]
    for number in [*refused, "NaN", "Infinity", "[" * 100_000]:
        line = f'{{"body": 1, "{name}": {number}{rest}}}'.encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(line)))
        with pytest.raises(CommandError, match="line 1") as caught:
            printed("rmqsend", topic, "--jsonl", "--options")
        assert caught.value.returncode == 2
    assert json.dumps(sorted(map(repr, broker.keyspace))) == "[]"
