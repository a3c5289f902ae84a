"""Commands as they go over the wire: everything that knows how Redis wants its bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from hiredis import pack_command

from django_rmq.core import scripts
from django_rmq.core.calls.call import Call, Command
from django_rmq.core.calls.packed import Packed
from django_rmq.core.calls.places import AtSlot
from django_rmq.core.words.topics import Topic

Text = TypeVar("Text")

Clock = Callable[[], int]
"""Returns microseconds since the epoch. Given by tests only: scripts ask Redis' own clock."""

FRAMES = 16_384
"""Slots for which a broker remembers how one message is sent there."""

AT_ONCE = 65_536
"""Bytes of a pipeline that are worth a call of the operating system."""


def command(call: Call[Any], prefix: str, clock: Clock | None) -> tuple[Any, ...]:
    """Return the command that runs a call. Without a clock the script asks Redis'."""
    keys, arguments = call.keys(prefix), call.arguments(prefix)
    if isinstance(call, Command):
        return (call.script, *keys, *arguments)
    now = b"" if clock is None else clock()
    return ("EVALSHA", scripts.load(call.script).sha, len(keys), *keys, *arguments, now)


def loading() -> list[tuple[str, bytes]]:
    """Return the commands that give a server every script."""
    return [("SCRIPT LOAD", scripts.load(name).text) for name in scripts.all_names()]


def packed(command: tuple[Any, ...]) -> bytes:
    """Return a command (bytes, text and numbers) as it goes over the wire.

    As redis-py does it, which first looks whether an argument is none of these: half of its time.
    """
    found: bytes = pack_command(command)
    return found


def parts_of_argument(length: Text, text: Text, literal: Callable[[bytes], Text]) -> tuple[Text, ...]:
    """Return what, joined, is one argument of a command: for those who join columns of texts.

    ``length``: that of the text, in digits; ``literal`` makes a part out of bytes.
    """
    return literal(b"$"), length, literal(b"\r\n"), text, literal(b"\r\n")


def _argument(argument: Any) -> bytes:
    """Return one argument of a command as it goes over the wire."""
    if type(argument) is int:
        argument = b"%d" % argument
    elif not isinstance(argument, bytes):
        argument = str(argument).encode() if isinstance(argument, (str, float)) else bytes(argument)
    return b"$%d\r\n%b\r\n" % (len(argument), argument)


def has_packed(call: Call[Any]) -> bool:
    """Return whether a call has arguments that are written already."""
    return bool(call.own) and isinstance(call.own[-1], Packed)


def chunks(commands: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Return commands as they go over the wire, in pieces that are each worth a call of the operating system."""
    if any(isinstance(argument, Packed) for command in commands for argument in command[-2:-1]):
        return [b"".join(piece for command in commands for piece in _pieces(command))]
    return list(_gathered(map(packed, commands)))


def _pieces(command: tuple[Any, ...]) -> list[Any]:
    """Return the pieces of a command, which may have something packed before its last argument."""
    written = command[-2]
    if not isinstance(written, Packed):
        return [packed(command)]
    *before, now = map(_argument, (*command[:-2], command[-1]))
    return [b"*%d\r\n" % (len(before) + 1 + written.count * written.width), *before, written.data, now]


def _gathered(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Join small pieces, so that each is worth a call of the operating system."""
    together: list[bytes] = []
    size = 0
    for piece in pieces:
        together.append(piece)
        size += len(piece)
        if size > AT_ONCE:
            yield b"".join(together)
            together, size = [], 0
    if together:
        yield b"".join(together)


class Frames:
    """Writes calls that differ in their last arguments alone: what stands before these is written once for all of them.

    One message is sent in half the time that way.
    """

    _NO_CLOCK = _argument(b"")

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        # Each entry holds its topic, so that nothing else gets that topic's id.
        self._known: dict[tuple[Any, ...], tuple[Topic, bytes]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def written(self, call: Call[Any]) -> bytes:
        """Return the command of a call whose last arguments vary, as it goes over the wire; it asks Redis' clock."""
        place = call.place
        assert isinstance(place, AtSlot)
        topic, slot = place
        own, varying = call.own, -call.varying
        key = (id(topic), slot, own[:varying])
        known = self._known.get(key)
        if known is None:
            if topic.slots > FRAMES:
                # Of more slots than are remembered most would be forgotten before they are used again.
                return packed(command(call, self._prefix, None))
            known = self._remember(key, topic, call)
        return b"".join((known[1], *map(_argument, own[varying:]), self._NO_CLOCK))

    def _remember(self, key: tuple[Any, ...], topic: Topic, call: Call[Any]) -> tuple[Topic, bytes]:
        if len(self._known) >= FRAMES:
            self._known.clear()
        whole = command(call, self._prefix, None)
        fixed = whole[: -1 - call.varying]
        known = self._known[key] = topic, b"*%d\r\n%b" % (len(whole), b"".join(map(_argument, fixed)))
        return known
