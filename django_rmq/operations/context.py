"""The context of every operation: the actor, the broker and the settings, and how its outcomes are recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from django_rmq import connections, observability
from django_rmq.conf import Config
from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import SlotMoved
from django_rmq.operations.authorization import Actor, Trace, record
from django_rmq.operations.bulk import BulkProgress, BulkRun
from django_rmq.worker.listener_registry import known_settings

T = TypeVar("T")


class OperationContext:
    """An actor, its broker, and the settings. ``purpose`` selects the connections.

    ``trace``: the operations are one action of several requests, and are recorded as one.
    """

    def __init__(
        self,
        actor: Actor,
        purpose: connections.Purpose = "web",
        *,
        broker: Broker | None = None,
        trace: Trace | None = None,
    ) -> None:
        self.actor = actor
        self._trace = trace
        self.purpose = purpose
        self._given = broker

    @property
    def broker(self) -> Broker:
        """The broker of the operations."""
        return self._given if self._given is not None else connections.get_broker(self.purpose)

    @property
    def config(self) -> Config:
        """The settings, with the topics that schedules bring along."""
        return known_settings()

    def present(self, name: str, *, at_once: bool = False) -> Topic:
        """Return a topic with its current slots, whatever the settings say; see ``connections.present``."""
        return connections.present(self.config.topic(name), self._given, at_once=at_once)

    def in_present_slots(self, topic: Topic, act: Callable[[Topic], T]) -> T:
        """Perform an action in a slot, with the slot count that ``topic`` has now if the slot refuses this one."""
        try:
            return act(topic)
        except SlotMoved:
            # The topic was re-slotted after this process had read its slot count.
            present = self.present(topic.name, at_once=True)
            # The count is the same, so a second attempt would fail in the same way.
            if present.slots == topic.slots:
                raise
            return act(present)

    def present_all(self, names: Iterable[str] | None) -> list[Topic]:
        """Return these topics, or all of the settings, like ``present``."""
        return [self.present(name) for name in (self.config.topics if names is None else names)]

    def agreed(self, name: str) -> Topic:
        """Return a topic like ``present``. Raises ``TopicMismatch`` under the same conditions as a worker."""
        declared = self.config.topic(name)
        if self._given is None:
            connections.agree(declared)
        return connections.present(declared, self._given)

    def record(self, act: str, topic: str, outcomes: Mapping[str, int], note: str = "") -> None:
        """Record the outcomes of an action, and announce replayed messages."""
        record(self.actor, act, topic, outcomes, note, trace=self._trace)
        done = {word: outcomes[word] for word in ("replayed", "merged") if outcomes.get(word)}
        if act.startswith("replay") and done:
            observability.announce_replayed(topic, done, self.actor.name)

    def recorded(self, act: str, topic: Topic, what: str, steps: Iterator[BulkProgress]) -> BulkRun:
        """Return a run that is recorded when it ends, in whatever way."""

        def recorded() -> Iterator[BulkProgress]:
            last: BulkProgress | None = None
            try:
                for last in steps:
                    yield last
            finally:
                # A run may be closed before its end. Its steps until then are recorded all the same.
                if last is not None:
                    note = what if last.is_complete else f"{what}, incomplete"
                    self.record(act, topic.name, last.outcomes, note)

        return BulkRun(recorded())


__all__ = ["OperationContext"]
