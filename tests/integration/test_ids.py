"""Ids and cursors: what they give away (nothing), how long they are, and that every message in a list is found again."""

from __future__ import annotations

import hashlib
import html
import json
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlencode
from uuid import uuid4

import pytest
from django.contrib.admin.utils import quote
from django.test import Client, override_settings
from django.urls import reverse

from django_rmq import connections, message_ids
from django_rmq.conf import get_config
from django_rmq.core.model.delivered_message import message_id
from django_rmq.core.model.replies import Failure
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import InvalidRequest, MessageGone, OperationRefused
from django_rmq.message_ids import sealed_id
from django_rmq.operations import Actor, Filter, MessageCopy, Operations, Permission
from django_rmq.operations.consumption import SettledDelivery
from tests.support.brokers import Broker
from tests.support.programs import Program, broker_of_project, kill, put, user_with
from tests.support.sends import everything

TOPICS = {
    "ranked": {"TYPE": "priority", "SLOTS": 1, "BACKOFF": 60},
    "timed": {"TYPE": "fixed_time", "SLOTS": 2, "BACKOFF": 60, "TIMEOUT": 600},
    "redacted": {"TYPE": "priority", "SLOTS": 1, "BACKOFF": 60},
    "redacted.keyed": {"TYPE": "priority", "SLOTS": 1, "IDENTITY": "key", "BACKOFF": 60},
}
ALL_BUT_BODIES = frozenset(Permission) - {Permission.VIEW_BODIES}
RMQ = {
    "TOPICS": TOPICS,
    "ADMIN": {
        "FORMATTER": dict.fromkeys(("redacted", "redacted.keyed"), f"{__name__}.mask"),
        "PAGE_SIZE": 25,
    },
}
LONGEST_REQUEST_LINE = 4_094
"""Bytes that gunicorn takes of a request's first line."""
LONGEST_CLASS = "C" + "<" * 199


def mask(topic: str, body: Any) -> Any:
    return "masked"


@pytest.fixture
def broker(request: pytest.FixtureRequest) -> Iterator[Broker]:
    yield from broker_of_project(request, **RMQ)


@contextmanager
def at_most(broker: Broker, scripts: int) -> Iterator[None]:
    """Hold that Redis runs no more scripts than that."""
    before = run_scripts(broker)
    yield
    ran = run_scripts(broker) - before
    assert ran <= scripts, f"{ran} scripts ran"


def run_scripts(broker: Broker) -> int:
    found = broker.client.info("commandstats")
    return sum(found.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("eval", "evalsha"))


def person(*permissions: Permission) -> Operations:
    return Operations(Actor("somebody", "rest", None, permissions.__contains__))


def viewer() -> Operations:
    return person(*ALL_BUT_BODIES)


def boss() -> Operations:
    return person(*Permission)


def shell() -> Operations:
    return Operations(Actor("somebody", "command"))


def topic_of(name: str) -> Topic:
    return get_config().topic(name)


SECRET = b'{"card":"4111111199997777"}'
WRONG = b'{"card":"4111111199997778"}'


@pytest.mark.slow
@pytest.mark.django_db
@pytest.mark.parametrize("name", ["ranked", "redacted", "redacted.keyed"])
def test_a_right_guess_is_answered_as_a_wrong_one(broker: Any, name: str) -> None:
    """By each route, for whoever sees no bodies, and for everybody where they are redacted."""
    blind = Program(user_with(*ALL_BUT_BODIES))
    askers = [blind] if name == "ranked" else [blind, Program(user_with(*Permission))]
    for state in ("store", "dead", "retry", "prepare"):
        (kill if state == "dead" else put)(broker, name, SECRET)
        if state in ("prepare", "retry"):
            taken = broker.prepare(topic_of(name), 0, "W", None, 1)
            if state == "retry":
                broker.rollback(topic_of(name), 0, taken.receipt, [Failure(SECRET)])
        before = json.dumps(blind.ok("GET", f"topics/{name}/"), sort_keys=True)
        for ask in askers:
            answers = []
            for guess in (SECRET, WRONG):
                named = message_id(0, guess)
                one = f"topics/{name}/messages/{named}/"
                told = [
                    ask("GET", one),
                    *(ask("DELETE", f"{one}{query}") for query in ("", "?copy=live", "?copy=dead")),
                    *(ask("POST", f"{one}{act}/", {}) for act in ("replay", "bury")),
                    ask("POST", f"{one}reschedule/", {"priority": 100}),
                    ask("POST", f"topics/{name}/replay/", {"ids": [named]}),
                ]
                answers.append(
                    [(each.status_code, each.content.decode().replace(named, "")) for each in told]
                )
            assert answers[0] == answers[1]
            assert {status for status, _ in answers[0]} == {200, 404}
        after = json.loads(blind("GET", f"topics/{name}/").content)
        clocks = {"now_ms": 0, "undrained_ms": 0, "running_ms": 0}
        assert {**json.loads(before), **clocks} == {**after, **clocks}
        shell().delete(name, [message_id(0, SECRET)], "dead" if state == "dead" else "live")


@pytest.mark.parametrize("operations", [viewer, boss])
def test_a_guess_makes_redis_do_nothing_whether_it_is_right_or_wrong(
    broker: Broker, operations: Callable[[], Operations]
) -> None:
    kill(broker, "redacted", SECRET)
    for guess in (SECRET, WRONG):
        named = message_id(0, guess)
        with at_most(broker, 0):
            with pytest.raises(MessageGone):
                operations().get("redacted", named)
            assert operations().replay("redacted", [named]).outcomes == {"gone": 1}
            assert operations().delete("redacted", [named], "dead").outcomes == {"gone": 1}


@pytest.mark.django_db
@pytest.mark.parametrize("codenames", [("view_topic", "delete_messages", "replay_messages"), ("*",)])
def test_no_page_of_the_admin_tells_a_right_guess(
    broker: Any, staff: Callable[..., Client], codenames: tuple[str, ...]
) -> None:
    client = staff(*codenames)
    kill(broker, "redacted", SECRET)
    answers = []
    for guess in (SECRET, WRONG):
        named = message_id(0, guess)
        pages = [
            client.get(reverse(f"admin:django_rmq_topic_{page}", args=["redacted", named]), follow=True)
            for page in ("message", "edit", "raw")
        ]
        given = {"state": "dead", "id": named, "confirmed": "yes"}
        for act in ("replay", "delete"):
            address = reverse("admin:django_rmq_topic_act", args=["redacted"])
            pages.append(client.post(address, {"act": act, **given}, follow=True))
        answers.append([(page.status_code, without_chance(page.content.decode(), named)) for page in pages])
    assert answers[0] == answers[1]
    assert broker.count(topic_of("redacted"), 0).dead == 1


def without_chance(page: str, named: str) -> str:
    """Return a page without what differs each time: the id that was asked for, tokens and times."""
    page = page.replace(named, "")
    page = re.sub(r'name="csrfmiddlewaretoken" value="[^"]*"', "", page)
    return re.sub(r"\d{13}|\d+(\.\d+)? (ms|s|seconds?)\b|\d\d:\d\d(:\d\d)?", "", page)


@pytest.mark.parametrize("name", ["ranked", "redacted", "redacted.keyed"])
def test_an_id_for_whoever_sees_no_bodies_holds_nothing_of_the_message(broker: Any, name: str) -> None:
    put(broker, name, SECRET)
    people = [viewer()] if name == "ranked" else [viewer(), boss()]
    for operations in people:
        (listed,) = operations.listing(name, "store").copies
        shown = [listed.id, *(copy.id for copy in operations.get(name, listed.id))]
        plain = message_id(0, SECRET).partition(".")[2]
        hashes = [hashlib.new(kind, SECRET).hexdigest()[:8] for kind in ("md5", "sha1", "sha256", "sha512")]
        for text in (*hashes, plain[:8]):
            assert not any(text in one for one in shown)
        assert listed.id.endswith(sealed_id(name, 0, SECRET).removeprefix("0"))
    # Who may see what is stored gets plain ids, and may use both kinds.
    (open_copy,) = shell().listing(name, "store").copies
    assert open_copy.id == message_id(0, SECRET)
    assert len(shell().get(name, listed.id)) == 1


def test_a_search_for_a_class_of_errors_tells_nothing_of_bodies_and_texts(broker: Any) -> None:
    bodies = [b'{"n":%d,"card":"5555000000000"}' % n for n in range(300)]
    kill(broker, "redacted", *bodies, error="shop.Boom: card 5555000000000 refused")
    kill(broker, "redacted", b'{"n":"other"}', error="shop.Other: x")
    for operations in (viewer(), boss()):
        told = []
        for needle in ("5555000000000", "5555000100000", "card", "refused", "zzz", "oom", "shop"):
            page = operations.listing("redacted", "dead", wanted=Filter(error=needle), limit=1)
            told.append((page.copies, bool(page.cursor), page.scanned))
        assert told == [told[0]] * len(told) and not told[0][0]
        assert len(everything(operations, "redacted", "dead", wanted=Filter(error="Boom"), limit=100)) == 300
        assert len(everything(operations, "redacted", "dead", wanted=Filter(error="shop.Other"))) == 1
    counted = viewer().replay_all("redacted", Filter(error="5555000000000"), dry_run=True).result()
    assert counted.outcomes.get("matching", 0) == 0
    replayed = viewer().replay_all("redacted", Filter(error="shop.Other")).result()
    assert replayed.outcomes == {"replayed": 1}


@pytest.mark.parametrize("name", ["ranked", "timed", "redacted"])
@pytest.mark.parametrize("descending", [True, False])
def test_pages_of_long_bodies_list_each_once_with_short_cursors(
    broker: Any, name: str, descending: bool
) -> None:
    alike = b"x" * 5_000
    members = [b"%s%03d" % (alike, n) for n in range(40)] + [b"%03d%s" % (n, alike) for n in range(40)]
    put(broker, name, *members)
    for operations in (shell(), boss(), viewer()):
        copies = everything(operations, name, "store", limit=7, descending=descending)
        assert len({copy.id for copy in copies}) == 80
    copies = everything(shell(), name, "store", limit=7, descending=descending)
    assert len({copy.member for copy in copies}) == 80


@pytest.mark.parametrize("descending", [True, False])
@pytest.mark.parametrize("where", ["first", "last"])
def test_pages_go_on_where_the_last_long_message_of_a_page_is_gone(
    broker: Any, descending: bool, where: str
) -> None:
    """As for a program that deletes what it has listed."""
    filler = b"x" * 600
    members = [b"%03d%s" % (n, filler) if where == "first" else b"%s%03d" % (filler, n) for n in range(50)]
    put(broker, "ranked", *members)
    found, cursor, is_first = list[bytes](), "", True
    while cursor or is_first:
        page = shell().listing("ranked", "store", cursor=cursor, limit=8, descending=descending)
        found += [copy.member or b"" for copy in page.copies]
        shell().delete("ranked", ids_of(page.copies), "live")
        cursor, is_first = page.cursor, False
    assert found == sorted(members, reverse=descending)


@pytest.mark.parametrize("descending", [True, False])
def test_a_long_message_that_vanishes_behind_a_page_takes_no_other_with_it(
    broker: Any, descending: bool
) -> None:
    """What is taken from the front of a list, as by consumers: nothing that stays is left out."""
    members = [b"%s%03d" % (b"x" * 600, n) for n in range(60)]
    put(broker, "ranked", *members)
    order = sorted(members, reverse=descending)
    page = shell().listing("ranked", "store", limit=20, descending=descending)
    shell().delete("ranked", [message_id(0, member) for member in order[:20]], "live")
    rest = everything(shell(), "ranked", "store", limit=20, descending=descending)
    page = shell().listing("ranked", "store", cursor=page.cursor, limit=60, descending=descending)
    assert [copy.member for copy in page.copies] == [copy.member for copy in rest] == order[20:]


@pytest.mark.slow
@pytest.mark.django_db
@pytest.mark.parametrize(
    "query",
    [
        {"tab": "dead"},
        {"tab": "dead", "text": "𝕏" * 50, "error": LONGEST_CLASS, "age": "newer:86400"},
        {"tab": "store", "text": "𝕏" * 50, "age": "older:60"},
        {"tab": "store", "text": "𝕏" * 200},
        {"tab": "store", "first": "1" * 500, "hours": "2" * 500, "slot": "3" * 500},
    ],
    ids=["all", "filtered", "searched", "too long a text", "nonsense"],
)
def test_each_link_of_a_page_is_short_enough_for_a_web_server(
    broker: Any, staff: Callable[..., Client], query: dict[str, str]
) -> None:
    """Bodies of 256 KB, and ids, filters and names as long as they may be; gunicorn takes 4,094 bytes of a request line."""
    name = "l" + "_" * 99
    rmq = {
        "REDIS": "redis://127.0.0.1:1/0",
        "TOPICS": {name: {"TYPE": "fixed_time", "SLOTS": 2, "BODY": "text", "MAX_BODY": 300_000}},
        "ADMIN": {"PAGE_SIZE": 5},
    }
    client = staff("*")
    with override_settings(RMQ=rmq), connections.replaced_broker(broker):
        big = "𝕏".encode() * 50 + b"y" * 256 * 1024
        kill(broker, name, *(b"%s%d" % (big, n) for n in range(12)), error=f"{LONGEST_CLASS}: x")
        put(broker, name, *(b"%03d%s%s" % (n, "𝕏".encode() * 50, b"z" * 309) for n in range(12)))
        address = reverse("admin:django_rmq_topic_change", args=[quote(name)])
        opened, following = 0, f"?{urlencode(query)}"
        while following:
            page = short_page(client, f"{address}{following}")
            for link in re.findall(r'href="([^"]*/message/[^"]*)"', page):
                assert "This message is not here" not in short_page(client, link)
                opened += 1
            following = next(iter(re.findall(r'rel="next" href="([^"]+)"', page)), "")
        assert opened == 12


def short_page(client: Client, link: str) -> str:
    """Return a page, all links of which a web server takes."""
    response = client.get(link)
    assert response.status_code == 200
    page = html.unescape(response.content.decode())
    here = link.partition("?")[0]
    for found in re.findall(r'href="([^"]*)"', page):
        whole = f"{here}{found}" if found.startswith("?") else found
        assert len(f"GET {whole} HTTP/1.1".encode()) < LONGEST_REQUEST_LINE, whole
    return page


@pytest.mark.django_db
def test_rest_goes_from_page_to_page_of_long_bodies(broker: Any) -> None:
    members = [b'"%s%d"' % (b"y" * 200_000, n) for n in range(7)]
    put(broker, "timed", *members)
    for program in (Program(user_with(*Permission)), Program(user_with(Permission.VIEW))):
        address: str | None = "topics/timed/messages/?page_size=2"
        found = []
        while address:
            answer = program.ok("GET", address)
            found += [copy["id"] for copy in answer["results"]]
            assert answer["next"] is None or len(answer["next"]) < 700
            address = answer["next"] and answer["next"].partition("/api/rmq/")[2]
        assert len(set(found)) == 7
        for one in found:
            assert len(one) < 120
            assert len(program.ok("GET", f"topics/timed/messages/{one}/")["results"]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("size", [40, 600])
def test_each_row_is_found_with_three_scripts_among_100_000_of_one_priority(
    broker: Broker, size: int
) -> None:
    members = [b"%06d%s" % (n * 7 % 100_000, b"z" * (size - 6)) for n in range(100_000)]
    put(broker, "redacted", *members)
    operations = boss()
    middle = operations.listing("redacted", "store", limit=1_000)
    for _ in range(45):
        middle = operations.listing("redacted", "store", cursor=middle.cursor, limit=1_000)
    pages = [
        operations.listing("redacted", "store", limit=25),
        operations.listing("redacted", "store", limit=25, descending=False),
        operations.listing("redacted", "store", cursor=middle.cursor, limit=25),
    ]
    for page in pages:
        assert len(page.copies) == 25
        for copy in page.copies:
            with at_most(broker, 3):
                (found,) = operations.get("redacted", copy.id)
            assert found.member == copy.member
    with at_most(broker, 10):
        assert operations.bury("redacted", ids_of(pages[0].copies)).outcomes == {"buried": 25}
    with at_most(broker, 10):
        assert operations.delete("redacted", ids_of(pages[1].copies), "live").outcomes == {"deleted": 25}
    with at_most(broker, 10):
        dead = operations.listing("redacted", "dead", limit=25).copies
    with at_most(broker, 10):
        assert operations.replay("redacted", ids_of(dead)).outcomes == {"replayed": 25}


def ids_of(copies: list[MessageCopy]) -> list[str]:
    return [copy.id for copy in copies]


def test_25_of_the_longest_bodies_are_acted_upon_with_ten_scripts(broker: Broker) -> None:
    put(broker, "ranked", *(b"%s%02d" % (b"x" * 256 * 1024, n) for n in range(30)))
    copies = everything(boss(), "ranked", "store", limit=25)[:25]
    with at_most(broker, 10):
        assert boss().bury("ranked", ids_of(copies)).outcomes == {"buried": 25}


@pytest.mark.parametrize("operations", [viewer, boss])
def test_a_message_is_found_though_others_came_and_went_around_it(
    broker: Any, operations: Callable[[], Operations]
) -> None:
    members = [b"m%05d" % n for n in range(0, 10_000, 10)]
    put(broker, "redacted", *members)
    listed = everything(operations(), "redacted", "store", limit=1_000)
    chance = random.Random(5)
    gone = set(chance.sample(members, 300))
    shell().delete("redacted", [message_id(0, member) for member in gone], "live")
    put(broker, "redacted", *(b"m%05d" % (n * 10 + 5) for n in chance.sample(range(1_000), 500)))
    put(broker, "redacted", *(b"other%d" % n for n in range(2_000)), score=50)
    by_digest = {sealed_id("redacted", 0, member): member for member in members}
    for copy in chance.sample(listed, 40):
        member = by_digest[f"0~{copy.id.partition('~')[2]}"]
        if member in gone:
            with pytest.raises(MessageGone):
                operations().get("redacted", copy.id)
        else:
            (found,) = operations().get("redacted", copy.id)
            assert found.id == copy.id


def test_a_message_that_has_gone_on_is_found_where_it_is_now(broker: Any) -> None:
    topic = topic_of("redacted")
    put(broker, "redacted", SECRET)
    (listed,) = viewer().listing("redacted", "store").copies
    taken = broker.prepare(topic, 0, "W", None, 1)
    assert [copy.state for copy in viewer().get("redacted", listed.id)] == ["running"]
    assert viewer().delete("redacted", [listed.id], "live").outcomes == {"running": 1}
    put(broker, "redacted", SECRET)
    broker.rollback(topic, 0, taken.receipt, [Failure(SECRET)])
    kill(broker, "redacted")
    assert [copy.state for copy in viewer().get("redacted", listed.id)] == ["dead"]
    assert viewer().replay("redacted", [listed.id]).outcomes == {"replayed": 1}
    assert viewer().reschedule("redacted", [listed.id], priority=777).outcomes == {"rescheduled": 1}
    (now,) = viewer().get("redacted", listed.id)
    assert now.priority == 777
    assert viewer().delete("redacted", [listed.id], "live").outcomes == {"deleted": 1}
    with pytest.raises(MessageGone):
        viewer().get("redacted", listed.id)


@pytest.mark.django_db
def test_what_was_not_found_is_not_told_to_be_gone(broker: Any, staff: Callable[..., Client]) -> None:
    members = [b"m%05d" % n for n in range(20_000)]
    put(broker, "redacted", *members)
    (listed,) = viewer().listing("redacted", "store", limit=1, descending=False).copies
    there = viewer().listing("redacted", "store", limit=1).copies[0]
    # It was first, and 10,000 others come before it by now.
    put(broker, "redacted", *(b"a%05d" % n for n in range(10_000)))
    with pytest.raises(OperationRefused, match="not found near its place"):
        viewer().get("redacted", listed.id)
    done = viewer().delete("redacted", [listed.id, there.id], "live")
    assert done.outcomes == {"not_found": 1, "deleted": 1}
    program = Program(user_with(*Permission))
    program.refused(409, "refused", "GET", f"topics/redacted/messages/{listed.id}/")
    program.refused(409, "refused", "DELETE", f"topics/redacted/messages/{listed.id}/?copy=live")
    client = staff("*")
    page = client.get(reverse("admin:django_rmq_topic_message", args=["redacted", listed.id]))
    assert page.status_code == 400 and "not found near its place" in page.content.decode()
    assert "Message not found" not in page.content.decode()
    # A command goes on until it has found it.
    assert shell().get("redacted", listed.id)[0].member == members[0]


@pytest.mark.django_db
@pytest.mark.parametrize("name", ["timed", "redacted"])
def test_what_a_program_has_sent_it_finds_by_the_id_it_was_told(broker: Any, name: str) -> None:
    program = Program(user_with(*ALL_BUT_BODIES))
    option = {"priority": 100} if name == "redacted" else {"fixed_time": int(time.time() * 1000) + 90_000}
    for body in ("short", "long" * 200):
        (sent,) = program.ok("POST", f"topics/{name}/messages/", {"body": body, **option}, 202)["results"]
        assert program.ok("GET", f"topics/{name}/messages/{sent['id']}/")["results"][0]["state"] == "waiting"
        assert program.ok("DELETE", f"topics/{name}/messages/{sent['id']}/")["outcome"] == "deleted"


def test_long_deliveries_are_settled_with_few_scripts(broker: Broker) -> None:
    put(broker, "ranked", *(b'"%s%03d"' % (b"x" * 2_000, n) for n in range(200)))
    deliveries = boss().deliveries("ranked")
    taken = deliveries.take(uuid4(), 200)
    assert len(taken) == 200
    settled = [SettledDelivery(deliveries.id(one), deliveries.receipt(one)) for one in taken]
    with at_most(broker, 40):
        assert deliveries.commit(settled) == ["ok"] * 200


@pytest.mark.parametrize("name", ["timed", "redacted"])
def test_ids_cursors_and_receipts_outlive_the_secret_key(broker: Any, name: str, settings: Any) -> None:
    settings.SECRET_KEY = "the old one"
    put(broker, name, *(b'"%d%s"' % (n, b"x" * 600) for n in range(20)))
    deliveries = boss().deliveries(name)
    (taken,) = deliveries.take(uuid4(), 1)
    settled = SettledDelivery(deliveries.id(taken), deliveries.receipt(taken))
    page = viewer().listing(name, "store", limit=5)
    settings.SECRET_KEY = "the new one"
    with pytest.raises(InvalidRequest):
        viewer().listing(name, "store", cursor=page.cursor)
    with pytest.raises(InvalidRequest):
        viewer().get(name, page.copies[0].id)
    settings.SECRET_KEY_FALLBACKS = ["the old one"]
    assert deliveries.commit([settled]) == ["ok"]
    assert len(viewer().get(name, page.copies[-1].id)) == 1
    assert viewer().listing(name, "store", cursor=page.cursor).copies
    assert viewer().listing(name, "store").copies[0].id != page.copies[0].id


@pytest.mark.parametrize(
    "wrong",
    [
        *("0~", "0~abc", "0.store.100.1~", "1~{}", "~{}", "0.~{}"),
        *("0.store.nan.1~{}", "0.gone.1.1~{}", "0.store.1~{}"),
    ],
)
def test_what_is_no_sealed_id_is_refused(broker: Any, wrong: str) -> None:
    sealed = sealed_id("redacted", 0, b"m").partition("~")[2]
    with pytest.raises(InvalidRequest):
        shell().get("redacted", wrong.format(sealed))
    identity = message_ids.identify(topic_of("redacted"), f"0.store.100.~{sealed}")
    assert identity.place is not None and identity.place.score == 100
