"""Schedules: what they are, and which tick is next."""

from __future__ import annotations

from hashlib import sha1

from django_rmq.core.model.keys import schedules_key
from django_rmq.exceptions import ServerRefused
from tests.oracle.keyspace import Memory

_FIELDS = (
    b"spec", b"override", b"paused", b"removed", b"generation", b"at", b"state", b"changed", b"topic", b"crc",
    b"last", b"late", b"renewed", b"former", b"walls",
)  # fmt: skip


def change_schedule(
    memory: Memory, _: object, name: str, field: str, value: str, from_now: int, renewed: int | str
) -> str:
    with memory.hash(schedules_key(memory.prefix)) as found:
        now_ms, of = memory.now_ms(), f"{name}:".encode()
        changed = of + field.encode()
        if field != "spec" and of + b"spec" not in found:
            return "not_found"
        returns = field == "spec" and of + b"removed" in found
        if found.get(changed, b"") == value.encode() and not returns:
            return "same"
        if renewed != "" and int(found.get(of + b"renewed", 0)) != renewed:
            return "same"
        if returns:
            del found[of + b"removed"]
        before = found.pop(changed, None)
        if value:
            found[changed] = value.encode()
        generation = max(now_ms, int(found.get(b"generation", 0)) + 1)
        found[b"generation"] = found[of + b"generation"] = b"%d" % generation
        if field == "spec":
            found[of + b"renewed"] = b"%d" % now_ms
            if before is not None and before != value.encode():
                found[of + b"former"] = sha1(before, usedforsecurity=False).hexdigest().encode()
        state, at = found.get(of + b"state", b"ready"), found.get(of + b"at")
        waits = state == b"writing" or (state == b"written" and int(at or 0) > now_ms)
        if state == b"written" and not waits:
            found[of + b"last"] = found[of + b"at"]
            state = b"ready"
        if waits or field == "removed":
            state = b"retracting"
        if at is None or (state == b"ready" and from_now):
            at = b"%d" % now_ms
        found[of + b"at"], found[of + b"state"], found[of + b"changed"] = at, state, b"%d" % now_ms
        return "changed"


def renew_schedule(memory: Memory, _: object, name: str, ends: int) -> str:
    with memory.hash(schedules_key(memory.prefix)) as found:
        of = f"{name}:".encode()
        if of + b"spec" not in found or of + b"removed" in found:
            return "not_found"
        found[of + b"renewed"] = b"%d" % (0 if ends else memory.now_ms())
        return "renewed"


def plan_tick(
    memory: Memory,
    _: object,
    name: str,
    generation: int,
    before: int,
    instant: int,
    topic: str,
    crc: int,
    local_times: str,
) -> str:
    with memory.hash(schedules_key(memory.prefix)) as found:
        of = f"{name}:".encode()
        known = [found.get(of + part) for part in (b"generation", b"at", b"paused")]
        state = found.get(of + b"state")
        if known != [b"%d" % generation, b"%d" % before, None] or state not in (b"ready", b"written"):
            return "lost"
        if state == b"written" and before > memory.now_ms():
            return "early"
        if not instant > before:
            raise ServerRefused("ERR instant is not after the one before")
        if state == b"written":
            found[of + b"last"] = b"%d" % before
        found[of + b"at"], found[of + b"state"] = b"%d" % instant, b"writing"
        found[of + b"topic"], found[of + b"crc"] = topic.encode(), b"%d" % crc
        found.pop(of + b"walls", None)
        if local_times:
            found[of + b"walls"] = local_times.encode()
        return "planned"


def settle_tick(memory: Memory, _: object, name: str, generation: int, instant: int, outcome: str) -> str:
    with memory.hash(schedules_key(memory.prefix)) as found:
        of = f"{name}:".encode()
        known = (found.get(of + b"generation"), found.get(of + b"at"))
        if known != (b"%d" % generation, b"%d" % instant):
            return "lost"
        state = found[of + b"state"]
        if state == b"writing" and outcome == "written":
            found[of + b"late"] = b"%d" % max(0, memory.now_ms() - instant)
            found[of + b"state"] = b"written"
            return "settled"
        if state != b"retracting":
            return "lost"
        if of + b"removed" in found:
            for part in _FIELDS:
                found.pop(of + part, None)
            return "forgotten"
        if outcome == "written":
            found[of + b"state"] = b"written"
            return "settled"
        found[of + b"at"] = b"%d" % min(instant - 1, int(found[of + b"changed"]))
        found[of + b"state"] = b"ready"
        return "settled"
