"""The states of a slot in a dispatcher: all transitions are in the tables, and each of those in the tables is made.

The dispatcher works on a real server. Its threads do not run: the test makes the turns of its loop. Every other test and the
worker processes of the tests that kill them check the transitions as well (``tests/support/slot_transitions.py``).
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_rmq.core.clock import uptime
from django_rmq.core.consumer import (
    AssignmentCallbacks,
    Dispatcher,
    WorkerOptions,
    fetch_planner,
    slot_acquisition,
)
from django_rmq.core.consumer.batch import BatchReport
from django_rmq.core.consumer.mailbox import Wake
from django_rmq.core.consumer.slots import ConsumedSlot, FetchState, SlotState
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.exceptions import ServerTrouble, ServerUnavailable
from tests.support import slot_transitions
from tests.support.brokers import Pipeline
from tests.support.slot_transitions import TABLE, Transition
from tests.support.workers import Broker, Listener, audit, client_of, live, send

TOPIC = Topic("prices", TopicType.RANGE_MERGE, slots=3, time_range_ms=0)
TURNS = 200


class LossyBroker(Broker):
    """Loses the replies of the next round trip after Redis has executed it, if ``loses`` is set."""

    loses = False

    def pipeline(self) -> Pipeline:
        pipeline = super().pipeline()
        receive = pipeline.receive

        def receive_or_lose() -> list[object]:
            replies = receive()
            if self.loses:
                self.loses = False
                raise ServerUnavailable("the reply is lost")
            return replies

        pipeline.receive = receive_or_lose  # type: ignore[method-assign]
        return pipeline


class Driven:
    """A dispatcher whose turns the test makes, and what may happen to it."""

    def __init__(self, broker: Broker, lossy: LossyBroker) -> None:
        self.broker, self.lossy = broker, lossy
        self.sent = 0
        self.confirmed = float("-inf")
        self.dispatcher = Dispatcher(
            lossy,
            [TOPIC],
            {TOPIC.name: Listener(TOPIC.name, print)},
            WorkerOptions(threads=1, poll_seconds=3600.0),
            ownership=AssignmentCallbacks(confirmed=lambda: self.confirmed),
        )

    @property
    def slot(self) -> ConsumedSlot | None:
        """A slot that is not acquired, or else the one whose fetch is under way, or any that has a record."""
        slots = list(self.dispatcher._table.awake.values())
        slots.sort(key=lambda slot: (slot.state is SlotState.ACQUIRED, slot.fetch is FetchState.IDLE))
        return slots[0] if slots else None

    def own(self) -> None:
        self.dispatcher.own((TOPIC.name, number) for number in range(TOPIC.slots))
        self.dispatcher._mailbox.process_items()

    def disown(self) -> None:
        if (slot := self.slot) is not None:
            self.dispatcher.disown([slot.key])
            self.dispatcher._mailbox.process_items()

    def turn(self) -> None:
        with contextlib.suppress(ServerTrouble):
            self.dispatcher._turn()
        for slot in self.dispatcher._table.awake.values():
            # The answer of a disowned slot is given back because its fetch is recalled.
            assert slot.is_owned or slot.fetch is not FetchState.UNDER_WAY

    def send(self) -> None:
        send(self.broker, TOPIC, range(self.sent, self.sent + 12))
        self.sent += 12

    def lose(self) -> None:
        """Let the reply of the next round trip be lost."""
        self.lossy.loses = True

    def fence(self) -> None:
        """Let another worker acquire all slots."""
        for number in range(TOPIC.slots):
            self.broker.acquire(TOPIC, number)

    def confirm(self) -> None:
        """Let the coordinator say that the slots are this worker's."""
        self.confirmed = uptime()

    def wake(self) -> None:
        for number in range(TOPIC.slots):
            self.dispatcher._mailbox.handle(Wake(TOPIC.name, number))

    def pause(self) -> None:
        if (slot := self.slot) is not None:
            self.broker.pause(TOPIC, slot.number, True)
            self.dispatcher._mailbox.handle(Wake(TOPIC.name, -1 - slot.number))

    def resume(self) -> None:
        for number in range(TOPIC.slots):
            self.broker.pause(TOPIC, number, False)
        self.wake()

    def work(self) -> None:
        """Let the listener succeed with all that was delivered."""
        (thread,) = self.dispatcher._pool.threads
        for batch in list(self.dispatcher._in_flight.batches.values()):
            if thread.withdraw(batch):
                members = [message.delivery.member for message in batch.messages]
                self.dispatcher._router.finished(BatchReport(batch, members, [], [], 0.001, True))

    def finish(self) -> None:
        """Process everything that was sent."""
        self.lossy.loses = False
        self.own()
        self.resume()
        for _ in range(TURNS):
            self.confirm()
            self.wake()
            self.turn()
            self.work()
            if not live(self.broker, TOPIC):
                return
        raise AssertionError(f"{live(self.broker, TOPIC)} messages are left")


ACTIONS = ("own", "disown", "turn", "send", "lose", "fence", "confirm", "wake", "pause", "resume", "work")


@contextlib.contextmanager
def driven(redis_url: str) -> Iterator[Driven]:
    """A dispatcher of its own, which fetches one slot per round trip and looks at fenced slots in each turn."""
    client = client_of(redis_url)
    prefix = f"t{uuid.uuid4().hex[:12]}:"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fetch_planner, "TURN_MESSAGES", 1)
        patch.setattr(slot_acquisition, "LOOK_SECONDS", 0.0)
        yield Driven(Broker(client, prefix), LossyBroker(client, prefix))
    client.close()


@given(actions=st.lists(st.sampled_from(ACTIONS), min_size=10, max_size=60))
def test_whatever_happens_to_a_slot_is_in_the_table_and_loses_nothing(
    redis_url: str, actions: list[str]
) -> None:
    with driven(redis_url) as one:
        for action in actions:
            getattr(one, action)()
        one.finish()
        assert sum(ledger["committed"] for ledger in audit(one.broker, TOPIC)) == one.sent


UNDER_WAY = "own send turn"
"""Afterwards the answer to a fetch of one slot is outstanding."""

WAYS: dict[Transition, str] = {
    (SlotState.ASSIGNED, SlotState.ACQUIRED): "send own turn",
    (SlotState.ASSIGNED, SlotState.DISOWNED): f"{UNDER_WAY} disown own disown",
    (SlotState.ASSIGNED, SlotState.UNCERTAIN): f"{UNDER_WAY} disown own lose turn",
    (SlotState.ACQUIRED, SlotState.FENCED): "own turn fence send wake turn turn turn",
    (SlotState.ACQUIRED, SlotState.DISOWNED): f"{UNDER_WAY} disown",
    (SlotState.ACQUIRED, SlotState.UNCERTAIN): f"{UNDER_WAY} lose turn",
    (SlotState.FENCED, SlotState.ASSIGNED): "own turn fence send wake turn turn turn confirm turn",
    (SlotState.FENCED, SlotState.DISOWNED): "own turn fence send wake turn turn turn disown",
    (SlotState.UNCERTAIN, SlotState.ACQUIRED): f"{UNDER_WAY} lose turn turn",
    (SlotState.UNCERTAIN, SlotState.DISOWNED_UNCERTAIN): f"{UNDER_WAY} lose turn disown",
    (SlotState.DISOWNED, SlotState.ASSIGNED): f"{UNDER_WAY} disown own",
    (SlotState.DISOWNED, SlotState.DISOWNED_UNCERTAIN): f"{UNDER_WAY} disown lose turn",
    (SlotState.DISOWNED_UNCERTAIN, SlotState.UNCERTAIN): f"{UNDER_WAY} disown lose turn own",
    (SlotState.DISOWNED_UNCERTAIN, SlotState.DISOWNED): f"{UNDER_WAY} disown lose turn turn",
    (FetchState.IDLE, FetchState.UNDER_WAY): UNDER_WAY,
    (FetchState.UNDER_WAY, FetchState.IDLE): f"{UNDER_WAY} turn",
    (FetchState.UNDER_WAY, FetchState.RECALLED): f"{UNDER_WAY} pause",
    (FetchState.RECALLED, FetchState.IDLE): f"{UNDER_WAY} pause turn",
}


def test_there_is_a_way_to_each_transition_of_the_tables() -> None:
    assert WAYS.keys() == TABLE


@pytest.mark.parametrize("transition", WAYS, ids=lambda made: f"{made[0].name}-{made[1].name}")
def test_each_transition_of_the_tables_is_made(
    redis_url: str, transition: Transition, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_transitions, "made", set())
    with driven(redis_url) as one:
        *before, last = WAYS[transition].split()
        for action in before:
            getattr(one, action)()
        assert transition not in slot_transitions.made or before.count(last) > 0
        getattr(one, last)()
        assert transition in slot_transitions.made
        one.finish()
