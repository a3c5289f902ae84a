"""REST: what programs may see and do, on a real Redis."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

import pytest
from django.contrib.admin.models import LogEntry
from django.test import override_settings
from rest_framework.authtoken.models import Token

from django_rmq import connections
from django_rmq.api import actions, messages
from django_rmq.api.permissions import TopicPermission
from django_rmq.api.probes import PublicView
from django_rmq.api.view import RmqView
from django_rmq.conf import get_config
from django_rmq.core.commands import stored_results
from django_rmq.core.model.delivered_message import message_id
from django_rmq.message_ids import from_base64url, sealed_id
from django_rmq.operations import Permission as Needed
from tests.support.brokers import OracleBroker, intercept, project_on
from tests.support.programs import (
    ALL,
    Program,
    broker_of_project,
    kill_all,
    requests_of_routes,
    user_with,
    views,
)
from tests.support.sends import waiting

pytestmark = pytest.mark.django_db

TOPICS = {
    "timed": {"TYPE": "fixed_time", "SLOTS": 4, "BACKOFF": 0, "MAX_RETRIES": 1},
    "ranked": {"TYPE": "priority", "SLOTS": 1},
    "merging": {"TYPE": "range_merge", "SLOTS": 4, "TIME_RANGE": 60},
    "keyed": {"TYPE": "fixed_time", "SLOTS": 4, "IDENTITY": "key"},
    "raw": {"TYPE": "priority", "SLOTS": 2, "BODY": "bytes"},
    "small": {"TYPE": "priority", "SLOTS": 1, "MAX_BACKLOG": 2, "MAX_BODY": 100},
}
LATER = int(time.time() * 1000) + 86_400_000


@pytest.fixture
def broker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Topics of every kind."""
    monkeypatch.setattr(actions, "SLICE_SECONDS", 60.0)
    yield from broker_of_project(request, TOPICS=TOPICS)


@pytest.fixture
def program(broker: Any) -> Program:
    return Program(user_with(*ALL))


def put(program: Program, topic: str, body: Any) -> Any:
    """Send a message, or several."""
    return program.ok("POST", f"topics/{topic}/messages/", body, 202)


def test_every_method_of_every_route_names_a_permission_or_is_public() -> None:
    public = []
    for route, view in views():
        names = set(view.http_method_names) - {"head", "options"}
        methods = {name.upper() for name in names if hasattr(view, name)}
        assert methods, route
        if issubclass(view, PublicView):
            public.append(route)
        else:
            assert issubclass(view, RmqView), route
            assert set(view.needs) == methods, route
    assert public == ["health/live/", "health/ready/"]


@pytest.mark.parametrize(("method", "path", "needed"), list(requests_of_routes()))
def test_nobody_does_what_is_not_permitted(broker: Any, method: str, path: str, needed: Needed) -> None:
    anonymous = Program().refused(401, "not_authenticated", method, path)
    assert anonymous["WWW-Authenticate"] == "Token"
    others = Program(user_with(*(one for one in ALL if one is not needed)))
    refused = others.refused(403, "permission_denied", method, path)
    assert needed.full_name in refused.json()["detail"]
    allowed = Program(user_with(needed, Needed.VIEW))(method, path, {})
    assert allowed.status_code not in (401, 403)


def test_a_method_that_a_route_does_not_have_is_405(program: Program) -> None:
    program.refused(405, "method_not_allowed", "PUT", "topics/")
    assert program("HEAD", "topics/").status_code == 200


def test_a_send_says_what_became_of_each_message(program: Program) -> None:
    body = {"body": {"n": 1}, "fixed_time": LATER}
    (first,) = put(program, "timed", body)["results"]
    assert (first["status"], first["score"]) == ("stored", LATER)
    many = {"messages": [body, {"body": {"n": 2}, "fixed_time": "2099-01-31T12:00:00+01:00"}]}
    answer = put(program, "timed", many)
    assert [one["status"] for one in answer["results"]] == ["replaced", "stored"]
    assert answer["outcomes"] == {"replaced": 1, "stored": 1}
    assert answer["results"][0]["id"] == first["id"]
    assert put(program, "merging", {"body": 1})["outcomes"] == {"stored": 1}
    assert put(program, "merging", {"body": 1})["outcomes"] == {"merged": 1}


def test_keyed_messages_take_headers_and_raw_ones_base64(program: Program) -> None:
    sent = {"body": [1], "key": "a/b", "headers": {"x": "y"}, "fixed_time": LATER, "expires": LATER + 1}
    (one,) = put(program, "keyed", sent)["results"]
    (copy,) = program.ok("GET", f"topics/keyed/messages/{one['id']}/")["results"]
    assert (copy["body"], copy["key"], copy["headers"]) == ([1], "a/b", {"x": "y"})
    assert copy["expires_ms"] == LATER + 1
    raw = {"body": "AP8=", "priority": 100}
    (one,) = put(program, "raw", raw)["results"]
    assert one["id"].endswith(".AP8")
    (copy,) = program.ok("GET", f"topics/raw/messages/{one['id']}/")["results"]
    assert (copy["body"], copy["encoding"], copy["priority"]) == ("AP8=", "base64", 100)
    program.refused(400, "invalid_message", "POST", "topics/raw/messages/", {"body": "?", "priority": 100})
    program.refused(400, "invalid_message", "POST", "topics/raw/messages/", {"body": [], "priority": 100})


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("timed", {"body": 1}, 400, "invalid_message"),
        ("timed", {"body": 1, "priority": 50}, 400, "invalid_message"),
        ("timed", {"body": 1, "fixed_time": 1}, 400, "invalid_message"),
        ("timed", {"body": 1, "fixed_time": LATER // 1000}, 400, "invalid_message"),
        ("timed", {"body": 1, "fixed_time": "2099-01-31T12:00:00"}, 400, "invalid"),
        ("timed", {"body": 1, "fixed_time": "0001-01-01T00:00:00+12:00"}, 400, "invalid_message"),
        ("timed", {"body": 1, "fixed_time": True}, 400, "invalid"),
        ("timed", {"fixed_time": LATER}, 400, "invalid"),
        ("timed", {"body": 1, "fixed_time": LATER, "color": 1}, 400, "invalid"),
        ("timed", {"messages": []}, 400, "invalid"),
        ("timed", {"messages": [{"body": 1}] * 1001}, 400, "invalid"),
        ("timed", {"messages": 1}, 400, "invalid"),
        ("timed", {"messages": [{"body": 1, "fixed_time": LATER}, 3]}, 400, "invalid"),
        ("timed", [], 400, "invalid"),
        ("timed", 3, 400, "invalid"),
        ("timed", None, 400, "invalid"),
        ("timed", "{", 400, "invalid_json"),
        ("timed", '{"body": NaN}', 400, "invalid_json"),
        ("timed", '{"body": 1, "body": 2}', 400, "invalid_json"),
        ("timed", '{"body": {"a": 1, "a": 1}}', 400, "invalid_json"),
        ("timed", '{"body": "\\ud800"}', 400, "invalid_json"),
        ("timed", '{"body": ' + "[" * 500 + "]" * 500 + "}", 400, "invalid_json"),
        ("timed", "[" * 100_000, 400, "invalid_json"),
        ("timed", b'\xff{"body": 1}', 400, "invalid_json"),
        ("timed", b'\xef\xbb\xbf{"body": 1}', 400, "invalid_json"),
        ("timed", '{"body": ' + "9" * 5000 + "}", 400, "invalid_json"),
        ("ranked", {"body": 1, "priority": "50"}, 400, "invalid"),
        ("ranked", {"body": 1, "priority": True}, 400, "invalid"),
        ("ranked", {"body": 1, "priority": 50.5}, 400, "invalid"),
        ("ranked", {"body": 1, "priority": 3}, 400, "invalid_message"),
        ("ranked", {"body": 1, "priority": 50, "key": "k"}, 400, "invalid_message"),
        ("small", {"body": "x" * 200, "priority": 50}, 413, "message_too_large"),
        ("nosuch", {"body": 1}, 404, "topic_not_found"),
        ("%00", {"body": 1}, 404, "topic_not_found"),
        ("%ff", {"body": 1}, 404, "topic_not_found"),
    ],
)  # fmt: skip
def test_what_cannot_be_sent_is_refused_with_a_code(
    program: Program, path: str, body: Any, status: int, code: str
) -> None:
    program.refused(status, code, "POST", f"topics/{path}/messages/", body)


def test_nothing_is_sent_if_one_message_cannot_be(program: Program) -> None:
    many = {"messages": [{"body": 1, "priority": 50}, {"body": 2, "priority": 1}]}
    refused = program.refused(400, "invalid_message", "POST", "topics/ranked/messages/", many)
    assert "item 1" in refused.json()["detail"]
    assert program.ok("GET", "topics/ranked/")["waiting"] == 0


def test_only_json_of_a_bounded_size_is_taken(program: Program) -> None:
    path = "/api/rmq/topics/timed/messages/"
    answer = program.client.generic("POST", path, "a=b", content_type="application/x-www-form-urlencoded")
    assert (answer.status_code, answer.json()["code"]) == (415, "unsupported_media_type")
    answer = program.client.generic("POST", path, "{}", content_type="application/json; charset=rot13")
    assert answer.status_code == 400
    answer = program("POST", "topics/timed/messages/", "{}", Content_Encoding="gzip")
    assert answer.status_code == 415
    chunked: dict[str, Any] = {"HTTP_TRANSFER_ENCODING": "chunked", "CONTENT_LENGTH": ""}
    answer = program.client.generic("POST", path, '{"body":1}', "application/json", **chunked)
    assert (answer.status_code, answer.json()["code"]) == (411, "length_required")
    program.refused(413, "body_too_large", "POST", "topics/timed/messages/", '"' + "x" * 1_048_576 + '"')
    program.refused(406, "not_acceptable", "GET", "topics/", Accept="text/csv")
    small = {"REDIS": "redis://127.0.0.1:1/0", "TOPICS": TOPICS, "API": {"MAX_BYTES": 1024}}
    with override_settings(RMQ=small):
        program.refused(413, "body_too_large", "POST", "topics/timed/messages/", '"' + "x" * 1024 + '"')


def test_a_full_topic_is_507_and_a_part_that_is_refused_is_told(program: Program) -> None:
    many = {"messages": [{"body": n, "priority": 50} for n in range(3)]}
    answer = put(program, "small", many)
    assert answer["outcomes"] == {"stored": 2, "refused": 1}
    assert answer["results"][2]["score"] is None
    one = {"body": 9, "priority": 50}
    refused = program.refused(507, "topic_full", "POST", "topics/small/messages/", one)
    assert int(refused["Retry-After"]) > 0


def test_no_message_of_a_list_is_sent_if_one_is_invalid(program: Program, broker: Any) -> None:
    many = [{"body": 1, "priority": 50}, {"body": 2, "priority": 3}]
    program.refused(400, "invalid_message", "POST", "topics/small/messages/", {"messages": many})
    assert put(program, "small", many[0])["outcomes"] == {"stored": 1}


def test_a_request_with_a_key_is_done_once(broker: Any) -> None:
    user = user_with(*ALL)
    program, path = Program(user), "topics/merging/messages/"
    first = program.ok("POST", path, {"body": 1}, 202, Idempotency_Key="k1")
    assert first["outcomes"] == {"stored": 1}
    assert program.ok("POST", path, {"body": 1}, 202, Idempotency_Key="k1") == first
    program.refused(422, "idempotency_key_reused", "POST", path, {"body": 2}, Idempotency_Key="k1")
    elsewhere = ("POST", "topics/keyed/messages/", {"body": 1, "fixed_time": LATER})
    program.refused(422, "idempotency_key_reused", *elsewhere, Idempotency_Key="k1")
    assert program.ok("POST", path, {"body": 1}, 202, Idempotency_Key="k2")["outcomes"] == {"merged": 1}
    others = Program(user_with(*ALL)).ok("POST", path, {"body": 1}, 202, Idempotency_Key="k1")
    assert others["outcomes"] == {"merged": 1}
    program.refused(400, "invalid_request", "POST", path, {"body": 1}, Idempotency_Key="x" * 256)
    many = {"messages": [{"body": n} for n in range(101)]}
    program.refused(400, "invalid_request", "POST", path, many, Idempotency_Key="k3")


def test_what_failed_may_be_tried_again_with_the_same_key(program: Program) -> None:
    body = {"body": 1, "priority": 50}
    path = "topics/small/messages/"
    ids = [program.ok("POST", path, {"body": n, "priority": 50}, 202)["results"][0]["id"] for n in (7, 8)]
    program.refused(507, "topic_full", "POST", path, body, Idempotency_Key="k")
    program.ok("DELETE", f"topics/small/messages/{ids[0]}/")
    program.ok("POST", path, body, 202, Idempotency_Key="k")


def test_a_request_that_runs_is_not_done_beside_itself(program: Program, broker: Any) -> None:
    begun: list[Any] = []
    real = broker.begin_request

    def begin(call: Any) -> Any:
        begun.append((call.place.name, *call.own))
        return run(call)

    run = intercept(broker, "stored_results/begin_request", begin)
    request, key = ("POST", "topics/merging/messages/", {"body": 5}), {"Idempotency_Key": "k9"}
    program.ok(*request, 202, **key)
    name, content, *_ = begun[0]
    broker.store_answer(name, "x", b"", 1)
    assert real("f" * 32, content, "t1", 30_000) == ("new", b"")
    assert real("f" * 32, content, "t2", 30_000) == ("running", b"")
    broker.run = run
    third = stored_results.begin_request("f" * 32, content, "t3", 30_000)
    intercept(broker, "stored_results/begin_request", lambda call: run(third))
    refused = program.refused(409, "request_running", *request, **key)
    assert refused["Retry-After"] == "1"


SHAPED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "line": (
        {"TYPE": "fifo", "MAX_IN_FLIGHT": 3},
        {"order": "strict", "on_duplicate": "keep", "max_in_flight": 3},
    ),
    "loose": (
        {
            "TYPE": "fifo",
            "ORDER": "loose",
            "ON_DUPLICATE": "replace",
            "MAX_RATE": {"rate": 10, "per": "slot"},
        },
        {"order": "loose", "on_duplicate": "replace", "slot_rate": 10.0},
    ),
    "debounced": (
        {"TYPE": "range_merge", "TIME_RANGE": "50ms", "DEBOUNCE": True, "MAX_WAIT": "900ms", "MAX_RATE": 2},
        {"max_wait_ms": 900, "max_rate": 2.0},
    ),
    "collecting": (
        {"TYPE": "range_merge", "TIME_RANGE": "50ms", "IDENTITY": "key", "ACCUMULATE": 7},
        {"accumulate": 7},
    ),
}


@pytest.mark.parametrize("name", SHAPED)
def test_the_order_and_the_limits_of_a_topic_are_told(name: str) -> None:
    given, told = SHAPED[name]
    topics = {"it": {"SLOTS": 1, **given}}
    with project_on(OracleBroker("m:"), TOPICS=topics):
        answer = Program(user_with(*ALL)).ok("GET", "topics/it/")
    fields = {"order", "on_duplicate", "max_wait_ms", "accumulate", "max_rate", "slot_rate", "max_in_flight"}
    assert {field: answer[field] for field in fields} == {**dict.fromkeys(fields), **told}


def test_topics_slots_workers_and_stats_are_told(program: Program) -> None:
    put(program, "ranked", {"body": 1, "priority": 50})
    names = [one["name"] for one in program.ok("GET", "topics/")["results"]]
    assert names == list(TOPICS)
    ranked = program.ok("GET", "topics/ranked/")
    assert (ranked["type"], ranked["waiting"], ranked["due"], ranked["partial"]) == ("priority", 1, 1, False)
    found = program.ok("GET", "slots/?topic=timed&first=1&limit=2")
    assert [one["slot"] for one in found["results"]] == [1, 2]
    assert (found["next_slot"], found["slots"]) == (3, 4)
    assert program.ok("GET", "slots/?topic=timed")["next_slot"] is None
    assert program.ok("GET", "slots/?topic=timed&first=99")["results"] == []
    program.refused(400, "invalid", "GET", "slots/")
    program.refused(404, "topic_not_found", "GET", "slots/?topic=nosuch")
    assert program.ok("GET", "workers/") == {"results": [], "vanished": [], "unserved": list(TOPICS)}
    counters = {one["topic"]: one for one in program.ok("GET", "stats/")["results"]}
    assert counters["ranked"] == {"topic": "ranked", "sent": 1, "done": 0, "failed": 0}


@pytest.mark.parametrize("state", ["waiting", "store"])
def test_a_state_is_named_by_its_word_or_its_queue(program: Program, state: str) -> None:
    put(program, "ranked", {"body": 1, "priority": 50})
    (listed,) = program.ok("GET", f"topics/ranked/messages/?state={state}")["results"]
    assert listed["state"] == "waiting"
    assert program.ok("POST", "topics/ranked/purge/", {"state": state})["outcomes"] == {"purged": 1}


def test_a_list_is_read_page_by_page(program: Program) -> None:
    many = {"messages": [{"body": n, "fixed_time": LATER + n} for n in range(25)]}
    put(program, "timed", many)
    seen, address = [], "topics/timed/messages/?page_size=10"
    while address:
        page = program.ok("GET", address)
        seen += [one["body"] for one in page["results"]]
        address = page["next"] and page["next"].partition("/api/rmq/")[2]
    assert seen == list(range(25))
    page = program.ok("GET", "topics/timed/messages/?page_size=1&order=descending")
    assert page["results"][0]["body"] == 24
    program.refused(400, "invalid_request", "GET", f"topics/ranked/messages/?cursor={page['cursor']}")


@pytest.mark.parametrize(
    ("query", "status", "code"),
    [
        *((query, 400, "invalid") for query in ("state=evil", "order=evil", "colour=red", "text=%00")),
        *((query, 400, "invalid") for query in ("page_size=0", "page_size=1e9", "slot=-1")),
        *((query, 400, "invalid") for query in ("older_than=nan", "older_than=-1")),
        *((query, 400, "invalid_request") for query in ("slot=99", "cursor=evil")),
        ("state=retry&older_than=1", 409, "refused"),
        ("state=prepare&error=Boom", 409, "refused"),
    ],
)
def test_a_list_that_cannot_be_is_refused(program: Program, query: str, status: int, code: str) -> None:
    program.refused(status, code, "GET", f"topics/timed/messages/?{query}")


def test_bodies_are_for_those_who_may_see_them(broker: Any) -> None:
    put(Program(user_with(*ALL)), "timed", {"body": "secret", "fixed_time": LATER})
    blind = Program(user_with(Needed.VIEW))
    (copy,) = blind.ok("GET", "topics/timed/messages/")["results"]
    assert (copy["body"], copy["encoding"]) == (None, "hidden")
    assert "secret" not in json.dumps(copy) and message_id(copy["slot"], b'"secret"') != copy["id"]
    assert blind.ok("GET", f"topics/timed/messages/{copy['id']}/")["results"] == [copy]
    blind.refused(403, "permission_denied", "GET", "topics/timed/messages/?text=sec")


def mask(topic: str, body: Any) -> Any:
    return f"***{body[-2:]}"


def test_redacted_bodies_are_shown_to_nobody_and_cannot_be_searched(program: Program, broker: Any) -> None:
    with project_on(broker, TOPICS=TOPICS, ADMIN={"FORMATTER": f"{__name__}.mask"}):
        put(program, "timed", {"body": "secret", "fixed_time": LATER})
        (copy,) = program.ok("GET", "topics/timed/messages/")["results"]
        assert (copy["body"], copy["redacted"]) == ("***et", True)
        assert message_id(copy["slot"], b'"secret"') != copy["id"]
        program.refused(409, "refused", "GET", "topics/timed/messages/?text=sec")
        program.refused(409, "refused", "POST", "topics/timed/replay/", {"filter": {"text": "sec"}})


NAMED = [
    ("timed", {"body": {"n": 1}}, {"body": '{"n": 1}'}),
    ("keyed", {"body": 1, "key": "a/b c"}, {"key": "a/b c"}),
    ("timed", {"body": {"n": 1}, "slot_basis": 7}, {"body": '{"n":1}', "slot_basis": "7"}),
]


@pytest.mark.parametrize(("topic", "sent", "named"), NAMED, ids=str)
def test_a_message_is_named_by_its_body_or_key_as_by_its_id(
    program: Program, topic: str, sent: dict[str, Any], named: dict[str, str]
) -> None:
    def at(act: str = "", **more: str) -> str:
        return f"topics/{topic}/messages/-/{act}?{urlencode({**named, **more})}"

    def send() -> str:
        (one,) = put(program, topic, {**sent, "fixed_time": LATER})["results"]
        return str(one["id"])

    sent_id = send()
    shown = program.ok("GET", at())
    assert (shown["status"]["state"], shown["results"][0]["id"]) == ("waiting", sent_id)
    assert shown == program.ok("GET", f"topics/{topic}/messages/{sent_id}/")
    acted = program.ok("POST", at("reschedule/"), {"due": LATER + 5000})
    assert acted == {"id": sent_id, "outcome": "rescheduled"}
    assert program.ok("GET", at())["status"]["due_ms"] == LATER + 5000
    assert program.ok("POST", at("bury/"), {"why": "test"}) == {"id": sent_id, "outcome": "buried"}
    assert program.ok("POST", at("replay/"), {})["outcome"] == "replayed"
    assert program.ok("POST", at("cancel/")) == {"id": sent_id, "outcome": "deleted"}
    program.refused(404, "message_gone", "POST", at("cancel/"))
    program.refused(404, "message_gone", "GET", at())
    send()
    assert program.ok("POST", at("bury/"), {})["outcome"] == "buried"
    send()
    program.refused(409, "conflict", "DELETE", at())
    for_good = at(copy="dead", keep="false")
    assert program.ok("DELETE", for_good) == {"id": sent_id, "outcome": "deleted"}
    deleted = program.ok("DELETE", at())
    assert deleted == {"id": sent_id, "outcome": "deleted", "undo": deleted["undo"]}
    program.refused(404, "message_gone", "DELETE", at())


@pytest.mark.parametrize(
    ("address", "code"),
    [
        ("timed/messages/-/", "invalid_request"),
        ("timed/messages/-/?slot_basis=7", "invalid_request"),
        ("timed/messages/-/?body={", "invalid_request"),
        ("timed/messages/-/?key=a", "invalid_message"),
        ("timed/messages/-/?text=a", "invalid"),
        ("timed/messages/-/?body=1&copy=live", "invalid"),
        ("keyed/messages/-/?body=1", "invalid_message"),
        ("raw/messages/-/?body=%21", "invalid_message"),
        ("timed/messages/0.MQ/?body=1", "invalid_request"),
        ("timed/messages/-/?key=", "invalid"),
    ],
)
def test_a_name_that_names_no_message_is_refused(program: Program, address: str, code: str) -> None:
    program.refused(400, code, "GET", f"topics/{address}")


@pytest.mark.parametrize(
    ("method", "act"),
    [
        ("GET", ""),
        ("DELETE", ""),
        *(("POST", f"{act}/") for act in ("replay", "bury", "cancel", "reschedule")),
    ],
)
def test_who_may_not_search_bodies_cannot_try_keys_and_bodies_out(broker: Any, method: str, act: str) -> None:
    everything, body = Program(user_with(*ALL)), {"due": LATER} if act == "reschedule/" else {}
    put(everything, "timed", {"body": "secret", "fixed_time": LATER})
    addresses = [f"topics/timed/messages/-/{act}?body=%22{one}%22" for one in ("secret", "other")]
    blind = Program(user_with(*(one for one in ALL if one is not Needed.VIEW_BODIES)))
    told = [blind.refused(403, "permission_denied", method, one, body).content for one in addresses]
    assert told[0] == told[1]
    with project_on(broker, TOPICS=TOPICS, ADMIN={"FORMATTER": f"{__name__}.mask"}):
        told = [everything.refused(409, "refused", method, one, body).content for one in addresses]
    assert told[0] == told[1]
    assert len(everything.ok("GET", "topics/timed/messages/")["results"]) == 1


def test_a_message_is_sent_unless_it_is_there(program: Program) -> None:
    address, sent = "topics/timed/messages/", {"body": {"n": 1}, "fixed_time": LATER, "ensure": True}
    first = program.ok("POST", address, sent, 202)
    assert first["outcomes"] == {"stored": 1}
    again = program.ok("POST", address, {**sent, "fixed_time": LATER + 5000}, 202)
    assert again["outcomes"] == {"present": 1}
    assert again["results"] == [{**first["results"][0], "status": "present"}]
    (based,) = put(program, "keyed", {**sent, "key": "k"})["results"]
    by_id = {**sent, "id": based["id"]}
    assert put(program, "keyed", by_id)["outcomes"] == {"present": 1}
    program.refused(400, "invalid_message", "POST", "topics/keyed/messages/", {**by_id, "key": "k"})
    other = {**sent, "body": 2, "id": first["results"][0]["id"]}
    program.refused(400, "invalid_message", "POST", address, other)
    program.refused(400, "invalid_request", "POST", address, {**sent, "ensure": False, "id": "0.MQ"})
    program.refused(400, "invalid", "POST", address, {"messages": [sent]})
    blind = Program(user_with(Needed.SEND))
    assert blind.ok("POST", address, sent, 202)["outcomes"] == {"present": 1}
    blind.refused(403, "permission_denied", "POST", "topics/keyed/messages/", by_id)


def test_an_ensured_send_counts_for_the_limits_and_is_executed_once_by_key(
    program: Program, broker: Any
) -> None:
    address, sent = "topics/timed/messages/", {"body": 1, "fixed_time": LATER, "ensure": True}
    for _ in range(2):
        answer = program.ok("POST", address, sent, 202, Idempotency_Key="a")
        assert answer["outcomes"] == {"stored": 1}
    with project_on(broker, TOPICS=TOPICS, API={"SEND_RATE": "1/min"}):
        limited = Program(user_with(*ALL))
        limited.ok("POST", address, sent, 202)
        limited.refused(429, "too_many_sends", "POST", address, sent)


@pytest.mark.parametrize("member", [b"NaN", b"1e999", b'"\\ud800"', b"\xff\xfe", b"{" * 60_000])
def test_what_strangers_have_sent_is_shown_whatever_it_is(
    program: Program, broker: Any, member: bytes
) -> None:
    topic = get_config().topic("ranked")
    broker.send_replace(topic, 0, [100], [member])
    (copy,) = program.ok("GET", "topics/ranked/messages/")["results"]
    assert copy["encoding"] == "base64"
    (taken,) = program.ok("POST", "topics/ranked/prepare/", {"consumer": str(uuid.uuid4())})["messages"]
    assert taken["encoding"] == "base64"
    named = [{"id": taken["id"], "receipt": taken["receipt"]}]
    assert program.ok("POST", "topics/ranked/commit/", {"deliveries": named})["outcomes"] == {"ok": 1}


def sent(program: Program, name: str, body: Any, **options: Any) -> str:
    return put(program, name, {"body": body, **options})["results"][0]["id"]


def test_messages_are_buried_replayed_rescheduled_and_deleted(program: Program) -> None:
    one = sent(program, "ranked", {"n": 1}, priority=50)
    path = f"topics/ranked/messages/{one}/"
    assert program.ok("POST", f"{path}reschedule/", {"priority": 70})["outcome"] == "rescheduled"
    program.refused(409, "refused", "POST", f"{path}reschedule/", {"due": LATER})
    program.refused(409, "refused", "POST", f"{path}reschedule/", {})
    assert program.refused(409, "conflict", "POST", f"{path}replay/").json()["outcome"] == "waiting"
    assert program.ok("POST", f"{path}bury/", {"why": "wrong"})["outcome"] == "buried"
    program.refused(409, "conflict", "POST", f"{path}bury/")
    (copy,) = program.ok("GET", path)["results"]
    assert (copy["state"], copy["failed"]) == ("dead", "buried")
    assert re.fullmatch(r"put into Dead by \w+: wrong", copy["error"])
    assert program.ok("POST", f"{path}replay/")["outcome"] == "replayed"
    program.ok("POST", f"{path}bury/")
    assert program.ok("POST", f"{path}replay/", {"body": {"n": 2}})["outcome"] == "replayed"
    program.refused(404, "message_gone", "GET", path)
    program.refused(404, "message_gone", "POST", f"{path}replay/")
    program.refused(404, "message_gone", "DELETE", path)
    program.refused(400, "invalid_request", "GET", "topics/ranked/messages/evil/")
    program.refused(400, "invalid_request", "GET", "topics/ranked/messages/99.MQ/")
    assert program.ok("GET", "topics/ranked/messages/")["results"][0]["body"] == {"n": 2}


def test_a_delete_asks_which_where_there_are_two_copies(program: Program, broker: Any) -> None:
    one = sent(program, "ranked", 1, priority=50)
    path = f"topics/ranked/messages/{one}/"
    program.ok("POST", f"{path}bury/")
    sent(program, "ranked", 1, priority=50)
    assert [copy["state"] for copy in program.ok("GET", path)["results"]] == ["waiting", "dead"]
    assert program.refused(409, "conflict", "DELETE", path).json()["outcome"] == "both"
    program.refused(400, "invalid", "DELETE", f"{path}?copy=evil")
    program.ok("DELETE", f"{path}?copy=live")
    program.ok("DELETE", path)
    sent(program, "ranked", 1, priority=50)
    broker.prepare(get_config().topic("ranked"), 0, "W", None, 1)
    assert program.ok("DELETE", path, status=202)["outcome"] == "running"


def public(plain: str) -> str:
    """Return the id by which the audit trail names a message of `ranked`."""
    slot, _, member = plain.partition(".")
    raw = from_base64url(member)
    assert raw is not None
    return sealed_id("ranked", int(slot), raw)


def test_what_waits_is_cancelled_and_the_consumer_of_what_runs_is_told(program: Program, broker: Any) -> None:
    one, other = (sent(program, "ranked", n, priority=50) for n in (1, 2))
    path = "topics/ranked/messages/{}/cancel/"
    assert program.ok("POST", path.format(one))["outcome"] == "deleted"
    program.refused(404, "message_gone", "POST", path.format(one))
    (taken,) = program.ok("POST", "topics/ranked/prepare/", {"consumer": str(uuid.uuid4())})["messages"]
    assert program.ok("POST", path.format(other), status=202)["outcome"] == "notified"
    held = {"deliveries": [{"id": taken["id"], "receipt": taken["receipt"]}]}
    assert program.ok("POST", "topics/ranked/extend/", held)["outcomes"] == {"cancelled": 1}
    assert program.ok("POST", "topics/ranked/rollback/", held)["outcomes"] == {"cancelled": 1}
    program.refused(404, "message_gone", "GET", f"topics/ranked/messages/{other}/")
    recorded = [str(entry.get_change_message()) for entry in LogEntry.objects.order_by("pk")]
    ends = ("deleted", "gone", "notified")
    assert [one for one in recorded if "Cancel" in one] == [
        f"Cancel (1 chosen: {public(name)}): 1 {end} (rest)"
        for name, end in zip((one, one, other), ends, strict=True)
    ]
    topic = get_config().topic("ranked")
    assert sum(broker.audit_ledger(topic, slot)["cancelled"] for slot in range(topic.slots)) == 1


def test_dead_messages_are_replayed_by_filter_and_by_id(program: Program, broker: Any) -> None:
    many = {"messages": [{"body": n, "priority": 50} for n in range(5)]}
    put(program, "ranked", many)
    kill_all(broker, "ranked")
    path = "topics/ranked/replay/"
    counted = program.ok("POST", path, {"filter": {"error": "Boom"}, "dry_run": True})
    assert (counted["outcomes"], counted["complete"]) == ({"matching": 5}, True)
    assert program.ok("POST", path, {"filter": {"error": "Other"}})["done"] == 0
    part = program.ok("POST", path, {"filter": {}, "limit": 2})
    assert part["outcomes"] == {"replayed": 2} and not part["complete"]
    dead = [one["id"] for one in program.ok("GET", "topics/ranked/messages/?state=dead")["results"]]
    done = program.ok("POST", path, {"ids": dead[:2]})
    assert [one["outcome"] for one in done["results"]] == ["replayed", "replayed"]
    for asked in ({}, {"ids": dead, "filter": {}}, {"dry_run": True}):
        program.refused(400, "invalid_request", "POST", path, asked)
    wrong: list[Any] = [{"ids": dead, "dry_run": True}, [], {"filter": {"slot": "1"}}]
    for asked in wrong:
        program.refused(400, "invalid", "POST", path, asked)
    assert program.ok("POST", path, {"filter": {}})["complete"] is True


def test_all_that_matches_is_rescheduled(program: Program) -> None:
    sends = [{"body": {"n": n}, "priority": 10_000} for n in range(30)]
    put(program, "ranked", {"messages": sends})
    path = "topics/ranked/reschedule/"
    for asked, matching in (({}, 30), ({"text": '"n":1'}, 11), ({"priority": 3}, 0)):
        found = program.ok("POST", path, {"filter": asked, "priority": 900, "dry_run": True})
        assert found["outcomes"] == {"matching": matching}
    found = program.ok("POST", path, {"filter": {}, "priority": 900, "limit": 20})
    assert (found["outcomes"], found["complete"]) == ({"rescheduled": 20}, False)
    found = program.ok("POST", path, {"filter": {}, "priority": 900})
    assert (found["outcomes"], found["complete"]) == ({"rescheduled": 10}, True)
    assert len(program.ok("GET", "topics/ranked/messages/?priority=900&page_size=50")["results"]) == 30
    assert program.ok("GET", "topics/ranked/messages/?priority=901")["results"] == []
    program.refused(409, "refused", "GET", "topics/timed/messages/?priority=900")
    found = program.ok("POST", path, {"filter": {"priority": 900}, "priority": 901})
    assert found["outcomes"] == {"rescheduled": 30}
    program.refused(409, "refused", "POST", path, {"filter": {}, "due": "2030-01-01T00:00:00Z"})
    program.refused(409, "refused", "POST", path, {"filter": {}, "priority": 900, "state": "resting"})
    by_priority = {"filter": {"priority": 9}, "due": "2030-01-01T00:00:00Z"}
    program.refused(409, "refused", "POST", "topics/timed/reschedule/", by_priority)
    program.refused(400, "invalid", "POST", path, {"priority": 900})
    program.refused(400, "invalid", "POST", path, {"filter": {}, "priority": 900, "state": "dead"})


def test_a_topic_is_purged_paused_and_resumed(program: Program) -> None:
    sent(program, "timed", 1, fixed_time=LATER)
    path = "topics/timed/purge/"
    assert program.ok("POST", path, {"state": "waiting", "dry_run": True})["outcomes"] == {"matching": 1}
    assert program.ok("POST", path, {"state": "waiting"})["outcomes"] == {"purged": 1}
    program.refused(400, "invalid", "POST", path, {"state": "running"})
    program.refused(400, "invalid", "POST", path, {})
    program.refused(409, "refused", "POST", "topics/ranked/purge/", {"state": "waiting", "older_than": 1})
    assert program.ok("POST", "topics/timed/pause/")["outcomes"] == {"paused": 4}
    assert program.ok("GET", "topics/timed/")["paused_slots"] == 4
    assert program.ok("POST", "topics/timed/resume/")["outcomes"] == {"resumed": 4}


def test_dead_messages_are_grouped_by_cause_and_a_cause_selects_them(
    program: Program, broker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "READ_SECONDS", 600.0)
    for name, error, count in (
        ("timed", "shop.Boom: order {}", 3),
        ("timed", "Other: {}", 1),
        ("ranked", "shop.Boom: {}", 2),
    ):
        for n in range(count):
            topic = get_config().topic(name)
            broker.send_replace(topic, n % topic.slots, [1_000], [json.dumps([error, n]).encode()])
            kill_all(broker, name, error.format(n))
    found = program.ok("GET", "causes/")
    shown = [(one["topic"], one["error_class"], one["error"], one["count"]) for one in found["results"]]
    assert shown == [
        ("timed", "shop.Boom", "order #", 3),
        ("ranked", "shop.Boom", "#", 2),
        ("timed", "Other", "#", 1),
    ]
    assert (found["looked_at"], found["total"], found["complete"], found["unread"]) == (6, 6, True, 0)
    (first,) = [one for one in found["results"] if one["error"] == "order #"]
    assert (first["share"], sum(count for _hour, count in first["hours"])) == (0.75, 3)
    samples = [program.ok("GET", f"topics/timed/messages/{one}/")["results"] for one in first["samples"]]
    assert len({copies[0]["id"] for copies in samples}) == 3
    assert program.ok("GET", "causes/?topic=ranked&limit=1")["looked_at"] == 1
    listed = program.ok("GET", f"topics/timed/messages/?state=dead&cause={first['cause']}")["results"]
    assert {one["error"] for one in listed} == {f"shop.Boom: order {n}" for n in range(3)}
    chosen = {"filter": {"cause": first["cause"]}}
    assert program.ok("POST", "topics/timed/replay/", chosen)["outcomes"] == {"replayed": 3}
    program.refused(404, "topic_not_found", "GET", "causes/?topic=nosuch")
    for query in ("limit=0", "limit=1000001", "other=1"):
        program.refused(400, "invalid", "GET", f"causes/?{query}")
    classes = Program(user_with(Needed.VIEW)).ok("GET", "causes/?topic=ranked")["results"]
    assert [(one["error_class"], one["error"]) for one in classes] == [("shop.Boom", "")]
    Program(user_with(Needed.SEND)).refused(403, "permission_denied", "GET", "causes/")


class OnlyTimed(TopicPermission):
    """Knows of one topic."""

    def has_object_permission(self, request: Any, view: Any, obj: Any) -> bool:
        return obj.name == "timed" and view.needed is not Needed.PURGE


def test_a_hidden_topic_is_answered_like_one_that_does_not_exist(program: Program, broker: Any) -> None:
    rmq = {"REDIS": "redis://127.0.0.1:1/0", "TOPICS": TOPICS, "API": {"PERMISSION": f"{__name__}.OnlyTimed"}}
    with override_settings(RMQ=rmq), connections.replaced_broker(broker):
        assert [one["name"] for one in program.ok("GET", "topics/")["results"]] == ["timed"]
        assert [one["topic"] for one in program.ok("GET", "stats/")["results"]] == ["timed"]
        findings = program.ok("GET", "health/ready?workers=true", status=503)["findings"]
        assert {one["topic"] for one in findings} == {None, "timed"}
        told = []
        for name in ("ranked", "nosuch"):
            for method, path, _ in requests_of_routes():
                if "timed" in path:
                    path = path.replace("timed", name)
                    refused = program.refused(404, "topic_not_found", method, path, {"body": 1})
                    told.append(refused.json()["detail"].replace(name, "?"))
            program.refused(404, "topic_not_found", "GET", f"slots/?topic={name}")
        assert set(told) == {"There is no topic '?'."}
        program.refused(404, "topic_not_found", "POST", "topics/timed/purge/", {"state": "dead"})
        Program().refused(401, "not_authenticated", "GET", "topics/timed/")
    rmq["API"] = {"PERMISSION": "rest_framework.permissions.AllowAny"}
    with override_settings(RMQ=rmq), connections.replaced_broker(broker):
        Program().refused(401, "not_authenticated", "GET", "topics/")
    rmq["API"] = {"PERMISSION": "no.such"}
    with override_settings(RMQ=rmq), connections.replaced_broker(broker):
        program.refused(503, "misconfigured", "GET", "topics/")


def test_health_is_told_to_anybody_and_details_to_those_who_may_see_topics(program: Program) -> None:
    assert Program().ok("GET", "health/live") == {"ok": True}
    assert Program().ok("GET", "health/ready") == {"ok": True}
    assert Program()("GET", "health/ready")["Cache-Control"] == "no-store"
    found = program.ok("GET", "health/ready")
    assert found["ok"] and found["findings"][0]["check"] == "redis"
    assert program.ok("GET", "health/ready?workers=true", status=503)["ok"] is False
    program.refused(400, "invalid", "GET", "health/ready?max_age=nan")
    Program().refused(401, "not_authenticated", "GET", "health/ready?workers=true")
    Program(user_with()).refused(403, "permission_denied", "GET", "health/ready?workers=true")


def test_a_projects_settings_of_the_rest_framework_change_nothing_but_who_asks(program: Program) -> None:
    theirs = {
        "UNAUTHENTICATED_USER": None,
        "EXCEPTION_HANDLER": "no.such.handler",
        "DEFAULT_THROTTLE_CLASSES": ["rest_framework.throttling.UserRateThrottle"],
        "URL_FORMAT_OVERRIDE": "output",
        "COERCE_DECIMAL_TO_STRING": False,
        "DEFAULT_RENDERER_CLASSES": [],
        "NON_FIELD_ERRORS_KEY": "__all__",
    }
    with override_settings(REST_FRAMEWORK=theirs):
        program.refused(404, "topic_not_found", "GET", "topics/nosuch/?format=evil")
        Program().refused(401, "not_authenticated", "GET", "topics/")
        assert Program().ok("GET", "health/ready") == {"ok": True}


def test_the_metrics_are_among_the_routes(broker: Any) -> None:
    found = Program(user_with(Needed.VIEW))("GET", "metrics")
    assert found.status_code == 200 and b"\nrmq_messages{" in found.content, found.content[:500]
    Program(user_with(Needed.SEND)).refused(403, "permission_denied", "GET", "metrics")
    Program().refused(401, "not_authenticated", "GET", "metrics")
    Program(user_with(Needed.VIEW)).refused(405, "method_not_allowed", "POST", "metrics")
    # As Prometheus asks, with a token of the REST framework's.
    token = Token.objects.create(user=user_with(Needed.VIEW))
    accept = {"Accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"}
    scraped = Program()("GET", "metrics", Authorization=f"Token {token.key}", **accept)
    assert scraped.status_code == 200 and scraped.content.endswith(b"# EOF\n")
    assert scraped["Content-Type"].startswith("application/openmetrics-text")
    Program().refused(401, "authentication_failed", "GET", "metrics", Authorization="Token wrong", **accept)


def test_who_must_not_know_of_all_topics_gets_no_metrics_but_with_their_own_token(broker: Any) -> None:
    hidden = {"API": {"PERMISSION": f"{__name__}.OnlyTimed"}, "METRICS": {"TOKEN": "a-token-of-prometheus"}}
    with project_on(broker, TOPICS=TOPICS, **hidden):
        Program(user_with(Needed.VIEW)).refused(403, "permission_denied", "GET", "metrics")
        shown = {"Authorization": "Bearer a-token-of-prometheus"}
        scraped = Program()("GET", "metrics", **shown)
        assert scraped.status_code == 200 and scraped["Cache-Control"] == "no-store"
        assert b"\nrmq_messages{" in scraped.content
        other = {"Authorization": "Bearer another-token-of-it"}
        Program().refused(401, "not_authenticated", "GET", "metrics", **other)


def test_a_body_goes_through_rest_with_the_numbers_that_it_had(program: Program) -> None:
    body = '{"amount":12345678901234567.89,"rate":1.50,"small":1e-7}'
    sent = put(program, "timed", f'{{"body":{body},"fixed_time":{LATER}}}')
    assert waiting("timed") == [body.encode()]
    shown = program("GET", f"topics/timed/messages/{sent['results'][0]['id']}/")
    assert f'"body":{body}'.encode() in shown.content
    request = ("POST", "topics/merging/messages/")
    first = program.ok(*request, f'{{"body":{body}}}', 202, Idempotency_Key="k")
    assert program.ok(*request, f'{{"body":{body}}}', 202, Idempotency_Key="k") == first
    other = body.replace("1.50", "1.5")
    program.refused(422, "idempotency_key_reused", *request, f'{{"body":{other}}}', Idempotency_Key="k")
    refused = program.refused(400, "invalid_json", "POST", "topics/timed/messages/", '{"body": 1e999}')
    assert "out of range" in refused.json()["detail"]
