"""`RMQ["SCHEDULES"]`, the options of `@schedule`, which are the same in lower case, and the topic of a schedule that names none.

What a schedule requires of its topic is checked by ``django_rmq.schedules``, when all topics are known.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from types import MappingProxyType

from django_rmq.conf.known_keys import Keys, Problems, read_values
from django_rmq.conf.parsers import InvalidSetting, one_of, optional, printable, text, whole_seconds
from django_rmq.conf.topic_settings import read_defaults, read_topic
from django_rmq.core.model.bounds import LONGEST_WAIT
from django_rmq.core.model.keys import NAME_WANTED, TOPIC_NAME
from django_rmq.core.model.schedule import CATCH_UP, Schedule
from django_rmq.core.model.topic import Topic


def body(value: object) -> object:
    with suppress(TypeError, ValueError, RecursionError):
        # JSON turns a tuple into a list, and a number that is a key into a text: ticks would carry another body.
        if json.loads(json.dumps(value)) == value:
            return value
    raise InvalidSetting("what JSON can hold")


SCHEDULE_KEYS: Keys = {
    "TOPIC": ("topic", text),
    "BODY": ("body", body),
    "CRON": ("cron", optional(text)),
    "EVERY": ("every", optional(whole_seconds(LONGEST_WAIT))),
    "TIMEZONE": ("timezone", text),
    "CATCH_UP": ("catch_up", one_of(*CATCH_UP)),
}
"""Settings key -> (field of ``Schedule``, parser of its value)."""


OWN_TOPIC: Mapping[str, object] = MappingProxyType(
    {
        "TYPE": "fixed_time",
        "IDENTITY": "key",
        "BODY": "json",
        "SLOT_BASIS": None,
        "SLOTS": 1,
        "SERIAL": True,
        "LISTENER": True,
    }
)
"""The topic of a schedule that names none, whatever TOPIC_DEFAULTS says. Its runs come one after the other."""


# A schedule may have a topic in its own name, so both take the same names.
def is_name(name: object) -> bool:
    """Return whether a schedule may have this name."""
    return isinstance(name, str) and TOPIC_NAME.fullmatch(name) is not None


def read_schedules(problems: Problems, root: Mapping[str, object], timezone: str) -> Mapping[str, Schedule]:
    """Return the declared schedules that have no problem. ``timezone``: that of schedules that name none."""
    declared = root.get("SCHEDULES", {})
    if not isinstance(declared, Mapping):
        problems.report("E001", f'RMQ["SCHEDULES"] is {printable(declared)}: it must be a dict.')
        return {}
    schedules = {}
    for name, options in declared.items():
        if not is_name(name):
            message = f'RMQ["SCHEDULES"] has the name {printable(name)}: it must be {NAME_WANTED}.'
            problems.report("E003", message)
            continue
        before = len(problems)
        values = read_values(problems, f'RMQ["SCHEDULES"]["{name}"]', options, SCHEDULE_KEYS)
        if len(problems) == before:
            schedules[name] = Schedule(name, **{"topic": name, "timezone": timezone, **values})
    return MappingProxyType(schedules)


def with_schedule_topics(
    problems: Problems, root: Mapping[str, object], declared: Mapping[str, Topic], names: Iterable[str]
) -> Mapping[str, Topic]:
    """Return all topics: the ``declared`` ones, and one for each schedule that has one in its own name."""
    missing = sorted(set(names) - declared.keys())
    if not missing:
        return declared
    # Problems of the defaults are reported with the declared topics.
    defaults = read_defaults(Problems(), root)
    topics = {
        name: read_topic(problems, f'The topic of schedule "{name}"', name, OWN_TOPIC, defaults)
        for name in missing
    }
    return MappingProxyType(
        {**declared, **{name: topic for name, topic in topics.items() if topic is not None}}
    )
