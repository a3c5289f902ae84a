"""The records stored about messages that failed or died."""

from __future__ import annotations

import re
from typing import NamedTuple

from django_rmq.core.model.limits import MAX_ERROR_BYTES

_ERROR_CLASS = re.compile(r"[^\S\n]*([A-Za-z_][\w.<>]{0,199})[^\S\n]*:", re.ASCII)


def error_class(error: str) -> str:
    """Return the class from an error text of the form ``package.Error: what happened``. Empty: the text names none.

    A single word without a colon is a person's remark, not a class.
    """
    found = _ERROR_CLASS.match(error)
    return found[1] if found else ""


def cut_error(text: str, limit: int = MAX_ERROR_BYTES) -> bytes:
    """Return at most ``limit`` bytes of ``text``, without splitting a character."""
    raw = text.encode("utf-8", "backslashreplace")
    return raw if len(raw) <= limit else raw[:limit].decode("utf-8", "ignore").encode()


class Failure(NamedTuple):
    """One failed delivery, as rollback takes it."""

    member: bytes
    kind: str = "failed"
    """failed, undecodable, timed_out (its process died), overran (it exceeded HARD_TIMEOUT), cancelled, or rejected
    (Dead at once)."""
    delay_ms: int | None = None
    """The rest before the next delivery, in ms. None: the topic's exponential back-off."""
    error: str = ""
    """The error's text, of which at most ``MAX_ERROR_BYTES`` are stored."""

    def answered(self, word: str) -> Failure:
        """Return how the delivery has ended: by the answer of ``rollback`` somebody may have cancelled it meanwhile."""
        return self._replace(kind="cancelled") if word == "cancelled" else self


class FailureRecord(NamedTuple):
    """The diagnosis stored for a live message that failed."""

    kind: str
    times: int
    first_ms: int
    last_ms: int
    score: str
    error: bytes

    @classmethod
    def parse(cls, raw: bytes) -> FailureRecord:
        head, _, error = raw.partition(b"\n")
        kind, times, first, last, score = head.decode().split(" ")
        return cls(kind, int(times), int(first), int(last), score, error)


class Death(NamedTuple):
    """The record stored for a dead message."""

    reason: str
    """failed, timed_out, overran, undecodable, rejected, buried or lapsed."""
    times: int
    first_ms: int
    last_ms: int
    score: str
    """The score with which it was first prepared, if known."""
    error: bytes
    envelope: bytes | None

    @classmethod
    def parse(cls, raw: bytes) -> Death:
        head, _, rest = raw.partition(b"\n")
        reason, times, first, last, score, length, has_body = head.decode().split(" ")
        error, body = rest[: int(length)], rest[int(length) :]
        return cls(reason, int(times), int(first), int(last), score, error, body if has_body == "1" else None)

    def encode(self) -> bytes:
        """Return the record that ``parse`` reads."""
        head = " ".join(map(str, self[:5]))
        return (
            f"{head} {len(self.error)} {int(self.envelope is not None)}\n".encode()
            + self.error
            + (self.envelope or b"")
        )
