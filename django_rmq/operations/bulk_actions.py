"""Actions on all selected messages, and on whole topics: each is a run of small steps (``bulk``), which is recorded.

The caller waits for them. ``background_actions`` has those that workers do instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from django.utils.translation import gettext as _

from django_rmq import connections
from django_rmq.core.commands import operate
from django_rmq.core.commands.broker_interface import run_all
from django_rmq.core.model.status import STATE_OF, queue_of
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import OperationRefused
from django_rmq.operations import actions, bulk, undeclared_topics
from django_rmq.operations.actions import REPLAY, MessageAction, new_score
from django_rmq.operations.authorization import PERMISSION_OF, Permission
from django_rmq.operations.bulk import BulkProgress, BulkRun, Limits
from django_rmq.operations.context import OperationContext
from django_rmq.operations.filters import Filter
from django_rmq.operations.messages import checked
from django_rmq.operations.undo import open_trash

LINE_MS = 10_002
"""The ms after a due time in which a fifo topic has a place for a message."""

PURGEABLE = ("waiting", "resting", "dead")


def replay_all(
    context: OperationContext,
    name: str,
    wanted: Filter | None = None,
    *,
    limits: Limits | None = None,
    dry_run: bool = False,
) -> BulkRun:
    """Replay all dead messages that ``wanted`` selects, slots in turns. Outcomes: ``replayed``, ``merged``, ``gone``.

    ``dry_run``: only count them (``matching``).
    """
    return _sweep(
        context, REPLAY, context.permitted(name, PERMISSION_OF["replay"]), "dead", wanted, limits, dry_run
    )


def delete_all(
    context: OperationContext,
    name: str,
    state: str,
    wanted: Filter | None = None,
    *,
    limits: Limits | None = None,
    dry_run: bool = False,
    keep: bool = True,
) -> BulkRun:
    """Delete all messages of a state that ``wanted`` selects. Outcomes: ``deleted``, ``running``, ``gone``.

    ``keep``: they can be brought back for an hour (``undo``), the first 100,000 and up to 64 MB of them.
    """
    topic, queue = context.permitted(name, PERMISSION_OF["delete"]), queue_of(state)
    act = actions.delete_action("dead" if queue == "dead" else "live")
    return _sweep(context, act, topic, queue, wanted, limits, dry_run, keep=keep)


def bury_all(
    context: OperationContext,
    name: str,
    state: str,
    wanted: Filter | None = None,
    *,
    why: str = "",
    limits: Limits | None = None,
    dry_run: bool = False,
) -> BulkRun:
    """Bury all messages of a state that ``wanted`` selects. Outcomes: ``buried``, ``running``, ``gone``."""
    topic, queue = context.permitted(name, PERMISSION_OF["bury"]), queue_of(state)
    if queue == "dead":
        raise OperationRefused(_("dead messages are already in Dead"))
    return _sweep(context, actions.bury_action(context.actor, why), topic, queue, wanted, limits, dry_run)


def reschedule_all(
    context: OperationContext,
    name: str,
    state: str,
    wanted: Filter | None = None,
    *,
    due: datetime | None = None,
    priority: int | None = None,
    limits: Limits | None = None,
    dry_run: bool = False,
) -> BulkRun:
    """Give all messages of a state that ``wanted`` selects another due time or priority, as ``reschedule`` does.

    ``state``: waiting, or on topics ordered by time also resting. Messages that have that time or priority already are
    left out; a ``dry_run`` without one counts all. Outcomes: ``rescheduled``, ``refused`` (a retry that waits by
    priority keeps its place), ``running``, ``gone``.
    """
    topic, queue = context.permitted(name, PERMISSION_OF["reschedule"]), queue_of(state)
    if queue not in ("store", "retry") or (queue == "retry" and topic.is_priority):
        which = (
            _("%(state)s messages of topic %(topic)s cannot be rescheduled: only those that wait")
            if topic.is_priority
            else _(
                "%(state)s messages of topic %(topic)s cannot be rescheduled: only those that wait or rest"
            )
        )
        raise OperationRefused(which % {"state": STATE_OF[queue], "topic": name})
    if dry_run and due is None and priority is None:
        return _sweep(
            context, actions.reschedule_action(0, is_time=True), topic, queue, wanted, limits, dry_run
        )
    score = new_score(topic, due, priority)
    # A place in the line of a fifo topic is up to some seconds later than the time that was given.
    but = (float(score), float(score + (LINE_MS if topic.is_fifo else 1)))
    act = actions.reschedule_action(score, is_time=not topic.is_priority)
    return _sweep(context, act, topic, queue, wanted, limits, dry_run, but)


def _sweep(
    context: OperationContext,
    act: MessageAction,
    topic: Topic,
    queue: str,
    wanted: Filter | None,
    limits: Limits | None,
    dry_run: bool,
    but: tuple[float, float] | None = None,
    *,
    keep: bool = False,
) -> BulkRun:
    wanted = checked(context, topic, queue, wanted)
    limits = limits or Limits()
    limits.check()
    call = None if dry_run else act.call
    described = describe_selection(queue, wanted, act.detail)
    trash = open_trash(context, "delete", topic, described) if keep and not dry_run else None
    run = run_all if trash is None else trash.run
    steps = bulk.sweep(context.broker, topic, queue, wanted, call, limits=limits, but=but, run=run)
    renamed: Iterator[BulkProgress] = (act.renamed(progress) for progress in steps)
    if dry_run:
        return BulkRun(renamed)
    renamed = renamed if trash is None else trash.keeping(renamed)
    return context.recorded(f"{act.name} all", topic, described, renamed)


def describe_selection(queue: str, wanted: Filter, detail: str = "") -> str:
    """Return the text of the audit trail about the messages that were selected, and about the action on them."""
    selected = ", ".join(filter(None, (STATE_OF[queue], wanted.description)))
    return f"{selected}; {detail}" if detail else selected


def purge(
    context: OperationContext,
    name: str,
    state: str,
    *,
    older_than: float | None = None,
    slot: int | None = None,
    limits: Limits | None = None,
    dry_run: bool = False,
    keep: bool = True,
) -> BulkRun:
    """Empty a state of a topic (waiting, resting or dead), without examining the messages. Outcome: ``purged``.

    ``keep``: as in ``delete_all``; without it the memory is free at once.

    ``older_than``: only messages that have been due, or dead, for this many seconds; waiting retries have no time and
    stay. Messages in flight are never purged. Raises ``OperationRefused`` if messages have no time.
    """
    topic, queue = context.permitted(name, PERMISSION_OF["purge"]), queue_of(state)
    if STATE_OF[queue] not in PURGEABLE:
        raise OperationRefused(
            _("cannot purge %(state)r: the state must be one of %(states)s")
            % {"state": state, "states": ", ".join(PURGEABLE)}
        )
    wanted = Filter(older_than=older_than, slot=slot)
    wanted.check(topic, queue)
    limits = limits or Limits()
    limits.check()
    described = describe_selection(queue, wanted)
    trash = open_trash(context, "purge", topic, described) if keep and not dry_run else None
    run = run_all if trash is None else trash.run
    steps = bulk.purge(context.broker, topic, queue, wanted, limits=limits, dry_run=dry_run, run=run)
    if dry_run:
        return BulkRun(steps)
    return context.recorded("purge", topic, described, steps if trash is None else trash.keeping(steps))


def pause(context: OperationContext, name: str) -> BulkRun:
    """Stop the delivery of a topic's messages until ``resume``. Deliveries in flight are completed. Counts slots.

    Outcomes: ``paused``, ``unchanged``. Every worker gets the pause from Redis at its next prepare.
    """
    return _pause(context, name, True)


def resume(context: OperationContext, name: str) -> BulkRun:
    """Resume a paused topic; its workers are woken. Outcomes, of slots: ``resumed``, ``unchanged``."""
    return _pause(context, name, False)


def _pause(context: OperationContext, name: str, paused: bool) -> BulkRun:
    topic = context.permitted(name, PERMISSION_OF["pause"])
    steps = bulk.call_every_slot(context.broker, topic, lambda slot: operate.pause(topic, slot, paused))
    return context.recorded("pause" if paused else "resume", topic, "slots", steps)


def retire(
    context: OperationContext, name: str, *, to: str | None = None, delete: bool = False, dead: str = ""
) -> BulkRun:
    """Move the messages of a topic that is not declared to the topic ``to``, or delete them; then forget the topic.

    ``dead``: what to do with dead messages that are not deleted with the others: ``move`` (they are sent to
    ``to`` like new ones) or ``delete``. Outcomes: those of sends, ``purged``, ``kept`` (they have no slot in
    ``to``, or it is full; the topic stays) and ``retired``. Raises ``OperationRefused`` if messages are in
    flight or dead, or if there are any messages without ``to`` and ``delete``.
    """
    context.actor.require(Permission.PURGE, *((Permission.SEND, Permission.EDIT) if to else ()))
    undeclared = undeclared_topics.find_undeclared(context, name)
    target = None if to is None else context.permitted(to)
    steps = undeclared_topics.retire(
        context.broker, connections.get_producer, undeclared, target, delete=delete, dead=dead
    )
    what = [f"to {to}"] if to else ["messages deleted"] if delete else []
    what += {"move": ["dead messages moved"], "delete": ["dead messages deleted"]}.get(dead, [])
    return context.recorded("retire", undeclared.topic, ", ".join(what), steps)
