"""The header of a script: the names of its keys, and its arguments.

    -- KEYS store prepare inflight dead deaths
    --      failures body
    -- KEYS store retry of each slot
    -- ARGV[1] kind
    -- ARGV[2] limit NUMBER  messages at most
    -- ARGV[3] apply FLAG    1 or 0
    -- ARGV[4...] members
    -- ARGV[#ARGV] now

A blank line ends the header. A line ``-- Changes nothing.`` in it says that the script only reads. The names become
locals of the script: ``NUMBER`` converts the argument and ``FLAG`` compares it with 1. Keys ``of each slot`` are those of
many slots, bound as ``slots_keys``. Arguments whose place ends in ``...`` go from ``first`` to ``last``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

_KEYS = re.compile(r"^KEYS ((?:\w+\s)*?\w+)( of each slot)?\n(?:\n|ARGV)", re.MULTILINE)
_ARGUMENT = re.compile(r"ARGV\[(\d+)\] (\w+)(?: (NUMBER|FLAG)\b)?")
_REST = re.compile(r"ARGV\[(\d+)\.\.\.\] (\w+)")
_CONVERSIONS = {"NUMBER": "tonumber(%s)", "FLAG": "%s == '1'"}


class HeaderError(ValueError):
    """A script's header cannot be read."""


class Key(NamedTuple):
    """One key of a script."""

    name: str
    type: str
    """``ZSET`` or ``HASH``."""


class Argument(NamedTuple):
    """One argument of a script that has its own place."""

    name: str
    form: str = ""
    """``NUMBER``, ``FLAG``, or empty for text."""


class Declaration(NamedTuple):
    """What a script's header declares."""

    script: str
    keys: tuple[Key, ...]
    many_slots: bool
    """Whether the keys repeat for each of many slots."""
    arguments: tuple[Argument, ...]
    """The arguments without the variable ones and without ``now``, which is the last argument of every script."""
    rest: str
    """The name of the variable arguments after ``arguments``. Empty: there are none."""
    reads: bool
    """Whether the script changes nothing."""

    def bindings(self) -> list[str]:
        """Return the Lua statements that bind keys and arguments to their names.

        One ``unpack`` takes Redis half as long as an index into KEYS or ARGV for each name.
        """
        keys = [key.name for key in self.keys]
        names = [argument.name for argument in self.arguments]
        code = ["local slots_keys = KEYS" if self.many_slots else f"local {', '.join(keys)} = unpack(KEYS)"]
        if not self.rest:
            code.append(f"local {', '.join([*names, 'now'])} = unpack(ARGV)")
        elif names:
            code.append(f"local {', '.join(names)} = unpack(ARGV, 1, {len(names)})")
        converted = [argument for argument in self.arguments if argument.form]
        if converted:
            values = [_CONVERSIONS[argument.form] % argument.name for argument in converted]
            code.append(f"{', '.join(argument.name for argument in converted)} = {', '.join(values)}")
        if self.rest:
            code.append(f"local first, last, now = {len(names) + 1}, #ARGV - 1, ARGV[#ARGV]")
        return code


def parse(script: str, header: list[str], types: Mapping[str, str]) -> Declaration:
    """Return the declaration in the lines of a ``header``, without their dashes; raise `HeaderError` if they are wrong.

    ``types``: the type of each key that there is.
    """
    arguments: list[Argument] = []
    rest, now = "", False
    named = _KEYS.search("\n".join(header))
    if named is None:
        raise HeaderError(f"{script}: the header names no keys.")
    unknown = set(named[1].split()) - types.keys()
    if unknown:
        raise HeaderError(f"{script}: no file declares the keys {', '.join(sorted(unknown))}")
    keys = [Key(name, types[name]) for name in named[1].split()]
    for line in header:
        if line.startswith(("include:", "check:")):
            raise HeaderError(f"{script}: a blank line ends the header, before this: {line}")
        if not line.startswith("ARGV"):
            continue
        if now:
            raise HeaderError(f"{script}: nothing follows `now`: {line}")
        if (variable := _REST.match(line)) and int(variable[1]) == len(arguments) + 1 and not rest:
            rest = variable[2]
        elif re.fullmatch(r"ARGV\[#ARGV\] now", line) and rest:
            now = True
        elif (argument := _ARGUMENT.match(line)) and int(argument[1]) == len(arguments) + 1 and not rest:
            now = argument[2] == "now"
            if not now:
                arguments.append(Argument(argument[2], argument[3] or ""))
        else:
            raise HeaderError(f"{script}: the header cannot be read here: {line}")
    names = [key.name for key in keys] + [argument.name for argument in arguments]
    if len(set(names)) < len(names):
        raise HeaderError(f"{script}: the header names something twice: {', '.join(names)}")
    if not now:
        raise HeaderError(f"{script}: the header declares no `now`.")
    return Declaration(
        script, tuple(keys), bool(named[2]), tuple(arguments), rest, "Changes nothing." in header
    )
