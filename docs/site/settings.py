"""What each setting takes and its default, from the code: the cells of the tables in docs/reference/settings.md.

    make reference      writes them into the page

A test says if the page is not what this writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from django_rmq.core.words.schedules import Schedule
from django_rmq.core.words.topics import Topic
from django_rmq.project.settings.config import Config
from django_rmq.project.settings.keys import Keys, keys_of
from django_rmq.project.settings.reader import PLAIN_KEYS, SECTIONS
from django_rmq.project.settings.schedules import SCHEDULE_KEYS
from django_rmq.project.settings.tasks import OPTION_KEYS, TaskOptions
from django_rmq.project.settings.topics import TOPIC_KEYS
from django_rmq.project.settings.values import Wanted
from django_rmq.project.settings.zookeeper import ZooKeeper

PAGE = Path(__file__).parents[1] / "reference/settings.md"
IN_WORDS = {
    "BACKOFF": "1 s doubling to 10 min, with jitter",
    "AUTH": "none",
    "UPCAST": "none",
    "MODULES": "none",
    "TIMEZONE": "`TIME_ZONE`",
    "ACL": '`"creator"` with `AUTH`, else `"open"`',
}
"""Defaults that are computed, or are no value that anybody writes."""
NOTHING: Any = object()
"""No setting takes it, so whatever reads it says what it wants."""


def sections() -> Iterator[tuple[str, Keys, type]]:
    """Yield each table of the page by its heading: its keys, and the class that has their defaults."""
    yield "`RMQ`", PLAIN_KEYS, Config
    yield "A topic", TOPIC_KEYS, Topic
    yield "A schedule", SCHEDULE_KEYS, Schedule
    yield "`TASKS`", OPTION_KEYS, TaskOptions
    yield "`ZOOKEEPER`", keys_of(ZooKeeper), ZooKeeper
    for name, (_, kind, keys) in SECTIONS.items():
        yield f"`{name}`", keys, kind


def cells(keys: Keys, kind: Any) -> Mapping[str, tuple[str, str]]:
    """Return key → what it takes and its default, as the table has them."""
    defaults = {one.name: one for one in fields(kind)}
    return {
        key: (taken(parse), IN_WORDS.get(key) or _default(defaults[field]))
        for key, (field, parse) in keys.items()
    }


def taken(parse: Any) -> str:
    """Return what a setting takes, in the words in which it refuses anything else."""
    try:
        parse(NOTHING)
    except Wanted as wanted:
        return re.sub(r" \([A-Za-z_ ]+(=|must).*?\)(?=;|$)", "", str(wanted))
    raise ValueError(f"{parse} takes anything")


def _default(field: Any) -> str:
    if field.default is MISSING:
        return "required"
    value = field.default
    if value is None:
        return "none"
    return (
        f"`{json.dumps(value)}`"
        if isinstance(value, str)
        else f"`{value:g}`"
        if isinstance(value, float)
        else f"`{value!r}`"
    )


def filled(page: str) -> str:
    """Return the page with the cells in its tables: the second and the third of each row that has a key."""
    for heading, keys, kind in sections():
        before, mark, rest = page.partition(f"\n## {heading}\n")
        section, next_mark, after = rest.partition("\n## ")
        for key, (what, default) in cells(keys, kind).items():
            section = re.sub(
                rf"^(\| `{key}` \|)[^|]*\|[^|]*\|", rf"\1 {what} | {default} |", section, flags=re.MULTILINE
            )
        page = before + mark + section + next_mark + after
    return page
