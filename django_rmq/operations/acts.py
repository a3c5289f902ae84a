"""The actions on messages of a slot: the call of each, and the names of its outcomes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from django_rmq.core.calls import people
from django_rmq.core.words.failures import cut_error
from django_rmq.operations.actors import Actor
from django_rmq.operations.runs import Progress
from django_rmq.operations.sweeps import CallOf

_BOTH_LIVE = "running_and_waiting"
_DELETED = {
    "waiting": "deleted",
    "resting": "deleted",
    "dead": "deleted",
    _BOTH_LIVE: "running",
    "not_found": "gone",
}
_CANCELLED = {
    "waiting": "deleted",
    "resting": "deleted",
    "running": "notified",
    _BOTH_LIVE: "notified",
    "not_found": "gone",
}
_BURIED = {"waiting": "buried", "resting": "buried", _BOTH_LIVE: "running", "not_found": "gone"}
_RESCHEDULED = {"waiting": "rescheduled", "resting": "rescheduled", "not_found": "gone"}


@dataclass(frozen=True, slots=True)
class Act:
    """One action on messages."""

    name: str
    call: CallOf
    outcomes: Mapping[str, str] = field(default_factory=dict)
    """The script's word → the outcome."""
    detail: str = ""
    """What the audit trail says of it beside its name. Never any content."""

    def renamed(self, progress: Progress) -> Progress:
        """Return the progress of a sweep with outcomes instead of words."""
        renamed: Counter[str] = Counter()
        for word, count in progress.outcomes.items():
            renamed[self.outcomes.get(word, "gone" if word == "not_found" else word)] += count
        return replace(progress, outcomes=dict(renamed))


REPLAY = Act("replay", people.replay)


def delete(copy: str) -> Act:
    """Return the action that deletes a copy: ``live`` or ``dead``."""
    return Act("delete", lambda topic, slot, members: people.remove(topic, slot, members, copy), _DELETED)


CANCEL = Act("cancel", people.cancel, _CANCELLED)


def bury(actor: Actor, why: str) -> Act:
    """Return the action that puts messages into Dead. The reason cannot be read as the class of an error."""
    reason = cut_error(f"put into Dead by {actor.name}{f': {why}' if why else ''}").decode()
    return Act(
        "bury",
        lambda topic, slot, members: people.bury(topic, slot, members, reason),
        _BURIED,
        "with a reason" if why else "",
    )


def reschedule(score: int, *, is_time: bool) -> Act:
    """Return the action that gives waiting messages another score."""
    to = (
        datetime.fromtimestamp(score / 1000, UTC).isoformat(timespec="milliseconds")
        if is_time
        else str(score)
    )
    return Act(
        "reschedule",
        lambda topic, slot, members: people.reschedule(topic, slot, [score] * len(members), members),
        _RESCHEDULED,
        f"to {to}" if is_time else f"to priority {to}",
    )


__all__ = ["CANCEL", "REPLAY", "Act", "bury", "delete", "reschedule"]
