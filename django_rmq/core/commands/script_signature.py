"""What the header of a script declares: the names of its keys and arguments."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from django_rmq.core import lua
from django_rmq.core.commands.script_keys import FACTS

_COMMANDS = {
    "ZRANGE": ("set",),
    "ZRANK": ("set",),
    "HLEN": ("claims",),
    "EXISTS": ("store", "retry", "prepare", "claimants"),
    "ZADD": ("inserting",),
}
"""The keys of plain commands whose place has several keys."""

_OF_TRANSACTIONS = {"MULTI", "EXEC", "ZADD", "TIME"}
"""Plain commands that must not be repeated one by one; all others only read."""

_OTHER = {("loose", "kind")}
"""Arguments that share a name with a fact of the topic but mean something else: here, a kind of records."""


class Signature(NamedTuple):
    """The names of a script's keys, in order, and of the topic's facts among its arguments."""

    keys: tuple[str, ...]
    """The names of the keys. For a script of many slots: the keys of each slot."""
    facts: tuple[str, ...]
    """The name of the fact for each argument up to the last fact. An empty name: the argument belongs to the call."""
    reads: bool
    """Whether the script changes nothing."""


@cache
def signature(script: str) -> Signature:
    """Return what the header of ``script`` declares; for a plain command, what this module declares."""
    if script not in lua.all_names():
        return Signature(_COMMANDS.get(script, ()), (), script not in _OF_TRANSACTIONS)
    declared = lua.declaration(script)
    named = [argument.name for argument in declared.arguments]
    facts = [name if name in FACTS and (script, name) not in _OTHER else "" for name in named]
    while facts and not facts[-1]:
        facts.pop()
    return Signature(tuple(key.name for key in declared.keys), tuple(facts), declared.reads)
