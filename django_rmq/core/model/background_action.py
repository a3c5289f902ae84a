"""An action on many messages that workers do in the background: what a person has asked for, and how far it is.

Redis keeps all of them in one hash. The request is JSON in a field of its own; what was done is counted in others, each
by increments, so that two workers which do a part at the same time count both. Another program may have written a field, so
every value is checked when it is read.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

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
    keep: bool = False
    """Whether what it deletes can be brought back. Versions without undo keep nothing."""

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
    rows: defaultdict[str, dict[str, bytes]] = defaultdict(dict)
    for raw, value in fields:
        action, _, name = raw.decode("utf-8", "replace").partition(":")
        rows[action][name] = value
    found = [one for name, row in rows.items() if (one := _decode(name, row)) is not None]
    return sorted(found, key=lambda one: (one.action.started_ms, one.action.id))


def _decode(name: str, row: Mapping[str, bytes]) -> ActionProgress | None:
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
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _is_sound(action: BackgroundAction) -> bool:
    texts: tuple[object, ...] = (action.topic, action.state, action.described, action.by, action.via)
    numbers: tuple[object, ...] = (action.total, action.started_ms)
    rate: object = 1 if action.rate is None else action.rate
    conditions: object = action.conditions
    return (
        all(isinstance(text, str) for text in texts)
        and all(isinstance(number, int) and 0 <= number < 1e15 for number in numbers)
        and isinstance(rate, (int, float))
        and 0 < rate < 1e9
        and isinstance(conditions, dict)
    )
