"""What an action has deleted is kept for an hour, and can be brought back: its bounds, the list, and the undo.

The scripts that delete keep the messages; this module says how many, and remembers who has deleted what. An action of
several requests is one here as well, by its ``Trace``; an action in the background has its own id.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any
from uuid import uuid4

from django.utils.translation import gettext as _

from django_rmq.core.commands import operate, stored_actions
from django_rmq.core.commands.broker_interface import Broker, run_all
from django_rmq.core.commands.operate import Deleted
from django_rmq.core.commands.script_call import Call
from django_rmq.core.model.stored_actions import Deletion, DeletionKind
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import OperationRefused, RmqError, ServerFull, ServerTrouble
from django_rmq.operations.audit_trail import recorded
from django_rmq.operations.authorization import PERMISSION_OF, OperationContext, Permission
from django_rmq.operations.bulk import PER_SLOT, SLOTS_AT_ONCE, STEP, BulkProgress, BulkRun, BulkTally

MOST_MESSAGES = 100_000
"""The maximum number of messages of one action that can be brought back."""

MOST_BYTES = 64 * 1024 * 1024
"""The maximum size of these messages, in bytes."""

ALL_BYTES = 4 * MOST_BYTES
"""The maximum size of the messages of all actions that can be brought back."""

MOST_DELETIONS = 100
"""The maximum number of actions that can be undone at the same time."""

STEP_BYTES = 4 * 1024 * 1024
"""The approximate number of bytes that one step brings back."""


class Trash:
    """Runs the calls of one action so that they keep what they delete, within the bounds."""

    def __init__(self, broker: Broker, deletion: Deletion, size: int, *, is_new: bool) -> None:
        self._broker = broker
        self._deletion = deletion
        self._size = size
        """How many more bytes it may keep."""
        self._is_new = is_new
        """Whether the record is still to be written."""
        self._uncounted = {"kept": 0, "bytes": 0}
        """What is kept and not in the record yet, by its field."""

    @classmethod
    def opened(cls, broker: Broker, wanted: Deletion) -> Trash:
        """Return the trash of an action; if it has begun already, with what it has kept so far."""
        now_ms = broker.now_ms()
        deletions = broker.run(stored_actions.read_deletions())
        # All records are in one hash, whose fields cannot expire one by one before Redis 7.4.
        old = [one.id for one in deletions if now_ms >= one.until_ms]
        if old:
            broker.run(stored_actions.forget_deletions(old))
        alive = [one for one in deletions if one.can_be_undone(now_ms)]
        known = next((one for one in deletions if one.id == wanted.id and now_ms < one.until_ms), None)
        if known is not None and not known.undone_by:
            size = min(MOST_BYTES - known.kept_bytes, ALL_BYTES - sum(one.kept_bytes for one in alive))
            return cls(broker, known, size, is_new=False)
        size = min(MOST_BYTES, ALL_BYTES - sum(one.kept_bytes for one in alive))
        # An action may go on for longer than an hour, or after it was undone. Nobody could bring back what it keeps then.
        may_keep = len(alive) < MOST_DELETIONS and known is None and now_ms < wanted.until_ms
        return cls(broker, wanted, size if may_keep else 0, is_new=True)

    @property
    def kept(self) -> int:
        """The number of messages that can be brought back."""
        return self._deletion.kept

    @property
    def undo(self) -> str:
        """The id of the undo; empty if there is nothing to bring back."""
        return self._deletion.id if self._deletion.kept else ""

    def run(self, broker: Broker, calls: Iterable[Call[Any]]) -> list[Any]:
        """Run calls that delete, as ``run_all`` does; return the answer of each, or its error."""
        calls = list(calls)
        # All calls run in one round trip, so none of them can use what another one leaves of its share.
        share = (MOST_MESSAGES - self.kept - self._uncounted["kept"]) // max(1, len(calls))
        if not calls or share <= 0 or self._size <= 0 or not self._is_recorded(broker):
            return run_all(broker, calls)
        trash = operate.TrashShare(self._deletion.id, share, max(1, self._size // len(calls)))
        answers: list[object] = []
        for answer in run_all(broker, [operate.into_trash(call, trash) for call in calls]):
            if isinstance(answer, Deleted):
                self._uncounted["kept"] += answer.kept
                self._uncounted["bytes"] += answer.kept_bytes
                self._size -= answer.kept_bytes
                answers.append(answer.answer)
            else:
                answers.append(answer)
        self.count_kept(broker)
        return answers

    def count_kept(self, broker: Broker) -> None:
        """Add what was kept to the record. What Redis did not count is counted by the next call."""
        counts = {field: by for field, by in self._uncounted.items() if by}
        calls = [stored_actions.count_deletion(self._deletion.id, field, by) for field, by in counts.items()]
        try:
            answers = run_all(broker, calls)
        except ServerTrouble:
            # The messages are deleted, so the caller needs the answers about them, and no error about the record.
            return
        for (field, by), answer in zip(counts.items(), answers, strict=True):
            # If the connection broke, Redis may have counted. A record of too many can be undone, one of none cannot.
            if isinstance(answer, RmqError):
                continue
            self._uncounted[field] = 0
            if field == "kept":
                self._deletion = replace(self._deletion, kept=self.kept + by)

    def _is_recorded(self, broker: Broker) -> bool:
        """Write the record if it is not there yet; return whether it is. A full Redis refuses it, and then nothing is kept."""
        if self._is_new:
            try:
                # Written before anything is deleted: if this process dies, people find what it has deleted.
                broker.run(stored_actions.write_deletion(self._deletion.id, "", self._deletion.encode()))
            except ServerFull:
                self._size = 0
                return False
            self._is_new = False
        return True

    def close(self) -> None:
        """Count what is kept; forget the action if there is nothing to bring back."""
        self.count_kept(self._broker)
        if not self._is_new and not self.kept:
            # What was done is recorded afterwards, so no error is raised here. Nobody is shown a record without messages.
            with suppress(RmqError):
                self._broker.run(stored_actions.forget_deletions([self._deletion.id]))
                self._is_new = True

    def keeping(self, steps: Iterator[BulkProgress]) -> Iterator[BulkProgress]:
        """Yield the progress of a run with what can be brought back."""
        try:
            for progress in steps:
                yield replace(progress, undo=self.undo, kept=self.kept)
        finally:
            self.close()


def open_trash(context: OperationContext, kind: DeletionKind, topic: Topic, described: str) -> Trash:
    """Return the trash of an action; of one of several requests the same one for each."""
    trace = context.trace
    deletion = Deletion(
        (trace and trace.undo) or uuid4().hex[:16],
        kind,
        topic.name,
        topic.slots,
        described,
        context.actor.name,
        context.actor.via,
        context.broker.now_ms(),
    )
    if trace is not None:
        trace.undo = deletion.id
    return Trash.opened(context.broker, deletion)


def undoable(context: OperationContext, names: Collection[str] | None = None) -> list[Deletion]:
    """Return the actions that can be undone, the newest first, of all topics or those named."""
    context.actor.require(Permission.VIEW)
    names, now_ms = context.known(names), context.broker.now_ms()
    deletions = context.broker.run(stored_actions.read_deletions())
    return [
        one
        for one in reversed(deletions)
        if (names is None or one.topic in names) and one.can_be_undone(now_ms)
    ]


def undo(context: OperationContext, deletion: str, names: Collection[str] | None = None) -> BulkRun:
    """Bring back what an action has deleted, with the permission of that action. ``deletion``: its id, of a topic in ``names``.

    Messages come back to where they were. Outcomes: ``restored``; ``outdated`` (a newer copy is there, and stays). Raises
    ``OperationRefused`` if there is nothing to bring back (any more), if the action goes on, or if the topic was re-slotted.
    """
    stored = next((one for one in undoable(context, names) if one.id == deletion), None)
    if stored is None:
        raise OperationRefused(_("there is nothing to undo: an action can be undone once, within an hour"))
    topic = context.permitted(stored.topic, PERMISSION_OF[stored.kind], at_once=True)
    actions = context.broker.run(stored_actions.read_actions())
    if any(one.action.id == stored.id and one.ended_ms is None for one in actions):
        raise OperationRefused(_("the action still runs in the background: stop it first"))
    if topic.slots != stored.slots:
        raise OperationRefused(_("topic %(topic)s has another slot count since then") % {"topic": topic.name})
    steps = _restore(context, topic, stored)
    return recorded(context, f"undo {stored.kind}", topic, stored.described, steps)


def _restore(context: OperationContext, topic: Topic, deletion: Deletion) -> Iterator[BulkProgress]:
    """Bring back what is kept in each slot, in steps."""
    broker, tally = context.broker, BulkTally(deletion.kept)
    yield tally.progress()
    size = max(1, deletion.kept_bytes // deletion.kept)
    cursors = dict.fromkeys(range(topic.slots), "0")
    while cursors:
        turn = list(cursors)[:SLOTS_AT_ONCE]
        limit = max(1, min(PER_SLOT, STEP // len(turn), STEP_BYTES // size // len(turn)))
        calls = [operate.restore(topic, slot, deletion.id, cursors[slot], limit) for slot in turn]
        for slot, answer in zip(turn, run_all(broker, calls), strict=True):
            if isinstance(answer, RmqError):
                tally.failed(slot, answer)
                del cursors[slot]
                continue
            tally.done += answer.back + answer.merged
            counted = {"restored": answer.back, "outdated": answer.merged}
            tally.outcomes.update({word: count for word, count in counted.items() if count})
            if answer.cursor == "0":
                del cursors[slot]
            else:
                cursors[slot] = answer.cursor
        yield from tally.report()
    # Without this mark, a second undo can bring back what is left in the slots that failed.
    if not tally.problems:
        broker.run(stored_actions.write_deletion(deletion.id, "undone", context.actor.name))
    yield tally.progress(is_complete=not tally.problems)
