"""The rows of the outbox for people and monitoring: their counts, their lists, and retries.

Neither the sender nor the relay needs this module. ``rows`` deletes rows. ``operations.outbox`` decides who may use it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from django.db import DatabaseError
from django.db.models import Count, Min, Q, QuerySet

from django_rmq.database_access import ask_each
from django_rmq.outbox.rows import (
    LIGHT,
    RowValues,
    StoredRow,
    aliases,
    explained,
    has_table,
    model,
    now_ms,
    parts,
    read_contents,
    with_sizes,
)

if TYPE_CHECKING:
    from django_rmq.models import OutboxMessage

T = TypeVar("T")

LIST_BYTES = 4_194_304
"""The number of bytes that a list of rows reads of their contents, at most."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """The rows of one topic, counted in one database or in all together."""

    topic: str
    messages: int = 0
    """The number of rows, without those that were refused."""
    refused: int = 0
    """The number of rows that the relay leaves out, because their messages cannot be sent."""
    oldest_ms: int | None = None
    """How long ago the oldest of ``messages`` was sent, in ms, or None if there are none."""


@dataclass(frozen=True, slots=True)
class ListedRow:
    """A row as it is in its database."""

    database: str
    row: StoredRow
    error: str
    failed_ms: int | None
    unread: int = 0
    """The bytes of the member and the envelope, if the row has neither here, because the list would be too large."""


def waiting(alias: str) -> list[Waiting]:
    """Return the numbers of rows of a database, by topic. Raises ``DatabaseError``."""
    now = now_ms()
    return [
        Waiting(name, messages, refused, None if oldest is None else max(0, now - oldest))
        for name, messages, refused, oldest in _rows_if_migrated(alias, _counted(alias))
    ]


def together(parts: Iterable[Waiting]) -> list[Waiting]:
    """Return the numbers of rows of several databases together, by topic."""
    waits_of: dict[str, Waiting] = {}
    for one in parts:
        had = waits_of.get(one.topic, Waiting(one.topic))
        known = [age for age in (had.oldest_ms, one.oldest_ms) if age is not None]
        waits_of[one.topic] = Waiting(
            one.topic, had.messages + one.messages, had.refused + one.refused, max(known) if known else None
        )
    return [waits_of[name] for name in sorted(waits_of)]


def _counted(alias: str) -> Iterable[tuple[str, int, int, int | None]]:
    is_waiting = Q(due_ms__isnull=False)
    rows = model().objects.using(alias).values("topic").order_by("topic")
    counted = rows.annotate(
        waiting=Count("id", filter=is_waiting),
        refused=Count("id", filter=~is_waiting),
        oldest=Min("sent_ms", filter=is_waiting),
    )
    counts: Iterable[tuple[str, int, int, int | None]] = counted.values_list(
        "topic", "waiting", "refused", "oldest"
    )
    return counts


def rows(
    alias: str, topics: Collection[str] | None = None, *, refused: bool | None = None, limit: int = 100
) -> list[ListedRow]:
    """Return up to ``limit`` rows of a database, oldest first, and their contents as far as these have ``LIST_BYTES``.

    ``refused``: only those that the relay leaves out, or only the others.
    """
    chosen = with_sizes(_chosen(alias, topics, refused)).values(*LIGHT, "error", "failed_ms", "size")
    answers, fitting, left = _rows_if_migrated(alias, chosen[:limit]), set[int](), LIST_BYTES
    for values in answers:
        if values["size"] <= left:
            left -= values["size"]
            fitting.add(values["id"])
    contents = read_contents(alias, fitting)
    # A row whose contents are missing was deleted after the list was read: its message was sent, or a person deleted it.
    return [
        _found(alias, values, contents.get(values["id"]))
        for values in answers
        if values["id"] in contents or values["id"] not in fitting
    ]


def topic_of(database: str, number: int) -> str | None:
    """Return the topic of a row, or None if there is no such row."""
    # The name may come from a URL. ``using`` raises for a database that the settings do not have.
    if database not in aliases():
        return None
    name: str | None = (
        model().objects.using(database).filter(pk=number).values_list("topic", flat=True).first()
    )
    return name


def _chosen(alias: str, topics: Collection[str] | None, refused: bool | None) -> QuerySet[OutboxMessage]:
    chosen = model().objects.using(alias).order_by("id")
    if topics is not None:
        chosen = chosen.filter(topic__in=topics)
    return chosen if refused is None else chosen.filter(due_ms__isnull=refused)


def _found(alias: str, values: RowValues, contents: RowValues | None) -> ListedRow:
    row = StoredRow(
        **{name: values[name] for name in LIGHT}, **(contents or {"member": b"", "envelope": None})
    )
    return ListedRow(alias, row, values["error"], values["failed_ms"], 0 if contents else values["size"])


def retry(database: str, numbers: Iterable[int]) -> int:
    """Have the relay try these rows at once, as if for the first time; return how many there were."""
    changes = {"due_ms": now_ms(), "attempts": 0}
    return sum(
        model().objects.using(database).filter(pk__in=some).update(**changes)
        for some in parts(sorted(set(numbers)))
    )


def missing() -> list[tuple[str, str]]:
    """Return the databases without a usable table, and what is wrong. A database that does not answer is not one."""
    given, _ = ask_each(aliases(), _problem)
    return [(alias, problem) for alias, problem in given.items() if problem]


def _problem(alias: str) -> str:
    """Return why the table of a database cannot be used, or an empty text if it can. Raises ``DatabaseError``."""
    try:
        list(model().objects.using(alias).filter(pk=0))
    except DatabaseError as error:
        reason = explained(alias, error)
        if reason is error:
            raise
        return str(reason)
    return ""


def _rows_if_migrated(alias: str, query: Iterable[T]) -> list[T]:
    """Return the answer of a database; nothing if it has no outbox."""
    try:
        return list(query)
    except DatabaseError:
        # Before its migration a database has no outbox, which is no error. With the table, the error has another
        # cause.
        if has_table(alias):
            raise
        return []
