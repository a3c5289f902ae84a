"""A node of a cluster that is lost during an action on all messages: what the other nodes did is counted and recorded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from django_rmq.conf import get_config
from django_rmq.core.commands import inspect, stored_actions
from django_rmq.core.commands.broker_interface import run_all
from django_rmq.core.commands.script_call import Call
from django_rmq.exceptions import NodeUnavailable, ServerUnavailable
from django_rmq.operations import Actor, BulkRun, Operations, actions, bulk, bulk_actions, undo
from tests.support.brokers import project_on
from tests.support.workers import send

TOPICS = {"letters": {"TYPE": "range_merge", "SLOTS": 4, "TIME_RANGE": "1ms"}}
COUNT, LOST = 12, 3


@pytest.fixture
def shop(broker: Any) -> Iterator[Any]:
    with project_on(broker, TOPICS=TOPICS):
        yield broker


def operations() -> Operations:
    return Operations(Actor("ada", "test"))


def put(shop: Any, count: int = COUNT, word: str = "m") -> None:
    send(shop, get_config().topic("letters"), [f"{word}{number}" for number in range(count)])


def make_dead(shop: Any) -> None:
    put(shop)
    operations().bury_all("letters", "waiting").result()


def lost_messages(shop: Any, state: str) -> int:
    """Return how many messages the slot of the lost node has."""
    counts = shop.count(get_config().topic("letters"), LOST)
    return {"waiting": counts.store, "dead": counts.dead}[state]


def lose(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Let the node of one slot answer no call of a script any more."""

    def is_lost(call: Call[Any]) -> bool:
        return call.script.startswith(script) and getattr(call.place, "slot", None) == LOST

    def run(broker: Any, calls: Iterable[Call[Any]]) -> list[Any]:
        calls = list(calls)
        answers = iter(run_all(broker, [call for call in calls if not is_lost(call)]))
        return [NodeUnavailable("a node is gone") if is_lost(call) else next(answers) for call in calls]

    for module in (bulk, bulk_actions, undo):
        monkeypatch.setattr(module, "run_all", run)


def replay(shop: Any) -> tuple[str, str, Callable[[], BulkRun]]:
    make_dead(shop)
    return "replay", "dead", lambda: operations().replay_all("letters")


def delete(shop: Any) -> tuple[str, str, Callable[[], BulkRun]]:
    put(shop)
    return "remove", "waiting", lambda: operations().delete_all("letters", "waiting")


def purge(shop: Any) -> tuple[str, str, Callable[[], BulkRun]]:
    put(shop)
    return "purge", "waiting", lambda: operations().purge("letters", "waiting")


def bring_back(shop: Any) -> tuple[str, str, Callable[[], BulkRun]]:
    put(shop)
    return "restore", "waiting", lambda: operations().undo(operations().undoable()[0].id)


@pytest.mark.parametrize(
    ("begin", "word"),
    [(replay, "replayed"), (delete, "deleted"), (purge, "purged"), (bring_back, "restored")],
)
def test_what_the_other_nodes_did_is_in_the_progress_and_in_the_audit_trail(
    shop: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    begin: Callable[[Any], tuple[str, str, Callable[[], BulkRun]]],
    word: str,
) -> None:
    script, state, act = begin(shop)
    done = COUNT - lost_messages(shop, state)
    if begin is bring_back:
        operations().purge("letters", "waiting").result()
    lose(monkeypatch, script)
    run = act()
    with caplog.at_level(logging.INFO, "django_rmq.audit"), pytest.raises(NodeUnavailable):
        run.result()
    assert 0 < done < COUNT
    assert run.progress.outcomes == {word: done} and not run.progress.is_complete
    assert [record.rmq_outcomes for record in caplog.records] == [{word: done}]  # type: ignore[attr-defined]


def test_a_pause_says_which_slots_are_paused(shop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lose(monkeypatch, "pause")
    run = operations().pause("letters")
    with pytest.raises(NodeUnavailable):
        run.result()
    assert (run.progress.outcomes, run.progress.done) == ({"paused": 3}, 3)


def test_a_purge_in_the_background_deletes_no_more_than_there_was(
    shop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(shop)
    action = operations().start_action("letters", "purge", "waiting").action.id
    with monkeypatch.context() as patch:
        lose(patch, "purge")
        with pytest.raises(NodeUnavailable):
            bulk_actions.run_part(operations(), action, "w", lambda: False)
    put(shop, 20, "later")
    assert bulk_actions.run_part(operations(), action, "w", lambda: False)
    (ended,) = operations().background_actions()
    assert ended.outcomes == {"purged": COUNT} and ended.is_complete
    assert operations().topic("letters").store == 20


def test_a_deletion_that_keeps_nothing_is_recorded_though_redis_is_lost_then(
    shop: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put(shop, 1)
    (copy,) = operations().listing("letters", "waiting").copies
    assert len(shop.prepare(get_config().topic("letters"), copy.slot, "W", None, 1).deliveries) == 1

    def fail(*_: object) -> Any:
        raise ServerUnavailable("gone")

    monkeypatch.setattr(stored_actions, "forget_deletions", fail)
    with caplog.at_level(logging.INFO, "django_rmq.audit"):
        assert operations().delete("letters", [copy.id], "live").outcomes == {"running": 1}
    assert [record.rmq_outcomes for record in caplog.records] == [{"running": 1}]  # type: ignore[attr-defined]
    assert operations().undoable() == []


@pytest.mark.parametrize("fails", ["the search after a re-slotting", "the look at what is not dead"])
def test_what_was_done_to_named_messages_is_recorded_though_redis_is_lost_then(
    shop: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: str
) -> None:
    make_dead(shop)
    ids = [copy.id for copy in operations().listing("letters", "dead").copies if copy.slot == 1]
    operations().delete("letters", ids[:1], "dead")

    def fail(*_: object, **__: object) -> Any:
        raise ServerUnavailable("gone")

    if fails == "the search after a re-slotting":
        monkeypatch.setattr(actions, "find_moved", fail)
    else:
        monkeypatch.setattr(inspect, "describe_messages", fail)
    with caplog.at_level(logging.INFO, "django_rmq.audit"), pytest.raises(ServerUnavailable):
        operations().replay("letters", ids)
    (record,) = caplog.records
    outcomes: dict[str, int] = record.rmq_outcomes  # type: ignore[attr-defined]
    assert outcomes.pop("replayed") == len(ids) - 1 > 0 and sum(outcomes.values()) == 1
    assert operations().topic("letters").store == len(ids) - 1
