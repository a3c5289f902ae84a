"""The outbox for people: rows that wait, rows that were refused, and a retry or deletion of either.

``django_rmq.outbox`` has the rows and the relay. This module asks all databases at once, so that one that hangs delays
none of the others, and shows an actor what it may see.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import merge
from itertools import islice
from typing import Any, Generic, NamedTuple, TypeVar

from django.db import Error
from django.utils.translation import gettext as _

from django_rmq.core.duties import DutyThread
from django_rmq.core.model.envelope import MARK, Envelope, decode_envelope
from django_rmq.database_access import ParallelReads, needs_this_thread, threads_of_duties
from django_rmq.exceptions import InvalidRequest, ServerUnavailable
from django_rmq.operations.audit_trail import chosen as chosen_note
from django_rmq.operations.audit_trail import record_outcomes
from django_rmq.operations.authorization import OperationContext, Permission, sees_stored
from django_rmq.outbox import relay, row_lists
from django_rmq.outbox.merged_rows import envelope_in
from django_rmq.outbox.relay import RelayStep
from django_rmq.outbox.row_lists import ListedRow, Waiting
from django_rmq.outbox.rows import aliases, delete

ANSWER_SECONDS = 5.0
"""Seconds for which a question about the outbox waits for the databases."""

STEP_SECONDS = 60.0
"""Seconds in which the relay of a database has to make a step; then it is left alone. A step takes a few seconds."""

_inquiries: dict[tuple[int, str], ParallelReads[Any]] = {}
"""The last inquiry to each database, by process and alias: a fork has none of the threads of its parent."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OutboxRow:
    """A send or a removal that waits in the outbox. Times in ms since the epoch, by the clock of its process."""

    id: str
    """The database and the primary key: ``default:12``."""
    topic: str
    act: str
    """send, ensure, remove or cancel."""
    score: int
    """As given by the sender: ms to wait, a priority, or the due time."""
    sent_ms: int
    due_ms: int | None
    """When the relay sends it, or None if it was refused, and the relay leaves it out."""
    attempts: int
    error: str
    """Why the last attempt failed; empty if none has."""
    failed_ms: int | None
    size: int
    """The size of the body (of a removal: of the member) in bytes. The size of a body that was not read includes what is
    stored beside it."""
    key: str | None
    """The key of a keyed message; None if it has none, it is hidden from the actor, or the body was not read."""
    raw: bytes | None
    """The body, or the member of a removal; None if it is hidden from the actor, or was not read because of its size."""

    @property
    def is_refused(self) -> bool:
        """Whether the relay leaves it out."""
        return self.due_ms is None


class Known(NamedTuple, Generic[T]):
    """The answers of the databases, of which some may not answer."""

    answers: list[T]
    problems: list[str]
    """A sentence for each database that does not answer."""


def outbox(context: OperationContext, names: Collection[str] | None = None) -> list[Waiting]:
    """Return how much is in the outbox, by topic; topics that the settings do not have are included.

    Raises ``ServerUnavailable`` if a database does not answer.
    """
    waits, problems = outbox_as_known(context, names)
    if problems:
        raise ServerUnavailable("; ".join(problems))
    return waits


def outbox_as_known(
    context: OperationContext, names: Collection[str] | None = None, *, seconds: float | None = None
) -> Known[Waiting]:
    """Return the same as ``outbox``, from the databases that answer within ``seconds``."""
    context.actor.require(Permission.VIEW)
    names = context.known(names)
    parts, problems = _ask_each(row_lists.waiting, ANSWER_SECONDS if seconds is None else seconds)
    waits = row_lists.together(one for part in parts for one in part)
    return Known([one for one in waits if names is None or one.topic in names], problems)


def outbox_rows(
    context: OperationContext,
    names: Collection[str] | None = None,
    *,
    refused: bool | None = None,
    limit: int = 100,
) -> Known[OutboxRow]:
    """Return rows of the outbox, oldest first. ``refused``: only those that the relay leaves out, or only the others."""
    context.actor.require(Permission.VIEW)
    names = context.known(names)
    if names is not None:
        # Databases refuse a query with NUL in a text, or with bytes of a command line that are no text. No row can have
        # such a topic.
        names = [name for name in names if name.isprintable()]
    ask = partial(row_lists.rows, topics=names, refused=refused, limit=limit)
    parts, problems = _ask_each(ask, ANSWER_SECONDS)
    rows = islice(merge(*parts, key=lambda listed: listed.row.sent_ms), limit)
    return Known([_shown(context, one) for one in rows], problems)


def _ask_each(ask: Callable[[str], list[T]], seconds: float) -> Known[list[T]]:
    """Ask all databases at once; return the lists of those that answer within ``seconds``."""
    end, inquiries, problems = time.monotonic() + seconds, list[ParallelReads[T]](), list[str]()
    for alias in aliases():
        key = os.getpid(), alias
        if (earlier := _inquiries.get(key)) is not None and earlier.hangs:
            # One thread waits for a database that hangs, and not one thread for each question.
            problems.append(_silent(alias, seconds))
            continue
        inquiries.append(_begin(alias, partial(ask, alias)))
        _inquiries[key] = inquiries[-1]
    answers: list[list[T]] = []
    for one in inquiries:
        try:
            if one.wait(end):
                answers.append(one.answers)
            else:
                problems.append(_silent(one.name, seconds))
        except Error as error:
            problems.append(str(_unavailable(error, one.name)))
    return Known(answers, problems)


def _begin(alias: str, ask: Callable[[], Iterable[T]]) -> ParallelReads[T]:
    inquiry = ParallelReads(alias, ask)
    if needs_this_thread(alias):
        inquiry.run()
    else:
        inquiry.start()
    return inquiry


def _silent(alias: str, seconds: float) -> str:
    return f"the database {alias} does not answer within {seconds:g} s"


ACTS = {"retry": Permission.SEND, "delete": Permission.DELETE}
"""What people can do with rows, and the permission that it requires."""


def retry_outbox(context: OperationContext, ids: Sequence[str]) -> dict[str, int]:
    """Have the relay send these rows at once; return how many were ``retried``, and how many were ``gone``."""
    return _do(context, ACTS["retry"], "retry in the outbox", ids, "retried")


def delete_outbox(context: OperationContext, ids: Sequence[str]) -> dict[str, int]:
    """Delete these rows, so that their messages are never sent; return how many were ``deleted`` and ``gone``."""
    return _do(context, ACTS["delete"], "delete from the outbox", ids, "deleted")


def relay_outbox(context: OperationContext) -> Known[RelayStep]:
    """Send the due rows of all databases at once; return the steps.

    Raises ``ServerTrouble`` if Redis does not answer.
    """
    context.actor.require(Permission.SEND)
    context.require_all_topics()
    inquiries = [_begin(alias, partial(relay.relay_all, alias)) for alias in aliases()]
    steps, problems = list[RelayStep](), list[str]()
    for one in inquiries:
        try:
            if not one.wait_for_progress(STEP_SECONDS):
                problems.append(_silent(one.name, STEP_SECONDS))
        except Error as error:
            problems.append(str(_unavailable(error, one.name)))
        steps += one.answers
    return Known(steps, problems)


def relay_duties(context: OperationContext) -> list[DutyThread]:
    """Return a thread for each database, which sends the due rows again and again."""
    context.actor.require(Permission.SEND)
    return threads_of_duties(relay.duties())


def _do(
    context: OperationContext, needed: Permission, act: str, ids: Sequence[str], word: str
) -> dict[str, int]:
    context.actor.require(needed)
    known = context.known(None, needed)
    chosen: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    done = gone = 0
    database = ""
    try:
        for database, number in map(_parsed, ids):
            topic = row_lists.topic_of(database, number)
            if topic is None or (known is not None and topic not in known):
                gone += 1
            else:
                chosen[database, topic].append(number)
        # Another process may have sent or deleted rows since their topics were read, so the rows that were changed
        # are counted.
        act_on = row_lists.retry if word == "retried" else delete
        for (database, topic), numbers in chosen.items():
            count = act_on(database, numbers)
            done, gone = done + count, gone + len(numbers) - count
            rows = [f"{database}:{number}" for number in numbers]
            record_outcomes(context, act, topic, {word: count}, chosen_note(rows))
    except Error as error:
        raise _unavailable(error, database) from error
    return {word: done, "gone": gone}


def _parsed(name: str) -> tuple[str, int]:
    database, colon, number = name.rpartition(":")
    # A primary key of 64 bits has at most 19 digits.
    if not (colon and number.isascii() and number.isdigit() and len(number) < 20):
        raise InvalidRequest(
            _("%(id)r is not a row of the outbox; the id of one is like default:12") % {"id": name[:80]}
        )
    return database, int(number)


def _shown(context: OperationContext, listed: ListedRow) -> OutboxRow:
    row, is_read = listed.row, not listed.unread
    envelope = envelope_in(row)
    content = Envelope(row.member) if envelope is None else decode_envelope(envelope)
    # A member that RMQ has drawn, for a send without a key, is not a key.
    has_key = envelope is not None and not row.member.startswith(MARK)
    key = row.member.decode("utf-8", "replace") if has_key else None
    raw: bytes | None = content.body
    if not is_read or not sees_stored(context.actor, row.topic):
        key = raw = None
    return OutboxRow(
        id=f"{listed.database}:{row.id}",
        topic=row.topic,
        act=row.act,
        score=row.score,
        sent_ms=row.sent_ms,
        due_ms=row.due_ms,
        attempts=row.attempts,
        error=listed.error,
        failed_ms=listed.failed_ms,
        size=len(content.body) if is_read else listed.unread,
        key=key,
        raw=raw,
    )


def _unavailable(error: Error, alias: str) -> ServerUnavailable:
    return ServerUnavailable(
        f"the outbox of the database {alias} cannot be read: {' '.join(str(error).split())}"
    )
