"""Calls on the records of schedules: what was changed, and which tick is next.

``ticks`` has the calls that put a tick into its slot.
"""

from __future__ import annotations

from django_rmq.core.commands.script_call import Call, OfKey, RedisCommand, Single, pairs, word
from django_rmq.core.model.keys import schedules_key
from django_rmq.core.model.schedule import ScheduleRecords, records

_SCHEDULES = Single(schedules_key)


def read_schedules() -> Call[ScheduleRecords]:
    """Return everything that is recorded about schedules, by their names."""
    return RedisCommand(
        "HGETALL", _SCHEDULES, (), OfKey("schedules", lambda key, reply: records(key, dict(pairs(reply))))
    )


def change_schedule(
    name: str, field: str, value: str, *, from_now: bool = False, renewed: int | None = None
) -> Call[str]:
    """Change a field of a schedule. Answers changed, same or not_found.

    ``field``: spec, override, paused, removed, or walls, the local times of the latest ticks (``local_times_text``).
    ``from_now``: its ticks count from now on, instead of from the last one. ``renewed``: change it only if no
    worker has declared it since that time, which is the one of its record.
    """
    return Call(
        "schedules/change_schedule",
        _SCHEDULES,
        (name, field, value, int(from_now), "" if renewed is None else renewed),
        word,
    )


def renew_schedule(name: str, *, ends: bool = False) -> Call[str]:
    """Note that a worker declares a schedule as it is. Answers renewed or not_found.

    ``ends``: the worker declared it, and ends.
    """
    return Call("schedules/renew_schedule", _SCHEDULES, (name, int(ends)), word)


def plan_tick(
    name: str, generation: int, before: int, instant: int, topic: str, crc: int, local_times: str = ""
) -> Call[str]:
    """Make ``instant`` the next tick of a schedule, if ``before`` is still the latest one.

    ``local_times``: what ``local_times_text`` returns. Answers planned, early or lost.
    """
    # The record has the CRC and no slot, because the slot count may change before the tick is written.
    own = (name, generation, before, instant, topic, crc, local_times)
    return Call("schedules/plan_tick", _SCHEDULES, own, word)


def settle_tick(name: str, generation: int, instant: int, outcome: str) -> Call[str]:
    """Note that a tick is ``written``, or ``removed`` from its slot. Answers settled, forgotten or lost."""
    own = (name, generation, instant, outcome)
    return Call("schedules/settle_tick", _SCHEDULES, own, word)
