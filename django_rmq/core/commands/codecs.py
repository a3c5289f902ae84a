"""Numbers, cursors and words in the form in which scripts read and write them, shared by all commands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django_rmq.exceptions import SlotMoved


def number(value: float) -> str:
    """Write a score without losing a digit."""
    return str(value) if isinstance(value, int) else f"{value:.17g}"


def cursor(after: tuple[str, bytes] | None) -> tuple[str, bytes]:
    """Write a cursor: the entry after which to continue, or None to start from the beginning."""
    return ("", b"") if after is None else after


def same(reply: Any) -> Any:
    """Return the reply unchanged."""
    return reply


def moment(raw: bytes) -> int | None:
    """Read an optional time in ms."""
    return int(raw) if raw else None


def text(raw: bytes) -> str:
    """Read a worker's id; a foreign value stays recognisable."""
    return raw.decode(errors="backslashreplace")


def word(reply: bytes) -> str:
    """Read one word."""
    return reply.decode()


def words(count: int) -> Callable[[Any], list[str]]:
    """Parse one word per member; a single {'ok'} stands for all of them."""

    def parse(reply: list[bytes]) -> list[str]:
        # Scripts answer a single ok if every receipt was valid.
        if len(reply) == 1 and count > 1:
            return [reply[0].decode()] * count
        return [word.decode() for word in reply]

    return parse


def moved(reply: list[Any]) -> None:
    """Raise ``SlotMoved`` if the slot's topic now has another slot count."""
    if reply and reply[0] == b"moved":
        raise SlotMoved(f"the topic now has {text(reply[1])} slots")
