"""Plain commands, as a server runs them on the keyspace, and the transaction that inserts messages."""

from __future__ import annotations

from typing import Any

from django_rmq.core.commands.script_call import Call
from tests.oracle import inserting
from tests.oracle.keyspace import Memory


def run(memory: Memory, call: Call[Any]) -> Any:
    """Return the answer of a plain command, or of a part of an insertion."""
    if call.script == "ZADD":
        memory.queued = call
    elif call.script == "EXEC":
        assert memory.queued is not None
        place: Any = memory.queued.place
        return inserting.insert(memory, *place, *memory.queued.own)
    elif call.script not in ("MULTI", "insert"):
        return call.read(_read(memory, call), memory.prefix)
    return None


def _read(memory: Memory, call: Call[Any]) -> Any:
    if call.script == "EXISTS":
        with memory.lock:
            return sum(key in memory.keyspace for key in call.keys(memory.prefix))
    (key,) = call.keys(memory.prefix)
    with memory.hash(key) as found:
        if call.script == "HMGET":
            fields = (field if isinstance(field, bytes) else str(field).encode() for field in call.own)
            return [found.get(field) for field in fields]
        if call.script == "HLEN":
            return len(found)
        if call.script == "HSET":
            field, value = (one if isinstance(one, bytes) else str(one).encode() for one in call.own)
            is_new, found[field] = field not in found, value
            return int(is_new)
        if call.script == "HINCRBY":
            name, more = str(call.own[0]).encode(), int(str(call.own[1]))
            total = int(found.get(name, b"0")) + more
            found[name] = str(total).encode()
            return total
        if call.script == "PEXPIRE":
            return int(bool(found))  # the tests of time use a server
        if call.script == "HDEL":
            return sum(found.pop(str(field).encode(), None) is not None for field in call.own)
        assert call.script == "HGETALL"
        return dict(found)
