"""The commands of manage.py for people: what they print, what they ask, and their exit codes."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import redis
from django.conf import settings
from django.core.checks import CheckMessage, Tags
from django.core.checks.registry import registry
from django.core.management import CommandError, call_command
from django.test import override_settings
from health_check.exceptions import ServiceUnavailable

from django_rmq import connections, listener, send_message, send_messages
from django_rmq.conf import get_config
from django_rmq.core import reslotting
from django_rmq.core.commands import membership
from django_rmq.core.coordination import Worker
from django_rmq.core.coordination.assignment import TopicSlots
from django_rmq.core.coordination.redis_coordinator import RedisCoordinator
from django_rmq.core.coordination.worker_records import write_record
from django_rmq.core.model.body_codec import ExactNumber
from django_rmq.core.model.delivered_message import message_id
from django_rmq.core.model.keys import slot_keys, worker_keys
from django_rmq.core.model.replies import Failure
from django_rmq.core.producer.placement import slot_of
from django_rmq.exceptions import ServerUnavailable
from django_rmq.health_check import RmqHealthCheck
from django_rmq.management.commands import rmqstats, runrmqconsumers
from django_rmq.management.commands.rmqstats import COLUMNS
from django_rmq.management.rmq_command import RmqCommand
from django_rmq.message_ids import sealed_id
from django_rmq.operations import Actor, Operations, TopicCounters, bulk, message_groups
from django_rmq.worker import listener_registry
from tests.support.brokers import Broker
from tests.support.reports import printed
from tests.support.sends import entries, waiting
from tests.support.workers import eventually

ROOT = Path(__file__).parents[2]
TOPICS = {
    "orders": {"TYPE": "fixed_time", "SLOTS": 4},
    "renders": {"TYPE": "priority", "SLOTS": 2},
    "keyed": {"TYPE": "fixed_time", "SLOTS": 2, "IDENTITY": "key"},
    "notes": {"TYPE": "range_merge", "SLOTS": 2, "TIME_RANGE": 1, "BODY": "text", "MAX_BACKLOG": 6},
    "blobs": {"TYPE": "fixed_time", "SLOTS": 1, "BODY": "bytes", "LISTENER": False},
}


@pytest.fixture
def broker(redis_url: str, redis_client: redis.Redis, prefix: str) -> Iterator[Broker]:
    with override_settings(RMQ={"REDIS": redis_url, "KEY_PREFIX": prefix, "TOPICS": TOPICS}):
        yield Broker(redis_client, prefix)
        connections.close()


Run = Callable[..., str]


@pytest.fixture
def run(broker: Broker, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command, check its exit code, and return what it printed."""

    def run_command(*arguments: str, code: int = 0, stdin: str | bytes = b"") -> str:
        raw = stdin.encode() if isinstance(stdin, str) else stdin
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))
        output, found, told = io.StringIO(), 0, ""
        try:
            call_command(*arguments, stdout=output, no_color=True)
        except CommandError as error:
            # What argparse finds has no code of its own here; from a shell it is 2.
            found = 2 if code == 2 and str(error).startswith("Error: ") else error.returncode
            told = str(error)
        assert (found, "\n" in told) == (code, False), told or output.getvalue()
        return f"{output.getvalue()}{told}"

    return run_command


def read(run: Run, *arguments: str) -> Any:
    """Return what a command says as JSON."""
    return json.loads(run(*arguments, "--json"))


def kill(broker: Broker, name: str, bodies: list[Any], error: str = "shop.Boom: bad") -> None:
    topic = get_config().topic(name)
    options = (
        {"priority": 100} if topic.is_priority else {"fixed_time": datetime.now(UTC) + timedelta(seconds=1)}
    )
    send_messages(name, bodies, **options)
    for slot in range(topic.slots):
        if members := [entry.member for entry in broker.list_messages(topic, slot, "store").entries]:
            broker.bury(topic, slot, members, error)


def dead(broker: Broker, name: str) -> int:
    topic = get_config().topic(name)
    return sum(broker.count(topic, slot).dead for slot in range(topic.slots))


def stored(name: str) -> list[tuple[bytes, float]]:
    return [(entry.member, entry.score) for entry in entries(name)]


@pytest.fixture
def worker(broker: Broker) -> Iterator[Worker]:
    """A worker that has joined the others and serves everything with a listener."""
    topics = [topic for topic in get_config().topics.values() if topic.listener]
    served = tuple(sorted(TopicSlots(topic.name, topic.slots, topic.serial) for topic in topics))
    found = Worker("a1b2c3d4-worker", "host\x1b[31m", 4711, time.time() - 3 * 3600, 8, served)
    coordinator = RedisCoordinator(broker, found, lambda slots: None, lambda slots: None, session_seconds=60)
    coordinator.start()
    eventually(lambda: broker.roster().plan, "an assignment")
    yield found
    coordinator.stop()


def test_rmqsend_sends_one_and_says_what_became_of_it(run: Run) -> None:
    assert run("rmqsend", "renders", '{"sku": 1}', "--priority", "500").startswith("stored in slot ")
    found = json.loads(run("rmqsend", "renders", "--priority", "600", "--json", stdin='{"sku":1}'))
    assert (found["status"], found["score"]) == ("replaced", 600)
    run("rmqsend", "notes", "Grüße\n", "--time-range", "5s")
    assert [member for member, _ in stored("notes")] == ["Grüße\n".encode()]
    assert "merged" in run("rmqsend", "notes", "--time-range", "5s", "Grüße\n")
    run("rmqsend", "blobs", "--in", "2h", stdin=b"\xff\x00")
    ((member, score),) = stored("blobs")
    assert member == b"\xff\x00" and 7_100_000 < score - time.time() * 1000 < 7_300_000
    arguments = ("--key", "o-1", "--header", "a=b=c", "--expires", "2099-01-02T00:00:00Z")
    run("rmqsend", "keyed", "1", "--at", "2099-01-01T10:00+02:00", *arguments)
    twice = '{"sku":1,"sku":2}'
    assert "an object has the key 'sku' twice" in run("rmqsend", "renders", twice, "--priority", "1", code=2)
    ((member, score),) = stored("keyed")
    assert member == b"o-1" and score == datetime(2099, 1, 1, 8, tzinfo=UTC).timestamp() * 1000


def test_rmqsend_keeps_the_numbers_of_a_body(run: Run) -> None:
    run("rmqsend", "renders", '{"price":1.50}', "--priority", "700")
    lines = '{"body":{"price":12345678901234567.89},"priority":700}\n'
    run("rmqsend", "renders", "--jsonl", "--options", stdin=lines)
    members = {member for member, _ in stored("renders")}
    assert members == {b'{"price":1.50}', b'{"price":12345678901234567.89}'}
    assert "waiting" in run("rmqstats", "renders", "--body", '{"price":1.50}')


@pytest.mark.parametrize(
    "arguments",
    [
        ("nothing", "1"),
        ("orders", "{"),
        ("orders", "1"),
        *(("orders", "1", "--at", time) for time in ("tomorrow", "2099-13-01T00:00")),
        ("orders", "1", "--in", "soon"),
        *(("orders", "1", "--in", "5", *more) for more in (("--priority", "50"), ("--header", "a"))),
        *(("orders", "1", "--in", "5", more) for more in ("--jsonl", "--options")),
        ("renders", "1", "--priority", "1"),
        ("keyed", "--in", "5", "--jsonl", "--key", "a"),
    ],
)
def test_what_rmqsend_cannot_send_is_exit_2(run: Run, arguments: tuple[str, ...]) -> None:
    run("rmqsend", *arguments, code=2)
    assert stored("orders") == []


def test_rmqsend_reads_json_lines(run: Run) -> None:
    lines = "".join(f'{{"n": {n}}}\n' for n in range(12_000)) + "\n"
    answer = run("rmqsend", "renders", "--jsonl", "--priority", "50", "--json", stdin=lines)
    assert json.loads(answer) == {"outcomes": {"stored": 12_000}, "total": 12_000}
    lines = '{"body": 1, "key": "a"}\n\n{"body": 2, "key": "b", "fixed_time": "2099-01-01T00:00:00Z"}\n'
    assert run("rmqsend", "keyed", "--jsonl", "--options", "--in", "60", stdin=lines) == "keyed: 2 stored\n"
    text = run("rmqsend", "orders", "--jsonl", "--in", "60", stdin="1\n\n[NaN]\n", code=2)
    assert "line 3" in text and "nothing was sent" in text and stored("orders") == []
    assert "line 2" in run("rmqsend", "orders", "--jsonl", "--in", "60", stdin="1\n{\n", code=2)
    assert "line 1" in run("rmqsend", "orders", "--jsonl", "--options", stdin='{"key": 1}\n', code=2)
    assert "line 1" in run("rmqsend", "orders", "--jsonl", "--in", "60", stdin=b"\xff\n", code=2)


def test_a_full_topic_is_exit_1(run: Run) -> None:
    lines = "".join(f'"{n}"\n' for n in range(30))
    assert "refused" in run("rmqsend", "notes", "--jsonl", stdin=lines, code=1)
    assert len(stored("notes")) == 6


def test_rmqreplay_named_ones(broker: Broker, run: Run) -> None:
    kill(broker, "orders", [1, 2, 3])
    assert dead(broker, "orders") == 3
    topic = get_config().topic("orders")
    slot = next(slot for slot in range(4) if broker.count(topic, slot).dead)
    (entry, *_) = broker.list_messages(topic, slot, "dead").entries
    one = message_id(slot, entry.member)
    assert run("rmqreplay", "orders", "--id", one) == "orders: 1 replayed\n"
    answer = run("rmqreplay", "orders", "--id", one, "--json", code=1)
    assert '"waiting": 1' in answer and "1 of 1" in answer
    run("rmqreplay", "orders", "--id", "nonsense", code=2)
    body = entry.member.decode()
    assert run("rmqreplay", "orders", "--body", body, code=1).startswith("orders: 1 waiting")
    assert "1 gone" in run("rmqreplay", "orders", "--body", '{"never": "sent"}', code=1)
    run("rmqreplay", "orders", "--body", body, "--id", one, code=2)
    run("rmqreplay", "orders", "--key", "k", code=2)
    run("rmqreplay", "orders", "--id", one, "--new-body", "{", code=2)
    assert run("rmqreplay", "orders", "--id", one, "--new-body", "7", code=1).startswith("orders: 1 waiting")


def test_bytes_that_are_no_text_are_no_name_and_no_json(run: Run) -> None:
    """Python has a surrogate for each such byte of a command line."""
    assert "the body is not json" in run("rmqsend", "orders", '"\udcff"', "--in", "2h", code=2)
    run("rmqsend", "blobs", "a\udcff", "--in", "2h")
    assert waiting("blobs") == [b"a\xff"]
    told = run("rmqclaims", "orders", "--return", "--consumer", "\udcff", code=2)
    assert "not the name of a consumer" in told


@pytest.mark.parametrize(
    "arguments",
    [
        "rmqcancel orders --body=--",
        "rmqsend orders --header=-- 1",
        "rmqlist orders --older-than=--",
        "rmqworkers -v--",
    ],
)
def test_an_option_whose_value_is_dropped_is_an_error(broker: Broker, arguments: str) -> None:
    with pytest.raises(CommandError, match="its value cannot be --"):
        call_command(*arguments.split())


class LeftTerminal:
    """A terminal on which a person types Ctrl-C, or Ctrl-D."""

    def __init__(self, key: str) -> None:
        self._key = key

    def isatty(self) -> bool:
        return True

    def readline(self) -> str:
        if self._key == "Ctrl-C":
            raise KeyboardInterrupt
        return ""


@pytest.mark.parametrize("key", ["Ctrl-C", "Ctrl-D"])
def test_a_question_that_a_person_leaves_is_not_confirmed(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setattr(sys, "stdin", LeftTerminal(key))
    with pytest.raises(CommandError, match="nothing was done") as raised:
        RmqCommand().confirm("All will be sent again.", "yes", {"interactive": True})
    assert raised.value.returncode == 1


def test_rmqreplay_says_of_how_many_it_has_counted_the_classes(
    broker: Broker, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are spread evenly over the slots and the times of their deaths."""
    kill(broker, "orders", list(range(30)))
    monkeypatch.setattr(message_groups.groups, "__kwdefaults__", {"limit": 10, "seconds": None})
    dry = run("rmqreplay", "orders", "--all", "--dry-run")
    assert dry == "orders: 30 messages would be replayed\nclasses of 10 of them:\n  10  shop.Boom\n"


def test_rmqreplay_what_matches(broker: Broker, run: Run) -> None:
    kill(broker, "orders", list(range(30)))
    kill(broker, "orders", list(range(100, 120)), error="Other: no")
    dry = run("rmqreplay", "orders", "--all", "--dry-run")
    assert dry == "orders: 50 messages would be replayed\n  30  shop.Boom\n  20  Other\n"
    found = read(run, "rmqreplay", "orders", "--error", "Other", "--dry-run")
    assert (found["outcomes"], found["classes"], found["complete"]) == ({"matching": 20}, {"Other": 20}, True)
    most = run("rmqreplay", "orders", "--all", "--limit", "7", "--dry-run")
    assert most.startswith("orders: 7 messages would be replayed (at most 7 of 50)\n")
    assert "--no-input" in run("rmqreplay", "orders", "--all", code=2)
    assert run("rmqreplay", "orders", "--error", "Other", "--no-input") == "orders: 20 replayed\n"
    nothing_to_confirm = run("rmqreplay", "orders", "--error", "Other")
    assert nothing_to_confirm == "orders: 0 messages would be replayed\n"
    answer = run("rmqreplay", "orders", "--all", "--limit", "10", "--no-input", "--json")
    assert json.loads(answer)["outcomes"] == {"replayed": 10} and not json.loads(answer)["complete"]
    began = time.monotonic()
    run("rmqreplay", "orders", "--all", "--rate", "40", "--no-input")
    assert time.monotonic() - began >= 0.5 and dead(broker, "orders") == 0
    for wrong in ("", "--all --error x", "--all --new-body 1", "--all --slot 4 --no-input"):
        run("rmqreplay", "orders", *wrong.split(), code=2)


def test_rmqpurge(broker: Broker, run: Run) -> None:
    kill(broker, "orders", list(range(30)))
    for state in ("dead", "waiting", "store"):
        count = 30 if state == "dead" else 0
        dry = run("rmqpurge", "orders", "--state", state, "--dry-run")
        assert dry == f"orders: {count} messages would be deleted\n"
    dry = run("rmqpurge", "orders", "--state", "dead", "--older-than", "1h", "--dry-run")
    assert dry == "orders: 0 messages would be deleted\n"
    assert "--no-input" in run("rmqpurge", "orders", "--state", "dead", code=2)
    told = run("rmqpurge", "renders", "--state", "store", "--older-than", "5", "--no-input", code=2)
    assert "cannot be filtered by age" in told
    run("rmqpurge", "orders", "--state", "prepare", code=2)
    assert dead(broker, "orders") == 30
    assert run("rmqpurge", "orders", "--state", "dead", "--no-input", "--for-good") == "orders: 30 purged\n"
    assert run("rmqpurge", "orders", "--state", "dead", "--no-input") == "orders: nothing to do\n"


def test_rmqpurge_deletes_what_matches(run: Run) -> None:
    send_messages("renders", [{"sku": n} for n in range(6)], priority=100)
    send_messages("renders", [{"sku": n} for n in range(6, 10)], priority=101)
    arguments = ("rmqpurge", "renders", "--state", "waiting", "--priority", "100")
    assert run(*arguments, "--dry-run") == "renders: 6 messages would be deleted\n"
    assert run(*arguments, "--text", '"sku":3', "--no-input", "--for-good") == "renders: 1 deleted\n"
    done, hint = run(*arguments, "--no-input").splitlines()
    assert done == "renders: 5 deleted"
    assert hint.startswith("To bring 5 back: manage.py rmqpurge renders --undo ")
    assert sorted(score for _, score in stored("renders")) == [101] * 4
    assert "ordered by time" in run("rmqpurge", "orders", "--state", "store", "--priority", "5", code=2)
    assert "that wait" in run("rmqpurge", "renders", "--state", "dead", "--priority", "5", code=2)


@pytest.mark.parametrize("name", ["--error", "--cause", "--text"])
def test_a_filter_with_an_empty_text_is_an_error_and_not_all_messages(
    broker: Broker, run: Run, name: str
) -> None:
    kill(broker, "orders", [1, 2])
    told = [
        run("rmqpurge", "orders", "--state", "dead", name, "", "--no-input", code=2),
        run("rmqreplay", "orders", "--all", name, "", "--no-input", code=2),
        run("rmqreschedule", "orders", "--in", "5", "--all", name, "", "--no-input", code=2),
        run("rmqlist", "orders", "--state", "dead", name, "", code=2),
    ]
    assert set(told) == {f"{name} must not be empty"}
    with pytest.raises(CommandError, match="must not be empty"):
        call_command("rmqpurge", "orders", state="dead", interactive=False, **{name[2:]: ""})
    assert dead(broker, "orders") == 2


def test_a_slot_basis_names_messages_and_is_no_filter(broker: Broker, run: Run) -> None:
    kill(broker, "orders", [1, 2])
    told = run("rmqreplay", "orders", "--all", "--slot-basis", "x", "--no-input", code=2)
    assert "choose messages" in told and dead(broker, "orders") == 2
    told = run("rmqreschedule", "orders", "--in", "5", "--all", "--slot-basis", "x", "--no-input", code=2)
    assert "choose messages" in told
    assert "Name the message" in run("rmqreplay", "orders", "--slot-basis", "x", code=2)
    assert "Name the message" in run("rmqstats", "orders", "--slot-basis", "x", code=2)


IGNORED = [
    ("rmqpurge orders --undo X --dry-run", "--dry-run cannot be used with --undo"),
    ("rmqpurge orders --undo X --state dead", "--state cannot be used with --undo"),
    ("rmqpurge orders --undo X --for-good", "--for-good cannot be used with --undo"),
    ("rmqpurge orders --undo X --background", "--background cannot be used with --undo"),
    ("rmqpurge orders --undo X --limit 1", "--limit cannot be used with --undo"),
    ("rmqpurge orders --undo X --older-than 0", "--older-than cannot be used with --undo"),
    ("rmqreplay orders --id X --limit 1", "--limit cannot be used with --id"),
    ("rmqreplay orders --id X --background", "--background cannot be used with --id"),
    ("rmqreschedule orders --in 5 --id X --rate 1", "--rate cannot be used with --id"),
    ("rmqtopics orders --apply --max-rate 5", "--max-rate cannot be used with --apply"),
    ("rmqtopics orders --apply --reset-limits", "--reset-limits cannot be used with --apply"),
    ("rmqtopics former --retire --max-in-flight 5", "--max-in-flight cannot be used with --retire"),
    ("rmqtopics former --retire --apply", "--apply cannot be used with --retire"),
    ("rmqtopics orders --force", "--force requires --apply"),
    ("rmqtopics orders --wait 5", "require --retire"),
    ("rmqoutbox orders --once", "--once takes no topics"),
    ("rmqoutbox orders --watch", "--watch takes no topics"),
    ("rmqoutbox orders --delete 1", "--delete takes no topics"),
    ("rmqoutbox --refused --delete 1", "--refused requires --list"),
    ("rmqstats orders --id X --watch", "--watch cannot be used with --id"),
]


@pytest.mark.parametrize(("command", "reason"), IGNORED)
def test_an_option_that_would_be_ignored_is_an_error(run: Run, command: str, reason: str) -> None:
    assert reason in run(*command.split(), code=2)


def test_an_empty_id_is_no_missing_option(broker: Broker, run: Run) -> None:
    kill(broker, "orders", [1])
    assert "cannot be used" in run(
        "rmqpurge", "orders", "--undo", "", "--state", "dead", "--no-input", code=2
    )
    assert "nothing to undo" in run("rmqpurge", "orders", "--undo", "", code=2)
    assert "no action ''" in run("rmqworkers", "--stop-action", "", code=2)
    assert "need --return" in run("rmqclaims", "orders", "--consumer", "", code=2)
    assert dead(broker, "orders") == 1


def stopping(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Let an error come, once, after the first step of a long operation that did something."""
    whole = bulk.BulkRun.__iter__

    def steps(run: bulk.BulkRun) -> Iterator[bulk.BulkProgress]:
        monkeypatch.setattr(bulk.BulkRun, "__iter__", whole)
        for progress in whole(run):
            yield progress
            if progress.done:
                raise error

    monkeypatch.setattr(bulk.BulkRun, "__iter__", steps)


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [(KeyboardInterrupt(), 1, "stopped by Ctrl-C"), (ServerUnavailable("it went away"), 3, "it went away")],
)
def test_an_operation_that_is_ended_early_says_what_it_did_and_fails(
    broker: Broker,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
    reason: str,
) -> None:
    kill(broker, "orders", [1, 2, 3])
    monkeypatch.setattr(bulk, "STEP", 1)
    stopping(monkeypatch, error)
    first, hint, last = run("rmqpurge", "orders", "--state", "dead", "--no-input", code=code).splitlines()
    assert first == "orders: 1 purged (stopped after 1 of 3)"
    assert hint.startswith("To bring 1 back") and last == reason and dead(broker, "orders") == 2
    stopping(monkeypatch, error)
    assert reason in run("rmqpause", "orders", "renders", code=code)
    assert "paused" not in run("rmqstats", "renders")


def test_a_retirement_that_a_person_stops_blames_no_other_topic(
    broker: Broker, run: Run, redis_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    send_messages("orders", [1, 2, 3], fixed_time=datetime.now(UTC) + timedelta(hours=1))
    left = {name: topic for name, topic in TOPICS.items() if name != "orders"}
    with override_settings(RMQ={"REDIS": redis_url, "KEY_PREFIX": prefix, "TOPICS": left}):
        stopping(monkeypatch, KeyboardInterrupt())
        told = run("rmqtopics", "orders", "--retire", "--delete", "--no-input", code=1)
        assert told.endswith("stopped by Ctrl-C") and "refused" not in told
        assert "2 purged" in run("rmqtopics", "orders", "--retire", "--delete", "--no-input")


def test_a_count_that_a_person_stops_asks_no_question(
    broker: Broker, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill(broker, "orders", [1, 2, 3])
    stopping(monkeypatch, KeyboardInterrupt())
    told = run("rmqpurge", "orders", "--state", "dead", code=1)
    assert told.endswith("stopped by Ctrl-C") and "--no-input" not in told


@pytest.mark.parametrize(
    ("method", "command"),
    [
        ("change_limits", "rmqtopics orders renders --max-rate 5"),
        ("pause", "rmqpause orders renders"),
    ],
)
def test_a_topic_that_fails_does_not_hide_what_was_done_to_one_before_it(
    run: Run, monkeypatch: pytest.MonkeyPatch, method: str, command: str
) -> None:
    real = getattr(Operations, method)

    def fail(operations: Operations, name: str, *arguments: Any) -> object:
        if name == "renders":
            raise ServerUnavailable("it went away")
        return real(operations, name, *arguments)

    monkeypatch.setattr(Operations, method, fail)
    told = run(*command.split(), "--json", code=3).removesuffix("it went away")
    assert [row["topic"] for row in json.loads(told)] == ["orders"]


def test_rmqsend_says_from_which_line_to_go_on(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "".join(f"{n}\n" for n in range(12_000))
    real, away = Operations.send_many, ServerUnavailable("Redis does not answer")
    away.sent = 1_000
    trouble: BaseException = away

    def send_many(
        operations: Operations, name: str, items: Sequence[object], **options: Any
    ) -> dict[str, int]:
        if 7_000 not in items:
            return real(operations, name, items, **options)
        raise trouble

    monkeypatch.setattr(Operations, "send_many", send_many)
    told = run("rmqsend", "orders", "--jsonl", "--in", "60", stdin=lines, code=3)
    before = "5000 stored, 1000 sent before line 6001; later lines may have been sent"
    assert told == f"Redis does not answer ({before})"
    trouble = KeyboardInterrupt()
    told = run("rmqsend", "orders", "--jsonl", "--in", "60", stdin=lines, code=1)
    assert told == "stopped by Ctrl-C (5000 replaced before line 5001; later lines may have been sent)"
    lines = '{"body": 1}\n' * 5_000 + '\n{"body": 2}\n{"body": 3, "fixed_time": "soon"}\n'
    told = run("rmqsend", "orders", "--jsonl", "--options", "--in", "60", stdin=lines, code=2)
    assert told.startswith("line 5003: fixed_time 'soon'")
    assert told.endswith("(5000 replaced before line 5001)")


def test_a_dry_run_of_named_messages_replays_none(broker: Broker, run: Run) -> None:
    kill(broker, "orders", [1, 2])
    kill(broker, "orders", [3], error="Reject: no")
    members = waiting("orders", "dead")
    dead_ids = [sealed_id("orders", slot_of(member, 4), member) for member in members]
    named = [part for one in dead_ids for part in ("--id", one)]
    dry = run("rmqreplay", "orders", *named, "--dry-run")
    assert dry == "orders: 3 messages would be replayed\n  2  shop.Boom\n  1  Reject\n"
    assert dead(broker, "orders") == 3
    run("rmqreplay", "orders", "--id", dead_ids[0])
    answer = run("rmqreplay", "orders", *named, "--dry-run", "--json", code=1)
    found, _ = json.JSONDecoder().raw_decode(answer)
    assert found["outcomes"] == {"waiting": 1, "matching": 2} and "1 of 3 messages are not dead" in answer


def test_rmqreslot_as_json(run: Run) -> None:
    send_messages("orders", list(range(20)), fixed_time=datetime(2096, 10, 2, tzinfo=UTC))
    dry = read(run, "rmqreslot", "orders", "8", "--dry-run")
    assert dry == {"topic": "orders", "before": 4, "slots": 8, "moved": 0, "strays": 0, "dry_run": True}
    found = read(run, "rmqreslot", "orders", "8")
    assert (found["before"], found["slots"], found["strays"]) == (4, 8, 0) and 0 < found["moved"] <= 20
    assert read(run, "rmqreslot", "orders", "8")["moved"] == 0


def test_rmqreslot_refuses_what_cannot_be_done_with_its_reason(broker: Broker, run: Run) -> None:
    run("rmqtopics", "keyed", "--apply")
    registered = broker.definitions()
    assert "must be a power of two" in run("rmqreslot", "keyed", "48", code=2)
    assert "give the new number of slots" in run("rmqreslot", "keyed", code=2)
    assert "nothing" in run("rmqreslot", "nothing", "4", code=2)
    assert "--at-once: must be at least 1" in run("rmqreslot", "keyed", "4", "--at-once", "0", code=2)
    for order in (("32", "--dry-run"), ("--dry-run", "32")):
        assert "would get 32" in run("rmqreslot", "keyed", *order)
        assert broker.definitions() == registered
    reslotting.begin(broker, get_config().topic("keyed"), 32)
    assert "is being re-slotted from 2 to 32 slots" in run("rmqreslot", "keyed", "64", code=2)


def test_rmqreschedule_repairs_a_flood_of_a_wrong_priority(run: Run) -> None:
    send_messages("renders", [{"sku": n} for n in range(40)], priority=9_000)
    send_messages("renders", [{"sku": n} for n in range(40, 45)], priority=500)
    arguments = ("rmqreschedule", "renders", "--to-priority", "100", "--priority", "9000")
    assert run(*arguments, "--dry-run") == "renders: 40 messages would be rescheduled\n"
    assert "--no-input" in run(*arguments, code=2)
    assert "stopped after 10 of 40" in run(*arguments, "--limit", "10", "--no-input")
    assert run(*arguments, "--no-input") == "renders: 30 rescheduled\n"
    assert run(*arguments) == "renders: 0 messages would be rescheduled\n"
    assert sorted(score for _, score in stored("renders")) == [100] * 40 + [500] * 5
    found = read(run, "rmqreschedule", "renders", "--to-priority", "600", "--text", "44", "--no-input")
    assert (found["outcomes"], found["complete"]) == ({"rescheduled": 1}, True)


def test_rmqreschedule_by_time_and_by_id(run: Run) -> None:
    sent = send_messages("orders", [1, 2, 3], fixed_time=datetime(2096, 10, 2, tzinfo=UTC))
    assert run("rmqreschedule", "orders", "--in", "0", "--all", "--no-input") == "orders: 3 rescheduled\n"
    assert all(abs(score / 1000 - time.time()) < 60 for _, score in stored("orders"))
    one = ("--id", sealed_id("orders", sent[0].slot, sent[0].member))
    assert run("rmqreschedule", "orders", "--at", "2099-01-02T00:00:00Z", *one) == "orders: 1 rescheduled\n"
    late = [score for _, score in stored("orders") if score > 4e12]
    assert late == [datetime(2099, 1, 2, tzinfo=UTC).timestamp() * 1000]
    for wrong in (
        *("--in 5m", "--all", "--in 5m --at 2099-01-02 --all", "--in 5m --all --text a", "--at soon --all"),
        *("--to-priority 100 --all --no-input", "--in 5m --all --state dead"),
    ):
        run("rmqreschedule", "orders", *wrong.split(), code=2)
    for wrong in ("--in 5m --key k", "--in 5m --all", "--to-priority 100 --dry-run"):
        run("rmqreschedule", "orders", *one, *wrong.split(), code=2)
    run("rmqcancel", "orders", *one)
    assert "1 of 1 message do not wait" in run("rmqreschedule", "orders", "--in", "5m", *one, code=1)


def test_rmqreschedule_takes_a_key_or_a_body_and_foretells_what_it_would_do(broker: Broker, run: Run) -> None:
    before, after = (datetime(year, 1, 2, tzinfo=UTC).isoformat("T", "milliseconds") for year in (2096, 2099))
    send_message("keyed", {"n": 1}, key="k", fixed_time=datetime(2096, 1, 2, tzinfo=UTC))
    send_message("orders", {"n": 1}, fixed_time=datetime(2096, 1, 2, tzinfo=UTC))
    for topic, named in {"keyed": ("--key", "k"), "orders": ("--body", '{"n": 1}')}.items():
        at = ("rmqreschedule", topic, "--at", "2099-01-02T00:00:00Z", *named)
        assert run(*at, "--dry-run") == f"{topic}: 1 message would be rescheduled\n"
        assert read(run, "rmqstats", topic, *named)["due"] == before
        assert run(*at) == f"{topic}: 1 rescheduled\n"
        assert read(run, "rmqstats", topic, *named)["due"] == after
    kill(broker, "orders", [2])
    ids = ("--id", message_id(slot_of(b"2", 4), b"2"), "--id", message_id(0, b"3"))
    told = run("rmqreschedule", "orders", "--in", "5m", *ids, "--dry-run", "--json", code=1)
    assert json.loads(told[: told.rindex("}") + 1])["outcomes"] == {"dead": 1, "gone": 1}


def test_a_retry_of_a_priority_topic_keeps_its_place_as_foretold(broker: Broker, run: Run) -> None:
    topic = get_config().topic("renders")
    broker.send_replace(topic, 0, [700], [b"1"])
    taken = broker.prepare(topic, 0, "W", None, 1)
    broker.rollback(topic, 0, taken.receipt, [Failure(b"1")])
    act = ("rmqreschedule", "renders", "--to-priority", "800", "--id", message_id(0, b"1"), "--json")
    for more in ((), ("--dry-run",)):
        told = run(*act, *more, code=1)
        assert json.loads(told[: told.rindex("}") + 1])["outcomes"] == {"refused": 1}


def test_rmqsend_sends_unless_the_message_is_there(run: Run) -> None:
    one = ("rmqsend", "keyed", "1", "--at", "2099-01-01T10:00+02:00", "--ensure")
    first = read(run, *one, "--key", "k")
    again = read(run, *one, "--key", "k")
    by_id = read(run, *one, "--id", first["id"])
    assert [found["status"] for found in (first, again, by_id)] == ["stored", "present", "present"]
    for wrong in (("--id", first["id"], "--key", "k"), ("--jsonl",)):
        run(*one, *wrong, code=2)
    run("rmqsend", "keyed", "1", "--at", "2099-01-01T10:00+02:00", "--id", first["id"], code=2)


def test_rmqlist_shows_dead_messages_with_their_errors(broker: Broker, run: Run) -> None:
    kill(broker, "orders", [{"order": 7}], error="shop.Boom: order 7 is bad\n  File x, line 3")
    kill(broker, "orders", [{"order": 8}], error="Reject: no")
    head, *rows = run("rmqlist", "orders", "--state", "dead").splitlines()
    assert head.split() == ["id", "died", "failures", "error", "body"] and len(rows) == 2
    (line,) = [row for row in rows if "order 7" in row]
    assert "shop.Boom: order 7 is bad" in line and "File x" not in line and '{"order": 7}' in line
    # The id of the list is that of the log, and other commands take it.
    assert run("rmqreplay", "orders", "--id", line.split()[0]) == "orders: 1 replayed\n"
    (row,) = read(run, "rmqlist", "orders", "--state", "dead")["messages"]
    assert (row["error"], row["body"], row["error_class"]) == ("Reject: no", {"order": 8}, "Reject")
    assert (row["redacted"], row["state"]) == (False, "dead") and "~" in row["log_id"]
    assert run("rmqlist", "orders", "--state", "retry") == "no messages\n"
    assert "due" in run("rmqlist", "orders", "--state", "waiting").splitlines()[0]


def test_rmqlist_shows_numbers_as_they_are_stored(broker: Broker, run: Run) -> None:
    kill(broker, "orders", [{"price": ExactNumber("1.50")}])
    assert '{"price": 1.50}' in run("rmqlist", "orders", "--state", "dead")


def test_rmqlist_says_that_there_are_more(broker: Broker, run: Run) -> None:
    kill(broker, "orders", list(range(30)))
    lines = run("rmqlist", "orders", "--state", "dead").splitlines()
    assert len(lines) == 22 and lines[-1] == "the first 20; there are more: use --limit or --group-by"
    assert len(run("rmqlist", "orders", "--state", "dead", "--limit", "30").splitlines()) == 31
    assert len(read(run, "rmqlist", "orders", "--state", "dead", "--limit", "3")["messages"]) == 3
    text = run("rmqlist", "orders", "--state", "dead", "--text", "29", "--error", "Boom").splitlines()
    assert len(text) == 2 and text[1].endswith("  29")
    for wrong in ("--state nonsense", "", "--state dead --slot 9", "--state running --error x"):
        run("rmqlist", "orders", *wrong.split(), code=2)


def test_rmqlist_groups_dead_messages_by_error(broker: Broker, run: Run) -> None:
    for n in range(12):
        kill(broker, "orders", [n], error=f"shop.Boom: order {n} of 'customer {n}' failed at 0x7f{n}a.")
    kill(broker, "orders", [20, 21], error="Reject: unknown address a.b@example.com")
    kill(broker, "orders", [30], error="put into Dead")
    head, *rows = run("rmqlist", "orders", "--state", "dead", "--group-by", "error").splitlines()
    assert head.split() == ["count", "share", "first", "last", "error", "such", "as"]
    assert [row.split()[:2] for row in rows] == [["12", "80%"], ["2", "13%"], ["1", "7%"]]
    assert "shop.Boom: order # of '…' failed at #." in rows[0]
    assert "Reject: unknown address #" in rows[1] and "put into Dead" in rows[2]
    found = read(run, "rmqlist", "orders", "--state", "dead", "--group-by", "error")
    assert [group["count"] for group in found["groups"]] == [12, 2, 1]
    assert (found["looked_at"], found["total"], found["complete"]) == (15, 15, True)
    assert run("rmqreplay", "orders", "--id", found["groups"][0]["samples"][2]) == "orders: 1 replayed\n"
    assert found["groups"][0]["first_ms"] <= found["groups"][0]["last_ms"]


def test_rmqlist_groups_by_slot_and_by_hour_and_says_what_it_has_not_looked_at(
    broker: Broker, run: Run
) -> None:
    kill(broker, "orders", list(range(40)))
    topic = get_config().topic("orders")
    found = read(run, "rmqlist", "orders", "--state", "dead", "--group-by", "slot")
    counts = {slot: broker.count(topic, slot).dead for slot in range(4)}
    assert {group["slot"]: group["count"] for group in found["groups"]} == counts
    text = run("rmqlist", "orders", "--state", "dead", "--group-by", "hour", "--limit", "10")
    assert text.splitlines()[-1] == "looked at 10 messages of 40; --limit N looks at more"
    day = f"{datetime.now(UTC):%Y-%m-%d}"
    assert all(day in line for line in text.splitlines()[1:-1])
    told = run("rmqlist", "orders", "--state", "running", "--group-by", "error", code=2)
    assert "cannot be grouped by error" in told


def masked(topic: str, body: Any) -> Any:
    return "masked"


def test_rmqlist_shows_a_redacted_topic_as_its_formatter_does(
    redis_url: str, redis_client: redis.Redis, prefix: str
) -> None:
    admin = {"FORMATTER": {"orders": f"{__name__}.masked"}}
    with override_settings(RMQ={"REDIS": redis_url, "KEY_PREFIX": prefix, "TOPICS": TOPICS, "ADMIN": admin}):
        broker = Broker(redis_client, prefix)
        kill(broker, "orders", [{"card": "4111"}], error="shop.Boom: card 4111 refused")
        options = ((), ("--json",), ("--group-by", "error"), ("--group-by", "error", "--json"))
        shown = [printed("rmqlist", "orders", "--state", "dead", *more) for more in options]
        assert all("4111" not in text and "refused" not in text for text in shown)
        assert "shop.Boom" in shown[0] and "masked" in shown[0] and "shop.Boom" in shown[2]
        with pytest.raises(CommandError, match="cannot be searched"):
            call_command("rmqlist", "orders", "--state", "dead", "--text", "4111")
        # Its sealed id does not give the body away either, and is taken by other commands.
        told = printed("rmqreplay", "orders", "--id", json.loads(shown[1])["messages"][0]["id"])
        assert told == "orders: 1 replayed\n"
        connections.close()


def started(
    prefix: str, redis_url: str, arguments: Sequence[str], terminal: dict[str, str], **options: Any
) -> subprocess.Popen[bytes]:
    """Start a command as a person does."""
    environment = {**os.environ, "REDIS_URL": redis_url, "RMQ_KEY_PREFIX": prefix, **terminal}
    return subprocess.Popen([sys.executable, "manage.py", *arguments], cwd=ROOT, env=environment, **options)


def answered(prefix: str, redis_url: str, answer: str, *arguments: str) -> tuple[int, str]:
    """Run a command on a terminal where somebody types ``answer``; return its exit code and what it showed."""
    terminal, inner = pty.openpty()
    ends = {"stdin": inner, "stdout": inner, "stderr": inner, "start_new_session": True}
    process = started(prefix, redis_url, arguments, {"TERM": "xterm", "COLUMNS": "140"}, **ends)
    os.close(inner)
    os.write(terminal, answer.encode())
    shown = b""
    try:
        while piece := os.read(terminal, 65_536):
            shown += piece
    except OSError:
        pass  # the other side is closed
    os.close(terminal)
    return process.wait(30), shown.decode(errors="replace")


@pytest.mark.slow
def test_on_a_terminal_a_purge_wants_the_name_of_the_topic(
    redis_url: str, redis_client: redis.Redis, prefix: str
) -> None:
    with override_settings(RMQ={"REDIS": redis_url, "KEY_PREFIX": prefix, "TOPICS": _shop_topics()}):
        broker = Broker(redis_client, prefix)
        topic = get_config().topic("order-timeouts")
        broker.send_replace(topic, 0, [10**12], [b"1"])
    for answer, code, left in (("yes\n", 1, 1), ("\n", 1, 1), ("order-timeouts\n", 0, 0)):
        found, text = answered(prefix, redis_url, answer, "rmqpurge", "order-timeouts", "--state", "store")
        assert found == code, text
        assert "1 message of order-timeouts (waiting) will be deleted. They can be brought back" in text
        assert broker.count(topic, 0).store == left


def _shop_topics() -> Any:
    from example_project import settings

    return settings.RMQ["TOPICS"]


def claimed(broker: Broker, count: int, consumer: str = "query") -> None:
    """Let a query hold messages of the topic renders."""
    topic = get_config().topic("renders")
    send_messages("renders", [f"{consumer} {n}" for n in range(count)], priority=100)
    for slot in range(topic.slots):
        broker.claim(topic, slot, consumer, 1, 60_000, 1_000)
        broker.renew_claim(topic, slot, consumer, 1, 60_000, seal=True)


def test_rmqclaims_lists_what_queries_hold_and_returns_it(broker: Broker, run: Run) -> None:
    assert "no Spark query holds messages" in run("rmqclaims")
    claimed(broker, 20)
    [found] = read(run, "rmqclaims")
    assert (found["topic"], found["consumer"], found["number"]) == ("renders", "query", 1)
    assert (found["state"], found["slots"], found["messages"]) == ("sealed", [0, 1], 20)
    assert "renders  query         1  sealed      2        20" in run("rmqclaims", "renders")
    assert "Use --no-input" in run("rmqclaims", "renders", "--return", code=2)
    before = stored("renders")
    assert "renders: 20 returned" in run("rmqclaims", "renders", "--return", "--no-input")
    assert len(stored("renders")) == len(before) + 20
    # As if they had never been claimed.
    assert {score for _, score in stored("renders")} == {100.0}
    assert "no Spark query holds messages" in run("rmqclaims")
    assert "nothing to do" in run("rmqclaims", "renders", "--return")


def test_rmqclaims_counts_what_a_claim_that_is_being_ended_still_holds(broker: Broker, run: Run) -> None:
    topic = get_config().topic("renders")
    for first in (0, 850):
        broker.send_replace(topic, 0, [100] * 850, [b"%d" % n for n in range(first, first + 850)])
    broker.claim(topic, 0, "query", 1, 60_000, 2_000)
    # A person was interrupted after the first step.
    assert broker.return_claim(topic, 0, "query", 1) == ("ok", 700)
    [found] = read(run, "rmqclaims")
    assert (found["state"], found["messages"]) == ("returned", 700)
    assert "700 messages of renders are returned" in run("rmqclaims", "renders", "--return", code=2)
    told = read(run, "rmqclaims", "renders", "--return", "--no-input")
    assert (told["outcomes"], told["done"], told["total"]) == ({"returned": 700}, 700, 700)


def test_rmqclaims_names_a_topic_that_it_cannot_read_and_goes_on(broker: Broker, run: Run) -> None:
    claimed(broker, 20)
    broker.client.set(slot_keys(broker.prefix, "orders", 1).claimants, "foreign")
    text = run("rmqclaims", code=1)
    assert "renders  query" in text and "orders: the key" in text
    assert "renders" in run("rmqclaims", "--json", code=1)
    assert "no Spark query" not in run("rmqclaims", "orders", code=1)


def test_rmqclaims_says_where_a_query_runs_and_frees_its_name(broker: Broker, run: Run) -> None:
    topic = get_config().topic("renders")
    assert broker.hold_consumer(topic, "query", "d", "c", "etl-2 4711 - -", 60_000, starts=True) is None
    claimed(broker, 20)
    where = read(run, "rmqclaims")[0]["driver"]
    assert re.fullmatch(r"host etl-2, process 4711, since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", where)
    assert where in run("rmqclaims", "renders")
    run("rmqclaims", "renders", "--return", "--consumer", "query", "--no-input")
    assert broker.hold_consumer(topic, "query", "e", "another", "etl-3 5 - -", 60_000, starts=True) is None
    # Also of a query that holds nothing.
    run("rmqclaims", "renders", "--return", "--consumer", "query", "--no-input")
    assert broker.hold_consumer(topic, "query", "f", "a-third", "etl-4 6 - -", 60_000, starts=True) is None


def test_rmqclaims_uses_a_retry_of_what_fails_its_batch(broker: Broker, run: Run) -> None:
    claimed(broker, 1_000)
    told = read(run, "rmqclaims", "renders", "--return", "--spent", "--no-input")
    assert told["outcomes"] == {"returned": 1_000}
    topic = get_config().topic("renders")
    assert sum(broker.count(topic, slot).retry for slot in range(2)) == 1_000


def test_rmqclaims_asks_whose_claims_are_meant(broker: Broker, run: Run) -> None:
    topic = get_config().topic("renders")
    send_messages("renders", list(range(20)), priority=100)
    for slot, consumer in enumerate(("one", "two")):
        broker.claim(topic, slot, consumer, 1, 60_000, 1_000)
    told = run("rmqclaims", "renders", "--return", "--no-input", code=2)
    assert "several consumers hold claims of renders: one, two" in told
    run("rmqclaims", "renders", "--return", "--consumer", "two", "--no-input")
    [left] = read(run, "rmqclaims")
    assert (left["consumer"], left["state"]) == ("one", "open")


@pytest.mark.parametrize("arguments", [("--return",), ("--return", "orders", "renders"), ("--spent",)])
def test_rmqclaims_is_told_exactly_what_to_return(run: Run, arguments: tuple[str, ...]) -> None:
    assert "--return" in run("rmqclaims", *arguments, code=2)


def test_rmqpause_and_rmqresume(run: Run) -> None:
    assert run("rmqpause", "orders", "renders") == "orders: 4 paused (slots)\nrenders: 2 paused (slots)\n"
    assert "paused" in run("rmqstats", "orders")
    assert read(run, "rmqresume", "--all")[0]["outcomes"] == {"resumed": 4}
    run("rmqpause", code=2)
    run("rmqpause", "orders", "--all", code=2)
    run("rmqpause", "order", code=2)


def test_rmqslots_and_rmqworkers_tell_who_owns_what(run: Run, worker: Worker) -> None:
    send_messages("orders", range(50), fixed_time=datetime.now(UTC) + timedelta(minutes=1))
    found = read(run, "rmqslots", "orders")
    assert [slot["worker"] for slot in found[0]["slots"]] == [worker.id] * 4
    assert found[0]["mean_depth"] == 12.5 and 1 <= found[0]["skew"] < 4
    assert all(slot["since"].startswith("20") for slot in found[0]["slots"])
    text = run("rmqslots", "--limit", "1")
    assert "orders: 4 slots, 12.5 messages in each" in text and "… and 3 more" in text and "a1b2c3d4" in text
    (one,) = read(run, "rmqworkers")
    assert (one["pid"], one["slots"]["orders"]) == (4711, 4)
    text = run("rmqworkers")
    assert "\x1b" not in text and "host\\x1b[31m" in text and "orders 4" in text and "3 h" in text


def test_rmqworkers_names_topics_without_a_free_thread(broker: Broker, run: Run, worker: Worker) -> None:
    assert "no free thread" not in run("rmqworkers")
    token = broker.client.hget(worker_keys(broker.prefix).workers, worker.id).split()[0].decode()
    full = replace(worker, full=frozenset(["orders", "renders"]))
    broker.beat(worker.id, token, 60_000, record=write_record(token, full))
    assert "(no free thread for orders, renders)" in run("rmqworkers")
    (one,) = read(run, "rmqworkers")
    assert one["full"] == ["orders", "renders"]


def test_a_slot_of_a_worker_that_has_died_has_no_worker(broker: Broker, run: Run, worker: Worker) -> None:
    assert "without a worker" not in run("rmqslots", "orders")
    token = broker.client.hget(worker_keys(broker.prefix).workers, worker.id).split()[0].decode()
    assert broker.run(membership.leave(worker.id, token))
    assert "4 without a worker" in run("rmqslots", "orders")
    (found,) = read(run, "rmqslots", "orders")
    assert {slot["worker"] for slot in found["slots"]} == {None} and found["workers_problem"] is None


def test_owners_of_slots_are_unknown_while_zookeeper_does_not_answer(run: Run) -> None:
    elsewhere = {"HOSTS": "127.0.0.1:1", "ROOT": "/rmq"}
    with override_settings(RMQ={**settings.RMQ, "COORDINATOR": "zookeeper", "ZOOKEEPER": elsewhere}):
        text = run("rmqslots", "orders")
        assert "workers unknown: ZooKeeper at 127.0.0.1:1 does not answer" in text
        assert "without a worker" not in text


def test_no_worker_is_told(run: Run) -> None:
    assert run("rmqworkers") == "no live worker\n"
    assert "4 without a worker" in run("rmqslots", "orders")


def test_rmqstats(broker: Broker, run: Run) -> None:
    kill(broker, "orders", [1, 2])
    send_messages("orders", [3, 4, 5], fixed_time=datetime.now(UTC) + timedelta(minutes=1))
    rows = {row["topic"]: row for row in read(run, "rmqstats")}
    assert list(rows) == list(TOPICS)
    assert (rows["orders"]["waiting"], rows["orders"]["due"], rows["orders"]["dead"]) == (3, 0, 2)
    text = run("rmqstats", "orders")
    assert text.splitlines()[0].split() == list(COLUMNS)
    cells = "orders fixed_time 3 0 0 0 2 - - 0"
    assert text.splitlines()[1].split() == cells.split(" ")
    lines = run("rmqstats", "orders", "--json", "--interval", "0.1", "--count", "2").splitlines()
    assert [json.loads(line)[0]["per_second"]["sent"] for line in lines] == [0.0, 0.0]


def test_each_exit_code_of_the_worker_is_explained_when_it_ends() -> None:
    codes = {int(code) for code in re.findall(r"(?:^|, |: )(\d) [a-zA-Z]", runrmqconsumers.Command.help)}
    assert codes - {0} == runrmqconsumers._REASONS.keys()


def waits_for_three_hours(broker: Broker) -> None:
    """Let a message of priority wait, and the one that was sent before all others have waited for long."""
    broker.send_replace(get_config().topic("renders"), 1, [50], [b"1"])
    since = int(time.time() * 1000) - 10_800_000
    assert broker.client.hset(slot_keys(broker.prefix, "renders", 1).control, "undrained_since", since) == 0


def test_every_command_takes_the_id_of_a_log_line(broker: Broker, run: Run) -> None:
    sent = send_message("keyed", {"n": 1}, key="k", fixed_time=datetime(2096, 10, 2, tzinfo=UTC))
    logged = sealed_id("keyed", sent.slot, sent.member)
    assert read(run, "rmqstats", "keyed", "--id", logged)["state"] == "waiting"
    assert run("rmqcancel", "keyed", "--id", logged) == "keyed: 1 deleted\n"
    assert "state         unknown" in run("rmqstats", "keyed", "--id", logged)
    kill(broker, "orders", [1])
    (slot,) = [slot for slot in range(4) if broker.count(get_config().topic("orders"), slot).dead]
    logged = sealed_id("orders", slot, b"1")
    assert read(run, "rmqstats", "orders", "--id", logged)["state"] == "dead"
    assert run("rmqreplay", "orders", "--id", logged) == "orders: 1 replayed\n"
    for command in ("rmqstats", "rmqcancel", "rmqreplay"):
        assert "<slot>~<digest>, as the log shows it" in run(command, "orders", "--id", "nonsense", code=2)


def test_rmqstats_says_why_a_message_waits(broker: Broker, run: Run) -> None:
    sent = send_message("orders", 1, fixed_time=datetime(2096, 10, 2, tzinfo=UTC))
    text = run("rmqstats", "orders", "--body", "1")
    assert "held by       no worker serves the topic" in text and "held by       its time, in " in text
    run("rmqpause", "orders")
    run("rmqreschedule", "orders", "--id", sent.id, "--in", "0")
    held = [line for line in run("rmqstats", "orders", "--id", sent.id).splitlines() if "held by" in line]
    assert held == ["held by       the topic is paused", "held by       no worker serves the topic"]
    found = read(run, "rmqstats", "orders", "--body", "1")
    assert [hold["reason"] for hold in found["held_by"]] == ["paused", "no_worker"]
    kill(broker, "orders", [2])
    assert read(run, "rmqstats", "orders", "--body", "2")["held_by"] == []


def test_a_topic_of_priorities_shows_for_how_long_it_has_not_been_drained(broker: Broker, run: Run) -> None:
    waits_for_three_hours(broker)
    [row] = read(run, "rmqstats", "renders")
    assert row["oldest_due_seconds"] is None and 10_800 <= row["undrained_seconds"] < 10_900
    assert " ≤ 3 h " in run("rmqstats", "renders")
    [row] = read(run, "rmqslots", "renders")
    assert [slot["undrained_since"] is None for slot in row["slots"]] == [True, False]
    assert " ≤ 3 h " in run("rmqslots", "renders")
    assert "slot 1 has not been drained for 3 h" in run("rmqaudit", "renders")
    [row] = read(run, "rmqaudit", "renders")
    assert row["undrained_slot"] == 1 and row["undrained_seconds"] >= 10_800
    text = run("rmqhealth", "renders", "--no-workers", "--max-age", "2h", code=1)
    assert "BAD  age          renders: a slot has not been drained for 3.0 h" in text
    run("rmqhealth", "renders", "--no-workers", "--max-age", "4h")
    broker.prepare(get_config().topic("renders"), 1, "W", None, 1)
    text = run("rmqhealth", "renders", "--no-workers", "--max-age", "2h", "-v", "2")
    assert "nothing is overdue" in text


def test_rates_are_those_of_the_ledger(broker: Broker, run: Run) -> None:
    operations = Operations(Actor("tester", "command"))
    before = operations.flow(["orders"])
    send_messages("orders", range(40), fixed_time=datetime.now(UTC) + timedelta(minutes=1))
    topic = get_config().topic("orders")
    broker.send_replace(topic, 0, [1000], [b"now"])
    taken = broker.prepare(topic, 0, "W", None, 1)
    broker.rollback(topic, 0, taken.receipt, [Failure(b"now")])
    after = operations.flow(["orders"])
    rates = after.since(before)["orders"]
    seconds = max(after.now_ms - before.now_ms, 1) / 1000
    counts = [round(rates[name] * seconds) for name in ("sent", "failed")]
    assert counts == [41, 1] and not rates["done"]


def test_rmqstats_that_watches_into_a_file_is_a_table_after_the_other(broker: Broker, run: Run) -> None:
    kill(broker, "orders", [1, 2])
    text = run("rmqstats", "--watch", "--interval", "0.1", "--count", "2")
    assert text.count("orders") == 2 and text.count("sent/s") == 2


def test_rmqstats_that_watches_outlasts_an_outage_where_a_person_watches(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = ("rmqstats", "orders", "--interval", "0.1", "--count", "4")
    flow, calls = Operations.flow, 0

    def breaking(operations: Operations, names: list[str]) -> TopicCounters:
        nonlocal calls
        calls += 1
        if calls in (3, 4):
            raise ServerUnavailable("Redis does not answer")
        return flow(operations, names)

    monkeypatch.setattr(Operations, "flow", breaking)
    monkeypatch.setattr(rmqstats, "find_spec", lambda name: None)
    assert "Redis does not answer" in run(*watch, code=3)
    calls = 0
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    lines = run(*watch).split("\n")
    tables = [line.split()[0] for line in lines if line]
    assert tables == ["topic", "orders", "Redis", "Redis", "topic", "orders"]


@pytest.mark.slow
def test_rmqstats_that_watches_on_a_terminal_is_live(redis_url: str, prefix: str) -> None:
    code, text = answered(prefix, redis_url, "", "rmqstats", "--interval", "0.1", "--count", "3")
    assert code == 0, text
    assert text.count("order-timeouts") >= 3 and "Traceback" not in text
    code, text = answered(prefix, "redis://127.0.0.1:1/0", "", "rmqstats", "--watch", "--count", "1")
    assert code == 0 and "Redis does not answer" in text and "Traceback" not in text


def test_rmqaudit_tells_what_is_late(broker: Broker, run: Run) -> None:
    topic, now = get_config().topic("orders"), int(time.time() * 1000)
    assert read(run, "rmqaudit", "orders")[0]["oldest_due_seconds"] is None
    broker.send_replace(topic, 2, [now - 7_200_000], [b"1"])
    broker.send_replace(topic, 1, [now - 60_000], [b"2"])
    assert "overdue: the oldest for 2 h, in slot 2" in run("rmqaudit", "orders")
    broker.prepare(topic, 1, "W", None, 1)
    assert read(run, "rmqaudit", "orders")[0]["overdue_deliveries"] == 0
    broker.client.zadd(slot_keys(broker.prefix, "orders", 1).prepare, {b"2": now - 600_000 - now % 1000})
    assert "1 deliveries are past their time-out" in run("rmqaudit", "orders")


@pytest.mark.parametrize("options", [(), ("--strays",), ("--strays", "--repair", "--adopt")])
def test_rmqaudit_names_a_topic_that_it_cannot_read_and_goes_on(
    broker: Broker, run: Run, options: tuple[str, ...]
) -> None:
    broker.client.lpush(slot_keys(broker.prefix, "orders", 1).claims, "foreign")
    text = run("rmqaudit", *options, code=1)
    assert text.startswith("orders: the key") and "not all could be read, in orders" in text
    assert "renders: balanced" in text and "blobs: balanced" in text
    printed, _ = json.JSONDecoder().raw_decode(run("rmqaudit", *options, "--json", code=1))
    rows = {row["topic"]: row for row in printed}
    assert "holds data that RMQ did not write" in rows["orders"]["problem"]
    assert (rows["renders"]["problem"], rows["renders"]["drifting"]) == ("", [])


def test_rmqaudit_counts_the_consumers_of_spark(broker: Broker, run: Run) -> None:
    key = slot_keys(broker.prefix, "orders", 2).claims
    broker.client.hset(key, mapping={f"c{n}": "1 acked 1" for n in range(499)})
    assert read(run, "rmqaudit", "orders")[0]["consumers"] == 499
    assert "consumers" not in run("rmqaudit", "orders")
    broker.client.hset(key, "one more", "1 acked 1")
    assert "500 Spark consumers are remembered in one slot" in run("rmqaudit", "orders")


def test_rmqaudit_finds_and_deletes_records_that_belong_to_nothing(broker: Broker, run: Run) -> None:
    kill(broker, "keyed", [1])
    run("rmqsend", "keyed", "2", "--key", "k", "--in", "1h")
    before = {key: broker.client.dump(key) for key in broker.client.keys(f"*{broker.prefix}*")}
    assert "balanced" in run("rmqaudit", "keyed", "--strays", "--repair")
    keys = slot_keys(broker.prefix, "keyed", 1)
    for key in (keys.body, keys.failures, keys.deaths, keys.inflight):
        broker.client.hset(key, b"gone", b"x")
    text = run("rmqaudit", "keyed", "--strays", code=1)
    assert "records that belong to no message (inflight 1, deaths 1, failures 1, body 1)" in text
    assert "4 strays are left" in text
    assert "4 strays are left" in run("rmqaudit", "keyed", "--strays", "--repair", "--dry-run", code=1)
    found = read(run, "rmqaudit", "keyed", "--strays", "--repair")[0]["strays"]
    assert found["mended"] == 4 and sum(found["loose"].values()) == 4
    run("rmqaudit", "keyed", "--strays")
    assert {key: broker.client.dump(key) for key in broker.client.keys(f"*{broker.prefix}*")} == before
    run("rmqaudit", "--repair", code=2)


def test_rmqaudit_sends_misplaced_messages_to_their_own_slots(broker: Broker, run: Run) -> None:
    topic, due = get_config().topic("orders"), int(time.time() * 1000) + 3_600_000
    members = [b"%d" % n for n in range(40)]
    wrong = [(slot_of(member, 4) + 1) % 4 for member in members]
    for member, slot in zip(members, wrong, strict=True):
        broker.send_replace(topic, slot, [due], [member])
    # One is there already, with a time of its own; one is a retry, whose budget is in its score.
    broker.send_replace(topic, slot_of(b"0", 4), [due + 5], [b"0"])
    broker.client.zadd(slot_keys(broker.prefix, "orders", wrong[1]).store, {b"1": 16})
    text = run("rmqaudit", "orders", "--strays", code=1)
    assert "40 messages are in the wrong slot" in text and "40 strays" in text
    assert "1 strays are left" in run("rmqaudit", "orders", "--strays", "--repair", code=1)
    settled = [(b"0", due + 5), (b"1", 16), *((member, due) for member in members[2:])]
    assert sorted(stored("orders")) == sorted(settled)
    for slot in range(4):
        found = broker.list_messages(topic, slot, "store").entries
        assert all(slot_of(entry.member, 4) == slot for entry in found if entry.score > 999)
    assert all(broker.audit_ledger(topic, slot).balanced for slot in range(4))


def test_rmqaudit_judges_no_place_that_was_chosen_by_hand(run: Run) -> None:
    run("rmqsend", "orders", "1", "--in", "1h", "--slot-basis", "some")
    run("rmqsend", "orders", "2", "--in", "1h", "--slot-basis", "other")
    run("rmqsend", "keyed", "1", "--in", "1h", "--key", "a", "--slot-basis", "some")
    run("rmqaudit", "--strays")


def test_rmqhealth_is_well_with_a_worker(run: Run, worker: Worker) -> None:
    found = json.loads(run("rmqhealth", "--json", "--max-age", "1h", "--max-dead", "0"))
    checks = {"redis", "writes", "coordinator", "workers", "age", "running", "dead"}
    assert found["ok"] and {one["check"] for one in found["findings"]} == checks
    # Topics that REST or Spark consumes need no worker.
    assert "blobs" not in [one["topic"] for one in found["findings"] if one["check"] == "workers"]
    text = run("rmqhealth")
    assert "ok   redis" in text and "topics are well" in text and "orders" not in text
    assert "ok   workers      orders: 1 live workers" in run("rmqhealth", "--verbosity", "2")


def test_rmqhealth_finds_what_is_amiss(broker: Broker, run: Run) -> None:
    text = run("rmqhealth", code=1)
    assert "BAD  workers      orders: no live worker serves it" in text
    assert run("rmqhealth", "--no-workers").count("BAD") == 0
    kill(broker, "orders", [1, 2])
    assert "note dead         orders: 2 messages are dead" in run("rmqhealth", "--no-workers")
    assert "2 messages are dead" in run("rmqhealth", "--no-workers", "--max-dead", "1", code=1)
    run("rmqhealth", "--no-workers", "--max-dead", "2")
    broker.send_replace(get_config().topic("orders"), 0, [int(time.time() * 1000) - 1_200_000], [b"1"])
    assert "has been due for 20 min" in run("rmqhealth", "--no-workers", "--max-age", "1m", code=1)
    assert "has been due for 20 min" in run("rmqhealth", "--no-workers", code=1)
    run("rmqhealth", "--no-workers", "--max-age", "1h")
    run("rmqpause", "orders")
    text = run("rmqhealth", "--no-workers", "--max-age", "1m")
    assert "note age          orders: the oldest message has been due for 20 min" in text
    assert "note paused       orders: is paused" in text
    run("rmqresume", "orders")
    run("rmqhealth", "--no-workers", "--max-age", "never", code=2)
    run("rmqhealth", "order", code=2)


def runs_for(broker: Broker, name: str, seconds: float) -> None:
    """Let a message be in flight, and its delivery look as if it began so long ago."""
    topic = get_config().topic(name)
    broker.send_replace(topic, 0, [int(time.time() * 1000)], [b"1"])
    taken = broker.prepare(topic, 0, "A", None, 1)
    key = slot_keys(broker.prefix, name, 0).inflight
    began = b"%d" % (taken.receipt - seconds * 1e6)
    broker.client.hset(key, b"1", broker.client.hget(key, b"1").replace(b"%d" % taken.receipt, began))


def test_what_runs_for_long_is_shown_and_may_be_limited(broker: Broker, run: Run) -> None:
    runs_for(broker, "orders", 600)
    [row] = read(run, "rmqstats", "orders")
    assert row["running"] == 1 and row["due"] == 0 and 600 <= row["oldest_running_seconds"] < 660
    assert "10 m" in run("rmqstats", "orders").splitlines()[1]
    assert "10 m" in run("rmqslots", "orders")
    assert "running" not in run("rmqhealth", "--no-workers")
    text = run("rmqhealth", "--no-workers", "--max-running", "5m", code=1)
    assert "BAD  running      orders: the longest delivery has run for 10 min" in text
    run("rmqhealth", "--no-workers", "--max-running", "1h")


def test_what_runs_for_very_long_is_a_note_without_a_limit(broker: Broker, run: Run) -> None:
    runs_for(broker, "orders", 1_200)
    told = run("rmqhealth", "--no-workers")
    assert "note running      orders: the longest delivery has run for 20 min" in told


def test_rmqhealth_leads_from_a_foreign_key_to_its_runbook(broker: Broker, run: Run, worker: Worker) -> None:
    key = slot_keys(broker.prefix, "orders", 2).store
    broker.client.set(key, "of another program")
    lines = run("rmqhealth", "orders", code=1).splitlines()
    assert lines[0] == f"BAD  unreadable   orders: slot 2: WRONGTYPE {key.decode()} is a string, not a zset"
    assert lines[1].split() == ["see", "docs/deploy/runbooks.md#rmqunreadable"]
    with pytest.raises(ServiceUnavailable, match="orders: some slots cannot be read"):
        RmqHealthCheck(topics=("orders",)).run()


@pytest.mark.slow
def test_rmqhealth_finds_slots_that_belong_to_nobody(broker: Broker, run: Run, worker: Worker) -> None:
    roster = broker.roster()
    key = b"assignment_{%srmq:workers}" % broker.prefix.encode()
    broker.client.hset(key, "plan", roster.plan.replace(worker.id.encode(), b"a-ghost"))
    assert "belong to a-ghost" in run("rmqhealth", "--patience", "0", code=1)
    # The workers mend it: whoever waits a little sees that.
    run("rmqhealth", "--patience", "30")


def test_rmqhealth_while_redis_is_away_is_unwell_and_with_wrong_settings_cannot_tell(run: Run) -> None:
    with override_settings(RMQ={"REDIS": "redis://127.0.0.1:1/0", "TOPICS": TOPICS}):
        assert "does not answer" in run("rmqhealth", code=1)
    with override_settings(RMQ={"REDIS": "nowhere", "TOPICS": TOPICS}):
        run("rmqhealth", code=2)


COMMANDS = {
    "rmqpause": ["orders"],
    "rmqresume": ["orders"],
    "rmqslots": [],
    "rmqworkers": [],
    "rmqsend": ["orders", "1", "--in", "5"],
    "rmqstats": [],
    "rmqreplay": ["orders", "--all", "--no-input"],
    "rmqpurge": ["orders", "--state", "dead", "--no-input"],
    "rmqaudit": [],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_redis_being_away_is_exit_3_in_one_line(run: Run, command: str) -> None:
    with override_settings(RMQ={"REDIS": "redis://127.0.0.1:1/0", "TOPICS": TOPICS}):
        assert "does not answer" in run(command, *COMMANDS[command], code=3)


@pytest.mark.parametrize("switch", [{"TESTING": True}, {"BROKER": "memory"}])
def test_a_worker_in_memory_says_that_no_other_process_reaches_it(
    switch: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with override_settings(RMQ={**switch, "TOPICS": {"letters": {}}}), listener_registry.isolated():
        listener("letters")(print)
        call_command("runrmqconsumers", "--burst", stdout=io.StringIO())
    assert "only what its own listeners and schedules send is consumed" in caplog.text


def test_a_project_without_databases_is_exit_2(redis_url: str, prefix: str) -> None:
    code = """
import sys
from django.conf import settings

settings.configure(INSTALLED_APPS=["django_rmq"], RMQ={"REDIS": sys.argv[1], "KEY_PREFIX": sys.argv[2], "TOPICS": {}})
from django.core.management import execute_from_command_line

execute_from_command_line(["manage.py", *sys.argv[3:]])
"""
    for arguments in (["rmqoutbox"], ["rmqoutbox", "--once"], ["rmqhealth", "--max-outbox-age", "5"]):
        command = [sys.executable, "-c", code, redis_url, prefix, *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
        assert (done.returncode, done.stdout) == (2, "")
        assert re.fullmatch("CommandError: settings.DATABASES is improperly configured.*\n", done.stderr)


def test_a_reader_that_goes_away_is_no_traceback(redis_url: str, prefix: str) -> None:
    watch = ("rmqstats", "--json", "--interval", "0.1")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = started(prefix, redis_url, watch, {}, **pipes)
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline()
    process.stdout.close()
    assert process.wait(30) == 141
    assert process.stderr.read() == b""
    process.stderr.close()


def test_cancel_takes_ids_a_key_or_a_body(broker: Broker, run: Run, caplog: pytest.LogCaptureFixture) -> None:
    run("rmqsend", "keyed", "1", "--key", "k", "--in", "1h")
    topic = get_config().topic("orders")
    for member in (b'{"n":1}', b'{"n":2}'):
        broker.send_replace(topic, slot_of(member, topic.slots), [int(time.time() * 1000)], [member])
    slot = slot_of(b'{"n":1}', topic.slots)
    assert run("rmqcancel", "orders", "--id", message_id(slot, b'{"n":1}')) == "orders: 1 deleted\n"
    told = run("rmqcancel", "keyed", "--key", "k", "--json")
    assert told == '{\n  "outcomes": {\n    "deleted": 1\n  }\n}\n'
    assert "1 messages were not cancelled" in run("rmqcancel", "keyed", "--key", "k", code=1)
    slot = slot_of(b'{"n":2}', topic.slots)
    taken = broker.prepare(topic, slot, "W", None, 1)
    with caplog.at_level("INFO", "django_rmq.audit"):
        assert run("rmqcancel", "orders", "--body", '{"n": 2}') == "orders: 1 notified\n"
    assert "cancel" in caplog.text
    assert broker.extend(topic, slot, taken.receipt, [b'{"n":2}']) == ["cancelled"]
    assert "is not JSON" in run("rmqcancel", "orders", "--body", "{", code=2)
    run("rmqcancel", "orders", code=2)


def test_the_checks_before_a_command_ask_no_database(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def check(databases: Sequence[str] | None, **_: object) -> list[CheckMessage]:
        asked.append(list(databases or ()))
        return []

    # The checks of models connect to each of these databases that is MySQL.
    check.tags = (Tags.models,)  # type: ignore[attr-defined]
    monkeypatch.setattr(registry, "registered_checks", {check})
    RmqCommand().check()
    assert asked == [[]]
