"""The places of a call, which find its keys by their names, and the facts of its topic that scripts receive as arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

from django_rmq.core.model.keys import (
    SlotKeys,
    history_keys,
    keys_of_slots,
    slot_keys,
    wake_channel,
    worker_keys,
    workers_channel,
)
from django_rmq.core.model.topic import Topic

_STATES = {
    "store": {"set": "store", "records": "failures", "body": "body"},
    "prepare": {"set": "prepare", "records": "inflight", "body": "prepare_body"},
    "retry": {"set": "retry", "records": "failures", "body": "body"},
    "dead": {"set": "dead", "records": "deaths", "body": "body"},
    "claim": {"set": "claim", "records": "failures", "body": "claim_body"},
    "claimants": {"set": "claimants"},
}
"""State -> its set, the hash of records about its members, and the hash of their bodies."""


class KeyPlace(Protocol):
    """Finds the keys of a call by their names."""

    def keys(self, prefix: str, names: tuple[str, ...]) -> Sequence[bytes]:
        """Return the keys with these names."""


@cache
def _chosen(names: tuple[str, ...]) -> Callable[[tuple[bytes, ...]], tuple[bytes, ...]]:
    """Return a function that picks the keys with these names from all keys of a slot."""
    places = [SlotKeys._fields.index(name) for name in names]
    if len(places) == 1:
        (place,) = places
        return lambda keys: (keys[place],)
    return itemgetter(*places)


class AtSlot(NamedTuple):
    """One slot."""

    topic: Topic
    slot: int

    def keys(self, prefix: str, names: tuple[str, ...]) -> Sequence[bytes]:
        """Return the slot's keys with these names."""
        return _chosen(names)(slot_keys(prefix, self.topic.name, self.slot))


class AtSlots(NamedTuple):
    """Many slots of one topic."""

    topic: Topic
    slots: Sequence[int]

    def keys(self, prefix: str, names: tuple[str, ...]) -> Sequence[bytes]:
        """Return the keys with these names, slot by slot."""
        return keys_of_slots(prefix, self.topic.name, self.slots, names)

    def parts(self) -> list[AtSlots]:
        """Return a place for each slot, since one node of a Redis Cluster holds all of a slot."""
        return [AtSlots(self.topic, (slot,)) for slot in self.slots]


class InState(NamedTuple):
    """One state of a slot: its set, the records about its members, and their bodies."""

    topic: Topic
    slot: int
    state: str

    def keys(self, prefix: str, names: tuple[str, ...]) -> Sequence[bytes]:
        """Return the state's keys with these names."""
        state, keys = _STATES[self.state], slot_keys(prefix, self.topic.name, self.slot)
        return [getattr(keys, state[name]) for name in names]


class OfWorkers(NamedTuple):
    """The keys of workers and of their assignment."""

    def keys(self, prefix: str, names: tuple[str, ...]) -> Sequence[bytes]:
        """Return the workers' keys with these names."""
        keys = worker_keys(prefix)
        return [getattr(keys, name) for name in names]


class OfHistory(NamedTuple):
    """The history of a topic."""

    topic: Topic

    def keys(self, prefix: str, names: tuple[str, ...]) -> Sequence[bytes]:
        """Return the history's keys with these names."""
        keys = history_keys(prefix, self.topic.name)
        return [getattr(keys, name) for name in names]


class Named(NamedTuple):
    """One key, found by the name of a topic, a spender or a request."""

    key: Callable[[str, str], bytes]
    name: str

    def keys(self, prefix: str, names: tuple[str, ...]) -> Sequence[bytes]:
        """Return the key."""
        return (self.key(prefix, self.name),)


def _channel(prefix: str, place: Any) -> bytes:
    return workers_channel(prefix) if isinstance(place, OfWorkers) else wake_channel(prefix, place.topic.name)


def _room(_: str, place: Any) -> int:
    topic: Topic = place.topic
    return 1 if topic.serial else topic.max_prepared


FACTS: dict[str, Callable[[str, Any], Any]] = {
    "channel": _channel,
    "room": _room,
    "backlog": lambda _, place: place.topic.slot_backlog,
    "kind": lambda _, place: place.topic.type.value,
    "slots": lambda _, place: place.topic.slots,
    "retry_priority": lambda _, place: place.topic.retry_priority,
    "backoff_base": lambda _, place: place.topic.backoff.base_ms,
    "backoff_cap": lambda _, place: place.topic.backoff.cap_ms,
    "timeout": lambda _, place: place.topic.timeout,
    "max_retries": lambda _, place: place.topic.max_retries,
    "serial": lambda _, place: int(place.topic.serial),
    "max_wait": lambda _, place: place.topic.debounce_ms,
    "accumulate": lambda _, place: place.topic.accumulate or 0,
    "max_body": lambda _, place: place.topic.max_body,
    "slot_each_us": lambda _, place: place.topic.slot_each_us,
    "strict": lambda _, place: int(place.topic.is_strict),
    "on_duplicate": lambda _, place: place.topic.on_duplicate,
    "outcome_retention_ms": lambda _, place: place.topic.outcome_retention_ms or 0,
}
"""The arguments of scripts that are facts of the topic, by their names in the headers."""
