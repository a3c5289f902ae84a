"""What a person has deleted and can bring back: who, when, what, and how much of it Redis keeps.

All of them are in one hash. The record is JSON in a field of its own; what is kept is counted in others, each by increments,
because two workers may do a part of one action at the same time. Another program may have written a field, so every value is
checked when it is read.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Literal, get_args

DeletionKind = Literal["delete", "purge"]

UNDO_MS = 3_600_000
"""Milliseconds for which what was deleted can be brought back. The scripts say the same."""


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
    rows: defaultdict[str, dict[str, bytes]] = defaultdict(dict)
    for raw, value in fields:
        deletion, _, name = raw.decode("utf-8", "replace").partition(":")
        rows[deletion][name] = value
    found = [one for name, row in rows.items() if (one := _decode(name, row)) is not None]
    return sorted(found, key=lambda one: (one.began_ms, one.id))


def _decode(name: str, row: Mapping[str, bytes]) -> Deletion | None:
    try:
        found = Deletion(
            **json.loads(row[""]),
            kept=int(row.get("kept", 0)),
            kept_bytes=int(row.get("bytes", 0)),
            undone_by=row.get("undone", b"").decode()[:200],
        )
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    texts: tuple[object, ...] = (found.topic, found.described, found.by, found.via)
    numbers: tuple[object, ...] = (found.slots, found.began_ms, found.kept, found.kept_bytes)
    is_sound = (
        found.id == name
        and found.kind in get_args(DeletionKind)
        and all(isinstance(text, str) for text in texts)
        and all(isinstance(number, int) and 0 <= number < 1e15 for number in numbers)
    )
    return found if is_sound else None


__all__ = ["FIELDS", "UNDO_MS", "Deletion", "DeletionKind", "decode_deletions"]
