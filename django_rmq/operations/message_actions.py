"""The actions on messages of a slot: the call of each, and the names of its outcomes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from django_rmq.core.commands import operate
from django_rmq.core.model.replies import cut_error
from django_rmq.operations.actors import Actor
from django_rmq.operations.bulk_run import BulkProgress
from django_rmq.operations.bulk_steps import CallOf

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
class MessageAction:
    """One action on messages."""

    name: str
    call: CallOf
    outcomes: Mapping[str, str] = field(default_factory=dict)
    """The script's word → the outcome."""
    detail: str = ""
    """What the audit trail says of it beside its name. Never any content."""

    def renamed(self, progress: BulkProgress) -> BulkProgress:
        """Return the progress of a sweep with outcomes instead of words."""
        renamed: Counter[str] = Counter()
        for word, count in progress.outcomes.items():
            renamed[self.outcomes.get(word, "gone" if word == "not_found" else word)] += count
        return replace(progress, outcomes=dict(renamed))


REPLAY = MessageAction("replay", operate.replay)


def delete(copy: str) -> MessageAction:
    """Return the action that deletes a copy: ``live`` or ``dead``."""
    return MessageAction(
        "delete", lambda topic, slot, members: operate.remove(topic, slot, members, copy), _DELETED
    )


CANCEL = MessageAction("cancel", operate.cancel, _CANCELLED)


def bury(actor: Actor, why: str) -> MessageAction:
    """Return the action that puts messages into Dead. The reason cannot be read as the class of an error."""
    reason = cut_error(f"put into Dead by {actor.name}{f': {why}' if why else ''}").decode()
    return MessageAction(
        "bury",
        lambda topic, slot, members: operate.bury(topic, slot, members, reason),
        _BURIED,
        "with a reason" if why else "",
    )


def reschedule(score: int, *, is_time: bool) -> MessageAction:
    """Return the action that gives waiting messages another score."""
    to = (
        datetime.fromtimestamp(score / 1000, UTC).isoformat(timespec="milliseconds")
        if is_time
        else str(score)
    )
    return MessageAction(
        "reschedule",
        lambda topic, slot, members: operate.reschedule(topic, slot, [score] * len(members), members),
        _RESCHEDULED,
        f"to {to}" if is_time else f"to priority {to}",
    )


__all__ = ["CANCEL", "REPLAY", "MessageAction", "bury", "delete", "reschedule"]
