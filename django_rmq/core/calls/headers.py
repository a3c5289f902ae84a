"""What the header of a script declares: its keys and arguments, by their names."""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

from django_rmq.core import scripts
from django_rmq.core.calls.places import FACTS

READS = frozenset(
    {
        "audit",
        "between",
        "count",
        "find",
        "heads",
        "held",
        "history/sample",
        "look",
        "peek",
        "ranks",
        "read_claim",
        "seek",
        "survey",
        "HMGET",
        "ZRANGE",
        "ZRANK",
    }
)
"""Scripts and plain commands that change nothing."""

_DECLARED = re.compile(r"^-- (KEYS|ARGV)\[(\d+)(\.\.\.)?\] (.*)$", re.MULTILINE)
_COMMANDS = {"ZRANGE": ("set",), "ZRANK": ("set",)}
"""The keys of plain commands, where their place has several."""

_OF_EACH_SLOT = " of each slot"
_OTHER = {("loose", "kind")}
"""Arguments that only have the name of a topic's fact: here, a kind of records."""


class Declaration(NamedTuple):
    """The names of a script's keys, in their order, and of the facts of the topic among its arguments."""

    keys: tuple[str, ...]
    """Of a script of many slots: those of each slot."""
    facts: tuple[str, ...]
    """For each numbered argument up to the last fact: the fact's name; empty: the argument is the call's own."""


@cache
def declaration(script: str) -> Declaration:
    """Return what the header of ``script`` declares; of a plain command, what is known of it here."""
    if script not in scripts.all_names():
        return Declaration(_COMMANDS.get(script, ()), ())
    keys: list[str] = []
    facts: list[str] = []
    for table, _, is_open, text in _DECLARED.findall(scripts.load(script).text.decode()):
        if table == "ARGV":
            name = text.split()[0]
            facts.append(name if name in FACTS and (script, name) not in _OTHER else "")
        elif is_open:
            keys += text.removesuffix(_OF_EACH_SLOT).split(", ")
        else:
            keys.append(text.split()[0])
    while facts and not facts[-1]:
        facts.pop()
    return Declaration(tuple(keys), tuple(facts))
