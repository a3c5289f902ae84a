"""What Redis keeps of actions on many messages: those in the background, and what was deleted and can be brought back.

Each of the two kinds has one hash. The request of a person is JSON in a field of its own; what was done or kept is counted in
others, each by increments, so that two workers which do a part at the same time count both. Another program may have written
a field, so every value is checked when it is read.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from django_rmq.core.model.bounds import OTHER_FORM

ActionKind = Literal["replay", "delete", "purge"]

MOST_ACTIONS = 20
"""The maximum number of actions that Redis keeps; the oldest ended ones are forgotten for new ones."""

KEPT_MS = 3_600_000
"""Milliseconds for which an action is shown after its end."""

BEAT_MS = 15_000
"""Milliseconds after the last part of an action after which it waits for a worker."""


@dataclass(frozen=True, slots=True)
class BackgroundAction:
    """What a person has asked for."""

    id: str
    kind: ActionKind
    topic: str
    state: str
    """The name of the state's queue."""
    conditions: Mapping[str, Any]
    """The fields of ``Filter`` that are not empty."""
    described: str
    """The selection as the audit trail names it."""
    total: int
    """How many messages it may take."""
    is_exact: bool
    """Whether ``total`` is the number of those that match. If not, it is the number of those that are searched."""
    rate: float | None
    """Messages per second, or None without a limit."""
    by: str
    via: str
    user: int | str | None
    """The primary key of the user, for the audit trail."""
    entry: int | None
    """The LogEntry of the audit trail."""
    started_ms: int
    keep: bool
    """Whether what it deletes can be brought back."""

    def encode(self) -> str:
        """Return the text that Redis keeps."""
        return json.dumps(asdict(self), separators=(",", ":"))


@dataclass(slots=True)
class ActionProgress:
    """An action, and how far it is."""

    action: BackgroundAction
    outcomes: dict[str, int] = field(default_factory=dict)
    beat_ms: int | None = None
    """When a worker has last done a part of it."""
    worker: str = ""
    """The worker that has done the last part."""
    stopped_by: str = ""
    ended_ms: int | None = None
    is_complete: bool = False
    problem: str = ""

    @property
    def done(self) -> int:
        """The number of messages processed."""
        return sum(self.outcomes.values())

    @property
    def left(self) -> int:
        """How many more messages it may take."""
        return max(0, self.action.total - self.done)

    def state(self, now_ms: int) -> str:
        """Return running, waiting (for a worker), stopping, done, stopped or failed."""
        if self.ended_ms is not None:
            return "stopped" if self.stopped_by else "done" if self.is_complete else "failed"
        if self.stopped_by:
            return "stopping"
        is_alive = self.beat_ms is not None and now_ms - self.beat_ms < BEAT_MS
        return "running" if is_alive else "waiting"

    def rate(self, now_ms: int) -> float | None:
        """Return how many messages per second it has taken on average, or None if that is unknown."""
        seconds = ((self.ended_ms or now_ms) - self.action.started_ms) / 1000
        return self.done / seconds if self.done and seconds >= 1 else None

    def seconds_left(self, now_ms: int) -> float | None:
        """Return how long the rest takes at that rate, or None if that is unknown."""
        rate = self.rate(now_ms)
        return self.left / rate if rate and self.action.is_exact and self.ended_ms is None else None


def decode_actions(fields: Iterable[tuple[bytes, bytes]]) -> list[ActionProgress]:
    """Return all actions of the hash, the oldest first. What another program wrote is left out."""
    actions = [one for name, row in _rows(fields) if (one := _decode_action(name, row)) is not None]
    return sorted(actions, key=lambda one: (one.action.started_ms, one.action.id))


def _rows(fields: Iterable[tuple[bytes, bytes]]) -> Iterable[tuple[str, dict[str, bytes]]]:
    """Return each id with its fields, whose names are ``<id>:<name>``."""
    rows: defaultdict[str, dict[str, bytes]] = defaultdict(dict)
    for raw, value in fields:
        key, _, name = raw.decode("utf-8", "replace").partition(":")
        rows[key][name] = value
    return rows.items()


def _decode_action(name: str, row: Mapping[str, bytes]) -> ActionProgress | None:
    try:
        action = BackgroundAction(**json.loads(row[""]))
        if action.id != name or action.kind not in get_args(ActionKind) or not _is_sound(action):
            return None
        beat, _, worker = row.get("beat", b"").decode().partition(" ")
        ended = json.loads(row.get("ended", b"{}"))
        return ActionProgress(
            action,
            {word[4:]: int(count) for word, count in row.items() if word.startswith("did.")},
            int(beat) if beat else None,
            worker[:100],
            row.get("stopped", b"").decode()[:200],
            int(ended["at_ms"]) if ended else None,
            bool(ended.get("complete")),
            str(ended.get("problem", ""))[:500],
        )
    except OTHER_FORM:
        return None


def _is_sound(action: BackgroundAction) -> bool:
    rate: object = 1 if action.rate is None else action.rate
    conditions: object = action.conditions
    return (
        _are_sound(
            (action.topic, action.state, action.described, action.by, action.via),
            (action.total, action.started_ms),
        )
        and isinstance(rate, (int, float))
        and 0 < rate < 1e9
        and isinstance(conditions, dict)
    )


def _are_sound(texts: Iterable[object], numbers: Iterable[object]) -> bool:
    return all(isinstance(text, str) for text in texts) and all(
        isinstance(number, int) and 0 <= number < 1e15 for number in numbers
    )


DeletionKind = Literal["delete", "purge"]

UNDO_MS = 3_600_000
"""Milliseconds for which what was deleted can be brought back. The section ``trash`` of ``lua/slot/operate`` has the same number;
the admin, REST and ``rmqpurge`` say "for one hour"."""


@dataclass(frozen=True, slots=True)
class Deletion:
    """An action that has deleted messages, which Redis keeps for a while."""

    id: str
    kind: DeletionKind
    topic: str
    slots: int
    """The slot count of the topic: with another one, messages may belong elsewhere."""
    described: str
    """The messages, as the audit trail names them."""
    by: str
    via: str
    began_ms: int
    kept: int = 0
    """The number of messages that can be brought back."""
    kept_bytes: int = 0
    undone_by: str = ""
    """Who has brought them back; empty: nobody."""

    @property
    def until_ms(self) -> int:
        """Until when everything that is kept can be brought back."""
        return self.began_ms + UNDO_MS

    def can_be_undone(self, now_ms: int) -> bool:
        """Return whether there is something to bring back."""
        return self.kept > 0 and not self.undone_by and now_ms < self.until_ms

    def encode(self) -> str:
        """Return the text that Redis keeps. What is counted has fields of its own."""
        record = asdict(self)
        for name in ("kept", "kept_bytes", "undone_by"):
            del record[name]
        return json.dumps(record, separators=(",", ":"))


FIELDS = ("", "kept", "bytes", "undone")
"""The ends of the names of a deletion's fields."""


def decode_deletions(fields: Iterable[tuple[bytes, bytes]]) -> list[Deletion]:
    """Return all deletions of the hash, the oldest first. What another program wrote is left out."""
    deletions = [one for name, row in _rows(fields) if (one := _decode_deletion(name, row)) is not None]
    return sorted(deletions, key=lambda one: (one.began_ms, one.id))


def _decode_deletion(name: str, row: Mapping[str, bytes]) -> Deletion | None:
    try:
        deletion = Deletion(
            **json.loads(row[""]),
            kept=int(row.get("kept", 0)),
            kept_bytes=int(row.get("bytes", 0)),
            undone_by=row.get("undone", b"").decode()[:200],
        )
    except OTHER_FORM:
        return None
    is_sound = (
        deletion.id == name
        and deletion.kind in get_args(DeletionKind)
        and _are_sound(
            (deletion.topic, deletion.described, deletion.by, deletion.via),
            (deletion.slots, deletion.began_ms, deletion.kept, deletion.kept_bytes),
        )
    )
    return deletion if is_sound else None
