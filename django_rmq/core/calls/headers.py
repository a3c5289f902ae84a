"""What the header of a script declares: its keys and arguments, by their names."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from django_rmq.core import scripts
from django_rmq.core.calls.places import FACTS

_COMMANDS = {"ZRANGE": ("set",), "ZRANK": ("set",)}
"""The keys of plain commands, where their place has several."""

_OTHER = {("loose", "kind")}
"""Arguments that only have the name of a topic's fact: here, a kind of records."""


class Signature(NamedTuple):
    """The names of a script's keys, in their order, and of the facts of the topic among its arguments."""

    keys: tuple[str, ...]
    """Of a script of many slots: those of each slot."""
    facts: tuple[str, ...]
    """For each argument up to the last fact: the fact's name; empty: the argument is the call's own."""
    reads: bool
    """It changes nothing."""


@cache
def signature(script: str) -> Signature:
    """Return what the header of ``script`` declares; of a plain command, what is known of it here."""
    if script not in scripts.all_names():
        return Signature(_COMMANDS.get(script, ()), (), reads=True)
    declared = scripts.declaration(script)
    named = [argument.name for argument in declared.arguments]
    facts = [name if name in FACTS and (script, name) not in _OTHER else "" for name in named]
    while facts and not facts[-1]:
        facts.pop()
    return Signature(tuple(key.name for key in declared.keys), tuple(facts), declared.reads)
