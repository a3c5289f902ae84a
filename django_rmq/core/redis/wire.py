"""Encode commands for the wire: everything that knows the byte format of Redis (RESP).

redis-py encodes commands, too, but takes up to twice as long. Replies are read by redis-py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias, TypeVar

from django_rmq.core import lua
from django_rmq.core.commands.script_call import AtSlot, Call, Packed, RedisCommand
from django_rmq.core.model.topic import Topic

Command: TypeAlias = tuple[object, ...]
"""The words of a command: bytes, text and numbers, and perhaps ``Packed`` ones at its end."""

pack_command: Callable[[Any], bytes] | None
try:
    from hiredis import pack_command
except ImportError:
    # Spark executors may lack it, because it is compiled for each platform.
    pack_command = None

Text = TypeVar("Text")

Clock = Callable[[], int]
"""Returns microseconds since the epoch. Only tests pass one: scripts otherwise use the clock of Redis."""

FRAMES = 4_096
"""The number of beginnings of commands that a broker remembers: one for each script, topic and length of a slot's number."""

AT_ONCE = 65_536
"""The number of bytes of a pipeline that are sent with one system call."""


def command(call: Call[object], prefix: str, clock: Clock | None) -> Command:
    """Return the command that runs a call. Without a clock the script uses that of Redis."""
    keys, arguments = call.keys(prefix), call.arguments(prefix)
    if isinstance(call, RedisCommand):
        return (call.script, *keys, *arguments)
    now = b"" if clock is None else clock()
    return ("EVALSHA", lua.load(call.script).sha, len(keys), *keys, *arguments, now)


def load_script(name: str) -> Command:
    """Return the command that loads a script into a server."""
    return ("SCRIPT", "LOAD", lua.load(name).text)


def load_all_scripts() -> list[Command]:
    """Return the commands that load every script into a server."""
    return list(map(load_script, lua.all_names()))


def packed(command: tuple[object, ...]) -> bytes:
    """Return a command (bytes, text and numbers) encoded for the wire.

    Like redis-py, but without the check whether an argument is none of these, which takes half of its time.
    """
    if pack_command is None:
        return b"*%d\r\n%b" % (len(command), b"".join(map(_argument, command)))
    return pack_command(command)


def parts_of_argument(length: Text, text: Text, literal: Callable[[bytes], Text]) -> tuple[Text, ...]:
    """Return parts that, joined, are one argument of a command; for callers that join columns of texts.

    ``length``: the length of the text, in digits; ``literal`` makes a part out of bytes.
    """
    return literal(b"$"), length, literal(b"\r\n"), text, literal(b"\r\n")


def _argument(argument: Any) -> bytes:
    if type(argument) is int:
        argument = b"%d" % argument
    elif not isinstance(argument, bytes):
        argument = str(argument).encode() if isinstance(argument, (str, float)) else bytes(argument)
    return b"$%d\r\n%b\r\n" % (len(argument), argument)


def has_packed(call: Call[object]) -> bool:
    """Return whether a call has arguments that are encoded already."""
    return bool(call.own) and isinstance(call.own[-1], Packed)


def pieces(command: Command) -> list[bytes | memoryview]:
    """Return the pieces of a command whose last argument, or the one before it, is encoded already."""
    more = [each.count * each.width - 1 for each in command[-2:] if isinstance(each, Packed)]
    pieces: list[bytes | memoryview] = []
    for each in command:
        pieces += each.data if isinstance(each, Packed) else (_argument(each),)
    return [b"*%d\r\n" % (len(command) + sum(more)), *pieces]


def chunks(pieces: Iterable[bytes | memoryview]) -> Iterator[bytes]:
    """Join the pieces of encoded commands, so that each is large enough for a system call."""
    together: list[bytes | memoryview] = []
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
    """Writes calls at one slot that differ only in the slot and in their last arguments.

    Everything before those arguments is encoded once, in pieces between which the number of the slot stands. It halves the
    time to send one message.
    """

    _NO_CLOCK = _argument(b"")

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        # Each entry holds its topic: the id of a topic that was garbage-collected could become that of another one.
        self._known: dict[tuple[object, ...], tuple[Topic, list[bytes]]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def written(self, call: Call[object]) -> bytes:
        """Return the encoded command of a call whose last arguments vary; the script uses the clock of Redis."""
        place = call.place
        assert isinstance(place, AtSlot)
        topic, slot = place
        own, varying, digits = call.own, -call.varying, b"%d" % slot
        # The length of an encoded key depends on the number of digits.
        key = (call.script, id(topic), len(digits), varying, own[:varying])
        prepared = self._known.get(key)
        if prepared is None:
            prepared = self._remember(key, topic, call, digits)
        return b"".join((digits.join(prepared[1]), *map(_argument, own[varying:]), self._NO_CLOCK))

    def _remember(
        self, key: tuple[object, ...], topic: Topic, call: Call[object], digits: bytes
    ) -> tuple[Topic, list[bytes]]:
        # Long-lived processes may send with many topics and options, and the memory must not grow with them.
        if len(self._known) >= FRAMES:
            self._known.clear()
        whole = command(call, self._prefix, None)
        count = int(str(whole[2]))
        behind_keys = b"".join(map(_argument, whole[3 + count : -1 - call.varying]))
        pieces = [b"*%d\r\n%b" % (len(whole), b"".join(map(_argument, whole[:3])))]
        for name in map(_argument, whole[3 : 3 + count]):
            # The name of a key ends with the number of its slot, and perhaps the end of its hash tag.
            before, _, after = name.rpartition(digits)
            pieces[-1] += before
            pieces.append(after)
        pieces[-1] += behind_keys
        prepared = self._known[key] = topic, pieces
        return prepared
