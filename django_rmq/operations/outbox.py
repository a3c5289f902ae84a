"""The outbox as people see it: what waits in it, what was refused, and a retry or deletion of either."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from django.db import Error
from django.db import connections as databases

from django_rmq.core.words.envelopes import Envelope, decode_envelope
from django_rmq.core.words.topics import Topic
from django_rmq.exceptions import InvalidRequest, ServerUnavailable, UnknownTopic
from django_rmq.operations import redaction
from django_rmq.operations.actors import Permission
from django_rmq.operations.desk import Desk
from django_rmq.operations.named import chosen as chosen_note
from django_rmq.project.outbox import looking, relaying
from django_rmq.project.outbox.databases import aliases
from django_rmq.project.outbox.looking import Found, Waiting
from django_rmq.project.outbox.relaying import Step


@dataclass(frozen=True, slots=True)
class OutboxRow:
    """A send or a removal that waits in the outbox. Times in ms since the epoch, by the clock of its process."""

    id: str
    """The database and the primary key: ``default:12``."""
    topic: str
    act: str
    """send, ensure or remove."""
    score: int
    """As given by the sender: ms to wait, a priority, or the due time."""
    sent_ms: int
    due_ms: int | None
    """When the relay sends it. None: it was refused, and the relay leaves it out."""
    attempts: int
    error: str
    """Why the last attempt failed. Empty: there was none."""
    failed_ms: int | None
    size: int
    """The size of the body (of a removal: of the member) in bytes."""
    key: str | None
    """The key of a keyed message. None: it has none, or it is hidden from the actor."""
    raw: bytes | None
    """The body, or the member of a removal. None: hidden from the actor."""

    @property
    def is_refused(self) -> bool:
        """Whether the relay leaves it out."""
        return self.due_ms is None


def outbox(desk: Desk, names: Collection[str] | None = None) -> list[Waiting]:
    """Return how much is in the outbox, by topic; topics that the settings do not have are included.

    Raises ``ServerUnavailable`` if a database does not answer.
    """
    desk.actor.require(Permission.VIEW)
    try:
        return looking.waiting(names)
    except Error as error:
        raise _unavailable(error) from error


def needs_this_thread() -> bool:
    """Return whether the outbox is read by the calling thread.

    Another thread has other connections: it does not see a transaction that is open here, as in a test. SQLite
    never hangs like a server does.
    """
    chosen = [databases[alias] for alias in aliases()]
    return any(one.in_atomic_block or one.vendor == "sqlite" for one in chosen)


def outbox_rows(
    desk: Desk, names: Collection[str] | None = None, *, refused: bool | None = None, limit: int = 100
) -> list[OutboxRow]:
    """Return rows of the outbox, oldest first. ``refused``: only those that the relay leaves out, or only the others."""
    desk.actor.require(Permission.VIEW)
    if names is not None:
        # PostgreSQL refuses the query. No row can have such a topic.
        names = [name for name in names if "\0" not in name]
    try:
        found = looking.rows(names, refused=refused, limit=limit)
    except Error as error:
        raise _unavailable(error) from error
    return [_shown(desk, one) for one in found]


def retry_outbox(desk: Desk, ids: Sequence[str]) -> dict[str, int]:
    """Have the relay send these rows at once; return how many were ``retried``, and how many were ``gone``."""
    desk.actor.require(Permission.SEND)
    return _do(desk, "retry in the outbox", ids, "retried")


def delete_outbox(desk: Desk, ids: Sequence[str]) -> dict[str, int]:
    """Delete these rows, so that their messages are never sent; return how many were ``deleted`` and ``gone``."""
    desk.actor.require(Permission.DELETE)
    return _do(desk, "delete from the outbox", ids, "deleted")


def relay_outbox(desk: Desk) -> Iterator[Step]:
    """Send what is due in the outbox of each database, batch by batch. Raises ``ServerTrouble``."""
    desk.actor.require(Permission.SEND)
    try:
        yield from relaying.relay_all()
    except Error as error:
        raise _unavailable(error) from error


def _do(desk: Desk, act: str, ids: Sequence[str], word: str) -> dict[str, int]:
    chosen: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    gone = 0
    try:
        for database, number in map(_parsed, ids):
            found = looking.one(database, number)
            if found is None:
                gone += 1
            else:
                chosen[found.row.topic, database].append(number)
        act_on = looking.retry if word == "retried" else looking.remove
        done = 0
        for (topic, database), numbers in chosen.items():
            count = act_on(database, numbers)
            done, gone = done + count, gone + len(numbers) - count
            rows = [f"{database}:{number}" for number in numbers]
            desk.record(act, topic, {word: count}, chosen_note(rows))
    except Error as error:
        raise _unavailable(error) from error
    return {word: done, "gone": gone}


def _parsed(name: str) -> tuple[str, int]:
    database, colon, number = name.rpartition(":")
    if not (colon and number.isascii() and number.isdigit() and len(number) < 20):
        raise InvalidRequest(f"{name[:80]!r} is not a row of the outbox; the id of one is like default:12")
    return database, int(number)


def _shown(desk: Desk, found: Found) -> OutboxRow:
    row = found.row
    content = Envelope(row.member) if row.envelope is None else decode_envelope(row.envelope)
    key = None if row.envelope is None else row.member.decode("utf-8", "replace")
    raw: bytes | None = content.body
    if not _may_read(desk, row.topic):
        key = raw = None
    return OutboxRow(
        id=f"{found.database}:{row.id}",
        topic=row.topic,
        act=row.act,
        score=row.score,
        sent_ms=row.sent_ms,
        due_ms=row.due_ms,
        attempts=row.attempts,
        error=found.error,
        failed_ms=found.failed_ms,
        size=len(content.body),
        key=key,
        raw=raw,
    )


def _may_read(desk: Desk, name: str) -> bool:
    """Return whether the actor may see bodies of a topic as they are; a formatter that is missing redacts nothing."""
    topic: Topic | None
    try:
        topic = desk.config.topic(name)
    except UnknownTopic:
        topic = None
    is_withheld = topic is not None and redaction.is_withheld(desk.actor, topic)
    return desk.actor.may(Permission.VIEW_BODIES) and not is_withheld


def _unavailable(error: Error) -> ServerUnavailable:
    return ServerUnavailable(f"the database of the outbox cannot be asked: {' '.join(str(error).split())}")


__all__ = [
    "OutboxRow",
    "Step",
    "Waiting",
    "delete_outbox",
    "needs_this_thread",
    "outbox",
    "outbox_rows",
    "relay_outbox",
    "retry_outbox",
]
