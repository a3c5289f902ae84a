"""Calls about schedules: what they are, and which tick is next."""

from __future__ import annotations

from typing import Any

from django_rmq.core.commands.codecs import word
from django_rmq.core.commands.script_call import Call, OfKey, RedisCommand
from django_rmq.core.commands.script_keys import Named
from django_rmq.core.model.keys import schedules_key
from django_rmq.core.model.schedule import ScheduleRecord, records


def _key(prefix: str, _: str) -> bytes:
    return schedules_key(prefix)


def _all(key: bytes, reply: Any) -> list[ScheduleRecord]:
    pairs = reply.items() if isinstance(reply, dict) else zip(reply[::2], reply[1::2], strict=True)
    return records(dict(pairs))


def read_schedules() -> Call[list[ScheduleRecord]]:
    """Return everything that is recorded about schedules, by their names."""
    return RedisCommand("HGETALL", Named(_key, ""), (), OfKey("schedules", _all))


def change_schedule(
    name: str, field: str, value: str, *, from_now: bool = False, renewed: int | None = None
) -> Call[str]:
    """Change ``spec``, ``override``, ``paused``, ``walls`` or ``removed`` of a schedule. Answers changed, same or not_found.

    ``from_now``: its ticks count from now on, instead of from the last one. ``renewed``: change it only if no
    worker has declared it since that time, which is the one of its record.
    """
    return Call(
        "schedules/change",
        Named(_key, name),
        (name, field, value, int(from_now), "" if renewed is None else renewed),
        word,
    )


def renew_schedule(name: str, *, ends: bool = False) -> Call[str]:
    """Note that a worker declares a schedule as it is. Answers renewed or not_found.

    ``ends``: it declared it, and ends.
    """
    return Call("schedules/renew", Named(_key, name), (name, int(ends)), word)


def plan_tick(
    name: str, generation: int, before: int, instant: int, topic: str, crc: int, walls: str = ""
) -> Call[str]:
    """Make ``instant`` the next tick of a schedule, if ``before`` still is the latest one.

    ``walls``: what ``walls_text`` returns. Answers planned, early or lost.
    """
    own = (name, generation, before, instant, topic, crc, walls)
    return Call("schedules/plan", Named(_key, name), own, word)


def settle_tick(name: str, generation: int, instant: int, outcome: str) -> Call[str]:
    """Note that a tick is ``written``, or ``removed`` from its slot. Answers settled, forgotten or lost."""
    own = (name, generation, instant, outcome)
    return Call("schedules/settle", Named(_key, name), own, word)
