"""Actions on all selected messages, and on whole topics: each is a run of small steps (``bulk``), which is recorded.

The caller waits for them, or workers do them in the background, part by part: see ``start_action`` and ``run_parts``. In the
background an action does the same, and needs the same permission.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import datetime
from typing import get_args
from uuid import uuid4

from django.utils.translation import gettext as _

from django_rmq import connections
from django_rmq.core.commands import operate, stored_actions, stored_results
from django_rmq.core.commands.broker_interface import Broker, run_all
from django_rmq.core.model.status import STATE_OF, queue_of
from django_rmq.core.model.stored_actions import (
    KEPT_MS,
    MOST_ACTIONS,
    ActionKind,
    ActionProgress,
    BackgroundAction,
    Deletion,
)
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import InvalidRequest, OperationRefused, RmqError, ServerTrouble, UnknownTopic
from django_rmq.operations import actions, bulk, undeclared_topics
from django_rmq.operations.actions import REPLAY, MessageAction, new_score
from django_rmq.operations.audit_trail import record, record_and_announce, recorded
from django_rmq.operations.authorization import PERMISSION_OF, Actor, OperationContext, Permission, Trace
from django_rmq.operations.bulk import BulkProgress, BulkRun, Limits, RunCalls
from django_rmq.operations.filters import Filter, is_for_purge
from django_rmq.operations.messages import checked
from django_rmq.operations.undo import Trash, open_trash

LINE_MS = 10_002
"""The ms after a due time in which a fifo topic has a place for a message.

The script tries 10,001 of them, and takes the next one if all are full.
"""

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

    ``keep``: they can be brought back for an hour (``undo``), within the bounds that ``undo`` has.
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
    left out; a ``dry_run`` without one counts all. Outcomes: ``rescheduled``, ``refused`` (a retry on a priority topic
    keeps its score, as the script ``reschedule`` decides for each message), ``running``, ``gone``.
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
    return recorded(context, f"{act.name} all", topic, described, renamed)


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
    return recorded(context, "purge", topic, described, steps if trash is None else trash.keeping(steps))


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
    return recorded(context, "pause" if paused else "resume", topic, "slots", steps)


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
    return recorded(context, "retire", undeclared.topic, ", ".join(what), steps)


COUNT_SECONDS = 1.0
"""Seconds for which the messages of an action are counted before it begins."""

PART_SECONDS, SEARCH_SECONDS = 2.0, 10.0
"""Seconds of one part of an action, and of one that has to look at each message: it begins again with each part."""

LEASE_MS = 30_000
"""Milliseconds after which a worker that does a part counts as dead, and another worker does it."""

SLOWEST_RATE, FASTEST_RATE = 0.1, 1_000_000
"""The bounds of a rate, in messages per second. At the lowest the pause between two messages is well below the lease."""

_KINDS: tuple[ActionKind, ...] = get_args(ActionKind)


def start_action(
    context: OperationContext,
    name: str,
    kind: ActionKind,
    state: str = "dead",
    wanted: Filter | None = None,
    *,
    rate: float | None = None,
    keep: bool = True,
) -> ActionProgress:
    """Let workers replay, delete or purge all messages of a state that ``wanted`` selects, in the background.

    Permissions and conditions are those of ``replay_all``, ``delete_all`` and ``purge``, and so is ``keep``; the id of the
    action is that of its undo. ``rate``: messages per second.
    Raises ``OperationRefused`` also if no messages match, or if there are too many actions already.
    """
    _check_kind(kind)
    topic, queue = context.permitted(name, Permission.VIEW, PERMISSION_OF[kind]), queue_of(state)
    wanted = checked(context, topic, queue, wanted)
    _check_action(kind, queue, wanted, rate)
    counted = BulkRun(
        _perform(context.broker, kind, topic, queue, wanted, Limits(seconds=COUNT_SECONDS), True)
    ).result()
    total = counted.outcomes.get("matching", 0) if counted.is_complete else counted.total
    if not total:
        raise OperationRefused(_("no messages match"))
    _make_room(context.broker)
    described, trace = describe_selection(queue, wanted), Trace()
    record(context.actor, _title(kind), name, {"asked": total}, described, trace=trace)
    conditions = {name: value for name, value in asdict(wanted).items() if value != getattr(Filter(), name)}
    action = BackgroundAction(
        uuid4().hex[:16],
        kind,
        name,
        queue,
        conditions,
        described,
        total,
        counted.is_complete,
        rate,
        context.actor.name,
        context.actor.via,
        context.actor.account,
        trace.entry,
        context.broker.now_ms(),
        keep and kind != "replay",
    )
    context.broker.run(stored_actions.write_action(action.id, "", action.encode()))
    return ActionProgress(action)


def _check_kind(kind: str) -> None:
    if kind not in _KINDS:
        raise InvalidRequest(
            _("an action in the background is one of %(kinds)s") % {"kinds": ", ".join(_KINDS)}
        )


def _check_action(kind: ActionKind, queue: str, wanted: Filter, rate: float | None) -> None:
    """Raise ``OperationRefused`` or ``InvalidRequest`` for what is not done in the background."""
    if STATE_OF[queue] not in (("dead",) if kind == "replay" else PURGEABLE):
        raise OperationRefused(
            _("cannot %(kind)s %(state)s messages in the background")
            % {"kind": kind, "state": STATE_OF[queue]}
        )
    if kind == "purge" and not is_for_purge(wanted):
        raise OperationRefused(_("a purge selects by age and slot only"))
    if rate is not None and not SLOWEST_RATE <= rate <= FASTEST_RATE:
        raise InvalidRequest(
            _("the rate must be from %(least)s to 1000000 messages per second") % {"least": SLOWEST_RATE}
        )


def _title(kind: ActionKind) -> str:
    return "purge in the background" if kind == "purge" else f"{kind} all in the background"


def background_actions(context: OperationContext) -> list[ActionProgress]:
    """Return the actions in the background that run or ended in the last hour."""
    context.actor.require(Permission.VIEW)
    names, oldest = context.known(None), context.broker.now_ms() - KEPT_MS
    return [
        one
        for one in context.broker.run(stored_actions.read_actions())
        if (names is None or one.action.topic in names) and (one.ended_ms is None or one.ended_ms > oldest)
    ]


def stop_action(context: OperationContext, action: str) -> ActionProgress:
    """Stop an action in the background; what it has done stays done. Its own permission is needed.

    Its topic may have left the settings. Raises ``OperationRefused`` if the action is unknown or has ended.
    """
    stored = next((one for one in background_actions(context) if one.action.id == action), None)
    if stored is None or stored.ended_ms is not None:
        raise OperationRefused(_("no action %(id)r runs in the background") % {"id": action[:40]})
    permission = PERMISSION_OF[stored.action.kind]
    if stored.action.topic in context.config.topics:
        context.declared(stored.action.topic, permission)
    else:
        context.actor.require(permission)
    stored.stopped_by = context.actor.name
    context.broker.run(stored_actions.write_action(action, "stopped", stored.stopped_by))
    # If no worker does a part now, perhaps there is none, and this ends it.
    run_part(context, action, "", lambda: True)
    actions = context.broker.run(stored_actions.read_actions())
    # A process that starts an action may have forgotten this one meanwhile, to make room.
    return next((one for one in actions if one.action.id == action), stored)


def _make_room(broker: Broker) -> None:
    """Forget actions that ended long ago, and the oldest ones for a new one. Raises ``OperationRefused`` if all run."""
    actions, oldest = broker.run(stored_actions.read_actions()), broker.now_ms() - KEPT_MS
    ended = sorted((one for one in actions if one.ended_ms is not None), key=lambda one: one.ended_ms or 0)
    room = MOST_ACTIONS - (len(actions) - len(ended))
    if room < 1:
        raise OperationRefused(
            _("%(number)s actions are in the background already; wait, or stop one")
            % {"number": MOST_ACTIONS}
        )
    for number, one in enumerate(ended):
        if (one.ended_ms or 0) <= oldest or len(ended) - number >= room:
            broker.run(stored_actions.delete_action(one))


def _perform(
    broker: Broker,
    kind: ActionKind,
    topic: Topic,
    queue: str,
    wanted: Filter,
    limits: Limits,
    dry_run: bool,
    run: RunCalls = run_all,
) -> Iterator[BulkProgress]:
    """Return the steps of an action, without permissions and records."""
    if kind == "purge":
        return bulk.purge(broker, topic, queue, wanted, limits=limits, dry_run=dry_run, run=run)
    act = REPLAY if kind == "replay" else actions.delete_action("dead" if queue == "dead" else "live")
    steps = bulk.sweep(broker, topic, queue, wanted, None if dry_run else act.call, limits=limits, run=run)
    return (act.renamed(progress) for progress in steps)


def run_parts(worker: str, is_over: Callable[[], bool]) -> bool:
    """Do a part of each action that no other worker does; return whether there was one. Raises ``RmqError``."""
    context, is_busy = OperationContext(Actor("worker", "worker"), "coordinator"), False
    for one in context.broker.run(stored_actions.read_actions()):
        if one.ended_ms is None and not is_over():
            is_busy |= run_part(context, one.action.id, worker, is_over)
    return is_busy


def run_part(context: OperationContext, action: str, worker: str, is_over: Callable[[], bool]) -> bool:
    """Do a part of an action if no other worker does one; return whether it did.

    ``is_over``: whether to end early. Each message is counted by the worker whose script has changed it, so nothing is
    done twice if a worker goes on after its lease. Raises ``ServerTrouble``.
    """
    broker, lease, token = context.broker, f"action{action}", uuid4().hex
    # The name of the lease stands for its content, so the answer is never that the content is another one.
    word, _answer = broker.run(stored_results.begin_request(lease, lease, token, LEASE_MS))
    if word != "new":
        return False
    try:
        # What another worker did until it gave the lease back counts.
        stored = next(
            (one for one in broker.run(stored_actions.read_actions()) if one.action.id == action), None
        )
        if stored is None or stored.ended_ms is not None:
            return False
        if stored.stopped_by:
            _end(broker, stored)
            return True
        try:
            return _do_part(context, stored, worker, is_over)
        except ServerTrouble:
            raise
        except UnknownTopic:
            # A process with other settings may know the topic.
            return False
        except (RmqError, TypeError) as error:
            # Another version may have written conditions that this one does not know.
            _end(broker, stored, problem=str(error))
            return True
    finally:
        # An empty answer frees the lease, so that another worker need not wait for its end.
        broker.run(stored_results.store_answer(lease, token, b"", LEASE_MS))


def _do_part(
    context: OperationContext, action_progress: ActionProgress, worker: str, is_over: Callable[[], bool]
) -> bool:
    if is_over():
        return False
    broker, action = context.broker, action_progress.action
    now_ms, began = broker.now_ms(), time.monotonic()
    topic, wanted = context.permitted(action.topic), Filter(**action.conditions)
    # Messages that have died since it began are left alone.
    wanted = wanted.as_of(action.state, max(0.0, (now_ms - action.started_ms) / 1000))
    wanted.check(topic, action.state)
    seconds = SEARCH_SECONDS if wanted.compares else PART_SECONDS
    most = max(1, action_progress.left)
    limits = Limits(messages=most, seconds=seconds, rate=action.rate)
    counted, progress = Counter(action_progress.outcomes), BulkProgress(0, 0, {})
    before: Counter[str] = Counter()
    trash = _trash_of(broker, action, topic)
    run = run_all if trash is None else trash.run
    for progress in _perform(broker, action.kind, topic, action.state, wanted, limits, False, run):
        # It counts from one look at the server's clock, because another look would cost each step a round trip.
        at_ms = now_ms + round((time.monotonic() - began) * 1000)
        uncounted = Counter(progress.outcomes) - before
        written, stopped_by = _write_step(broker, action, uncounted, f"{at_ms} {worker}")
        before += written
        if stopped_by or is_over():
            break
    if trash is not None:
        trash.count_kept(broker)
    rest = Counter(progress.outcomes) - before
    run_all(broker, [stored_actions.count_action(action.id, *one) for one in rest.items()])
    action_progress.outcomes = dict(counted + Counter(progress.outcomes))
    # The next part would begin at the same message, and find as little in the same time.
    is_stuck = wanted.compares and not progress.done and not progress.is_complete
    problem = "; ".join(progress.problems[:5])
    if is_stuck and not is_over():
        problem = "the search took too long: narrow the filter"
    if progress.is_complete or progress.done >= most or (is_stuck and not is_over()):
        _end(broker, action_progress, is_complete=not problem, problem=problem)
    return True


def _write_step(
    broker: Broker, action: BackgroundAction, uncounted: Counter[str], beat: str
) -> tuple[Counter[str], str]:
    """Count what an action has done; return what Redis has counted, and who has stopped the action."""
    pipeline = broker.pipeline()
    counts = {
        outcome: pipeline.add(stored_actions.count_action(action.id, outcome, messages))
        for outcome, messages in uncounted.items()
    }
    pipeline.add(stored_actions.write_action(action.id, "beat", beat))
    asked = pipeline.add(stored_actions.read_stop(action.id))
    pipeline.execute()
    # A full Redis refuses to count. What it refused is counted with the next step, or after the last one.
    refused = {outcome for outcome, count in counts.items() if isinstance(count.result(), RmqError)}
    return Counter(
        {word: messages for word, messages in uncounted.items() if word not in refused}
    ), asked.get()


def _trash_of(broker: Broker, action: BackgroundAction, topic: Topic) -> Trash | None:
    """Return where an action keeps what it deletes; all of its parts keep in the same place. None: it keeps nothing."""
    if not action.keep or action.kind == "replay":
        return None
    wanted = Deletion(
        action.id,
        action.kind,
        action.topic,
        topic.slots,
        action.described,
        action.by,
        action.via,
        action.started_ms,
    )
    return Trash.opened(broker, wanted)


def _end(broker: Broker, progress: ActionProgress, *, is_complete: bool = False, problem: str = "") -> None:
    """Note that an action has ended, write its counts into the audit trail, and announce what it has replayed."""
    action = progress.action
    ended = {"at_ms": broker.now_ms(), "complete": is_complete, "problem": problem}
    broker.run(stored_actions.write_action(action.id, "ended", json.dumps(ended)))
    note = action.described if is_complete else f"{action.described}, incomplete"
    if progress.stopped_by:
        note = f"{action.described}, stopped by {progress.stopped_by}"
    # The user may have been deleted since the action began, and a LogEntry needs only the key.
    actor, trace = Actor(action.by, action.via, account=action.user), Trace(action.entry)
    record_and_announce(actor, _title(action.kind), action.topic, progress.outcomes, note, trace=trace)
