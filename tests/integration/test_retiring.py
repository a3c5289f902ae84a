"""Topics that were taken out of the settings: what they strand is counted, moved or deleted, and then forgotten."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import redis
from django.core.management import CommandError, call_command
from django.test import override_settings
from django.utils import timezone

from django_rmq import connections, send_message
from django_rmq.conf import get_config
from django_rmq.core.model.envelope import Envelope, encode_envelope
from django_rmq.core.producer.placement import slot_of
from django_rmq.core.producer.producer import Producer
from django_rmq.core.redis.broker import RedisBroker
from django_rmq.operations import Actor, Operations
from django_rmq.operations.health import HealthThresholds
from tests.support.brokers import direct
from tests.support.reports import printed

TIMED = {"TYPE": "fixed_time", "SLOTS": 4}
RANKED = {"TYPE": "priority", "SLOTS": 4}
MERGED = {"TYPE": "range_merge", "SLOTS": 4, "TIME_RANGE": 60}
KEYED = {"TYPE": "fixed_time", "SLOTS": 4, "IDENTITY": "key"}
Shop = Callable[..., AbstractContextManager[None]]


@pytest.fixture
def shop(redis_url: str, prefix: str) -> Shop:
    @contextmanager
    def configured(**topics: Any) -> Iterator[None]:
        with override_settings(RMQ={"REDIS": redis_url, "KEY_PREFIX": prefix, "TOPICS": topics}):
            yield

    return configured


def run(*args: str, returncode: int = 0) -> str:
    """Return what rmqtopics prints, or the error with which it ends."""
    out = io.StringIO()
    if not returncode:
        call_command("rmqtopics", *args, stdout=out, no_color=True)
        return out.getvalue()
    with pytest.raises(CommandError) as caught:
        call_command("rmqtopics", *args, stdout=out, no_color=True)
    assert caught.value.returncode == returncode, str(caught.value)
    return str(caught.value)


def later(minutes: int) -> Any:
    return timezone.now() + timedelta(minutes=minutes)


def kill(name: str, body: Any) -> None:
    """Send a message and let it die."""
    topic, broker = get_config().topic(name), direct(connections.get_broker())
    sent = send_message(name, body, **({"priority": 90} if topic.is_priority else {"fixed_time": later(60)}))
    broker.bury(topic, sent.slot, [sent.member], "shop.Boom: no")


def copies(name: str, state: str) -> list[Any]:
    return Operations(Actor("tester", "command")).listing(name, state).copies


def keys_of(client: redis.Redis, prefix: str, name: str) -> list[bytes]:
    return list(client.scan_iter(f"*{prefix}*{name}*"))


def test_a_topic_that_left_the_settings_and_holds_messages_is_reported(shop: Shop) -> None:
    with shop(old=TIMED, renders=RANKED):
        send_message("old", 1, fixed_time=later(60))
        kill("old", 2)
        send_message("renders", 3, priority=50)
        printed("rmqtopics", "--apply")
    held = "topics that are not in the settings hold messages: old (1 waiting, 1 dead). Declare them again, or use --retire"
    with shop(renders={**RANKED, "MAX_RETRIES": 3}):
        assert run(returncode=1) == f"the settings differ from Redis: renders; use --apply. {held}"
    with shop(renders=RANKED):
        assert run(returncode=1) == held
        operations = Operations(Actor("tester", "command"))
        health = operations.health(HealthThresholds(needs_workers=False))
        assert [(one.name, one.topic) for one in health.troubles] == [("undeclared", "old")]
        # Who asks for some topics is not told of others.
        assert operations.health(HealthThresholds(needs_workers=False), ["renders"]).is_well
        assert "old" not in run("renders")


def test_an_empty_topic_is_forgotten_with_all_its_keys(
    shop: Shop, redis_client: redis.Redis, prefix: str
) -> None:
    with shop(old=RANKED, renders=RANKED):
        send_message("old", 1, priority=60)
        printed("rmqtopics", "--apply")
        operations = Operations(Actor("tester", "command"))
        operations.purge("old", "store", keep=False).result()
    with shop(renders=RANKED):
        assert "old" in run()
        assert keys_of(redis_client, prefix, "old")
        run("old", "--retire")
        assert not keys_of(redis_client, prefix, "old")
        assert [row["topic"] for row in json.loads(run("--json"))] == ["renders"]
        assert "no topic old is registered" in run("old", "--retire", returncode=2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "move or delete them"),
        (["--move-to", "renders"], "differ in TYPE"),
        (["--move-to", "new"], "move or delete the dead ones"),
        (["--move-to", "nowhere"], "nowhere"),
        (["--delete", "--move-to", "new"], "choose between moving and deleting"),
    ],
)
def test_nothing_is_lost_by_a_request_that_says_too_little(shop: Shop, options: list[str], said: str) -> None:
    with shop(old=TIMED, renders=RANKED, new=TIMED):
        send_message("old", 1, fixed_time=later(60))
        kill("old", 2)
    with shop(renders=RANKED, new=TIMED):
        run("--apply", returncode=1)
        assert said in run("old", "--retire", "--no-input", *options, returncode=2)
        (left,) = Operations(Actor("tester", "command")).stranded()
        assert (left.waiting, left.dead) == (1, 1)
        assert "declared in the settings" in run("new", "--retire", returncode=2)


def test_messages_move_to_another_topic_with_their_times(
    shop: Shop, redis_client: redis.Redis, prefix: str
) -> None:
    with shop(old=TIMED, new={**TIMED, "SLOTS": 8}):
        due = {n: send_message("old", {"n": n}, fixed_time=later(n)).score for n in range(1, 600)}
        kill("old", {"n": 0})
    with shop(new={**TIMED, "SLOTS": 8}):
        retire = ("old", "--retire", "--move-to", "new", "--dead", "delete")
        assert "1 dead messages of old will be deleted permanently" in run(*retire, returncode=2)
        assert len(keys_of(redis_client, prefix, "old")) > 1 and not copies("new", "store")
        run(*retire, "--no-input")
        broker, topic = direct(connections.get_broker()), get_config().topic("new")
        pages = [broker.list_messages(topic, slot, "store", limit=1000) for slot in range(8)]
        moved = [entry for page in pages for entry in page.entries]
        assert {json.loads(entry.member)["n"]: entry.score for entry in moved} == due
        assert not keys_of(redis_client, prefix, "old")
        assert all(broker.audit_ledger(topic, slot).balanced for slot in range(8))


@pytest.mark.parametrize(
    ("kind", "options"),
    [(RANKED, {"priority": 70}), (MERGED, {}), (KEYED, {"key": "k", "fixed_time": later(24 * 60)})],
    ids=["priority", "range_merge", "key"],
)
def test_every_kind_of_message_moves(shop: Shop, kind: Any, options: Any) -> None:
    with shop(old=kind, new=kind):
        send_message("old", {"a": 1}, **options)
        waits = copies("old", "store")[0]
    with shop(new=kind):
        run("old", "--retire", "--move-to", "new")
        (moved,) = copies("new", "store")
        assert (moved.raw, moved.key) == (waits.raw, waits.key)
        # Of range_merge what is left to wait goes over: the clock of the move may be some milliseconds ahead.
        assert abs(moved.score - waits.score) <= (1_000 if kind is MERGED else 0)


def test_the_dead_are_sent_anew_if_asked_for(shop: Shop) -> None:
    with shop(old=RANKED, new=RANKED):
        kill("old", {"a": 1})
    with shop(new=RANKED):
        run("old", "--retire", "--move-to", "new", "--dead", "move")
        (moved,) = copies("new", "store")
        assert (moved.priority, moved.body()) == (90, {"a": 1})


def test_what_is_sent_again_while_it_moves_stays_and_moves_next(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shop(old=KEYED, new=KEYED):
        for key in ("a", "b"):
            send_message("old", {"n": 1}, key=key, fixed_time=later(60))
    with shop(new=KEYED):
        send_all = Producer.attempt

        def attempt(producer: Producer, sends: Any) -> Any:
            answer = send_all(producer, sends)
            # A program with the former settings sends a newer body.
            for out in sends:
                if out.member == b"a":
                    direct(connections.get_broker()).send_replace(
                        replace(out.topic, name="old"),
                        slot_of(b"a", 4),
                        [out.score],
                        [b"a"],
                        [encode_envelope(Envelope(b'{"n":2}'))],
                    )
            return answer

        with monkeypatch.context() as patch:
            patch.setattr(Producer, "attempt", attempt)
            assert "still holds messages" in run("old", "--retire", "--move-to", "new", returncode=1)
        run("old", "--retire", "--move-to", "new")
        assert {copy.key: copy.body() for copy in copies("new", "store")} == {"a": {"n": 2}, "b": {"n": 1}}


def test_what_dies_again_while_it_moves_stays(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    with shop(old=TIMED, new=TIMED):
        kill("old", 1)
        old = get_config().topic("old")
    with shop(new=TIMED):
        send_all = Producer.attempt

        def attempt(producer: Producer, sends: Any) -> Any:
            answer = send_all(producer, sends)
            broker, slot = direct(connections.get_broker()), slot_of(b"1", 4)
            broker.send_replace(old, slot, [broker.now_ms()], [b"1"])
            time.sleep(0.01)
            broker.bury(old, slot, [b"1"], "shop.Boom: again")
            return answer

        monkeypatch.setattr(Producer, "attempt", attempt)
        run("old", "--retire", "--move-to", "new", "--dead", "move", returncode=1)
        (left,) = Operations(Actor("tester", "command")).stranded()
        assert left.dead == 1


def test_what_cannot_be_done_is_refused_before_anybody_is_asked(shop: Shop) -> None:
    with shop(old=TIMED, renders=RANKED):
        kill("old", 1)
    with shop(renders=RANKED):
        retire = ("old", "--retire", "--move-to", "renders", "--dead", "delete")
        assert "differ in TYPE" in run(*retire, returncode=2)


def test_what_the_other_topic_refuses_stays(shop: Shop) -> None:
    with shop(old=RANKED, new=RANKED):
        for n in range(20):
            send_message("old", n, priority=50)
    with shop(new={**RANKED, "MAX_BACKLOG": 8}):
        said = run("old", "--retire", "--move-to", "new", returncode=1)
        assert "still holds messages" in said
        (left,) = Operations(Actor("tester", "command")).stranded()
        assert 0 < left.waiting < 20
        assert left.waiting + len(copies("new", "store")) == 20
    with shop(new=RANKED):
        run("old", "--retire", "--move-to", "new")
        assert len(copies("new", "store")) == 20


def test_messages_are_deleted_on_request_only(shop: Shop, redis_client: redis.Redis, prefix: str) -> None:
    with shop(old=TIMED, new=TIMED):
        for n in range(300):
            send_message("old", n, fixed_time=later(60))
        kill("old", -1)
    with shop(new=TIMED):
        assert "--no-input" in run("old", "--retire", "--delete", returncode=2)
        assert keys_of(redis_client, prefix, "old")
        run("old", "--retire", "--delete", "--no-input")
        assert not keys_of(redis_client, prefix, "old")


def test_what_runs_is_waited_for(shop: Shop) -> None:
    with shop(old=RANKED, new=RANKED):
        sent = send_message("old", 1, priority=50)
        topic, broker = get_config().topic("old"), direct(connections.get_broker())
        taken = broker.prepare(topic, sent.slot, "W", None, 10)
    with shop(new=RANKED):
        said = run("old", "--retire", "--delete", "--no-input", returncode=2)
        assert "in flight" in said
        began = time.monotonic()
        run("old", "--retire", "--wait", "1", returncode=2)
        assert time.monotonic() - began >= 1
        broker.commit(topic, sent.slot, taken.receipt, [taken.deliveries[0].member])
        run("old", "--retire", "--wait", "20")
        assert not Operations(Actor("tester", "command")).stranded()


def test_the_flags_of_retiring_need_it(shop: Shop) -> None:
    with shop(new=RANKED):
        for flags in (["--delete"], ["--move-to", "new"], ["--dead", "delete"]):
            assert "require --retire" in run(*flags, returncode=2)
        assert "name the topics" in run("--retire", returncode=2)


def test_a_definition_that_says_little_strands_nothing_unseen(
    shop: Shop, redis_client: redis.Redis, prefix: str
) -> None:
    with shop(old=RANKED, new=RANKED):
        send_message("old", 1, priority=50)
    redis_client.hset(f"{prefix}rmq:topics", "old", '{"slots": 4}')
    with shop(new=RANKED):
        assert "old (1 waiting)" in run(returncode=1)
        assert "differ in" in run("old", "--retire", "--move-to", "new", returncode=2)
        run("old", "--retire", "--delete", "--no-input")
        assert isinstance(connections.get_broker(), RedisBroker)
        assert "old" not in direct(connections.get_broker()).definitions()
