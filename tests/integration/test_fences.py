"""A slot that another worker has acquired for a moment is acquired again as soon as it is known to be ours."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from django_rmq.core.coordination import Worker as Identity
from django_rmq.core.coordination import topic_slots
from django_rmq.core.coordination.redis_coordinator import RedisCoordinator
from django_rmq.core.coordination.zookeeper import Ensemble, ZooKeeperCoordinator
from django_rmq.core.model.topic import Topic, TopicType
from tests.support.brokers import OracleBroker
from tests.support.coordinators import SESSION
from tests.support.workers import LONG, Heard, Worker, eventually, send

TOPIC = Topic("prices", TopicType.RANGE_MERGE, slots=8, time_range_ms=0, timeout=60)
OTHER = Topic("other", TopicType.RANGE_MERGE, slots=1, time_range_ms=0)
MESSAGES = 64


class Coordinated:
    """A worker of ``TOPIC`` whose slots come from a coordinator that ``make`` makes."""

    def __init__(self, broker: Any, make: Callable[..., Any], heard: Heard, **options: Any) -> None:
        self.worker = Worker(broker, TOPIC, heard, slots=[], confirmed=self._confirmed, **options)
        dispatcher = self.worker.dispatcher
        self.coordinator: Any = make(identity(dispatcher.owner, TOPIC), dispatcher.own, dispatcher.disown)
        self._sees = threading.Event()
        self._sees.set()
        self._try_turn = self.coordinator._try_turn
        self.coordinator._try_turn = self._turn

    def _confirmed(self) -> float:
        found: float = self.coordinator.confirmed()
        return found

    def _turn(self) -> float:
        assert self._sees.wait(LONG)
        seconds: float = self._try_turn()
        return seconds

    def start(self) -> None:
        self.worker.__enter__()
        self.coordinator.start()

    def stop(self) -> None:
        self._sees.set()
        self.coordinator.stop()
        self.worker.__exit__(None, None, None)

    def be_blind(self) -> None:
        """Ask for nothing any more, as when a listener keeps the interpreter to itself."""
        self._sees.clear()

    def see(self) -> None:
        self._sees.set()


def identity(name: str, topic: Topic) -> Identity:
    return Identity(name, "host", os.getpid(), time.time(), 2, topic_slots([topic]))


def miss_an_assignment(broker: Any, make: Callable[..., Any], trials: int) -> None:
    """Let one worker miss that another one had half of its slots; all messages must run soon after, in each trial."""
    # It comes first by its id, so it assigns the slots of the two others.
    assigner = make(identity("0" * 32, OTHER), lambda slots: None, lambda slots: None)
    assigner.start()
    heard = Heard()
    steady = Coordinated(broker, make, heard, poll_seconds=1.0)
    steady.start()
    try:
        eventually(lambda: steady.coordinator.wait_settled(0.1), "the slots being assigned", 30)
        for trial in range(trials):
            eventually(lambda: owns(steady) == TOPIC.slots, "owning all slots", 30)
            steady.worker.asleep()
            steady.be_blind()
            come_and_go(broker, make, heard)
            eventually(assigner_has_given_back(assigner, steady), "giving the slots back", 30)
            steady.see()
            before, bodies = len(heard.bodies), [f"{trial} {uuid.uuid4().hex}" for _ in range(MESSAGES)]
            send(broker, TOPIC, bodies)
            # A worker that does not ask the coordinator again gets these messages only after TIMEOUT.
            heard.wait(before + MESSAGES, TOPIC.timeout / 2)
    finally:
        steady.stop()
        assigner.stop()


def come_and_go(broker: Any, make: Callable[..., Any], heard: Heard) -> None:
    """Let another worker acquire half of the slots and leave."""
    passing = Coordinated(broker, make, heard)
    passing.start()
    try:
        eventually(lambda: owns(passing) == TOPIC.slots // 2, "half of the slots", 30)
        passing.worker.asleep()
    finally:
        passing.stop()


def owns(one: Coordinated) -> int:
    return sum(len(part) for part in one.coordinator.owned().get(TOPIC.name, ()))


def assigner_has_given_back(assigner: Any, steady: Coordinated) -> Callable[[], bool]:
    """Return whether the assignment gives all slots to one worker again."""
    owner = steady.coordinator.worker.id
    return lambda: (
        {span[:3] for span in assigner._last_plan.topics.get(TOPIC.name, ())}
        in ({(0, 8, owner)}, {(0, 4, owner), (4, 8, owner)})
    )


@pytest.mark.slow
def test_a_worker_that_missed_an_assignment_goes_on_with_its_slots(broker: Any) -> None:
    miss_an_assignment(broker, partial(RedisCoordinator, broker, session_seconds=SESSION), 2)


@pytest.mark.slow
def test_the_same_with_zookeeper(zookeeper: str) -> None:
    ensemble = Ensemble(zookeeper, f"/t{uuid.uuid4().hex[:12]}", SESSION)
    make = partial(ZooKeeperCoordinator, ensemble, registered=dict, token=uuid.uuid4().hex)
    miss_an_assignment(OracleBroker(), make, 2)
