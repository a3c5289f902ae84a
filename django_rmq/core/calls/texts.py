"""Numbers, cursors and words as scripts read and write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django_rmq.exceptions import SlotMoved


def number(value: float) -> str:
    """Write a score so that no digit is lost."""
    return str(value) if isinstance(value, int) else f"{value:.17g}"


def cursor(after: tuple[str, bytes] | None) -> tuple[str, bytes]:
    """Write the entry behind which to go on. None: from the beginning."""
    return ("", b"") if after is None else after


def same(reply: Any) -> Any:
    """Read a reply that means what it is."""
    return reply


def moment(raw: bytes) -> int | None:
    """Read a time in ms that there may be."""
    return int(raw) if raw else None


def text(raw: bytes) -> str:
    """Read a worker's id; what is none of ours stays recognisable."""
    return raw.decode(errors="backslashreplace")


def word(reply: bytes) -> str:
    """Read one word."""
    return reply.decode()


def words(count: int) -> Callable[[Any], list[str]]:
    """Parse a word for each member; a single {'ok'} stands for all of them."""

    def parse(reply: list[bytes]) -> list[str]:
        if len(reply) == 1 and count > 1:
            return [reply[0].decode()] * count
        return [word.decode() for word in reply]

    return parse


def moved(reply: list[Any]) -> None:
    """Raise ``SlotMoved`` if the slot's topic has another slot count by now."""
    if reply and reply[0] == b"moved":
        raise SlotMoved(f"the topic has {text(reply[1])} slots by now")
