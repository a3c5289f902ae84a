"""The scripts, in files by subject, loaded as package data.

The line ``-- script: commit`` begins a script, named like the function of ``core.commands`` that calls it. The files in
``slot/`` hold the transitions of a slot, loaded as ``"commit"``. The script ``beat`` of ``workers.lua``, which is none, is
loaded as ``"workers/beat"``.

The line ``-- section: budget`` begins a section: code that several scripts share. A section that defines one function
has its name. The files whose names begin with an underscore have only sections, one subject each.

A script's header names its keys and declares its arguments (`header`). What a key holds is declared once: those of a slot in
``slot/_keys.lua``, others at the head of their file. In the code of a script, these comments, each on a separate line, stand for

``-- include: _retries.budget``
    the text of that section. It includes no other. It says ``-- needs: store kind [claim]``: the script has bound these
    names before; those in brackets are nil where it has none of that name.
``-- include: _outcomes.notes where OUTCOME_RETENTION``
    that section in the script's second form, ``"commit+outcomes"``, which topics with OUTCOME_RETENTION use. In the first
    form the names that the section ``offers`` are nil. The keys and arguments of the section belong to the second
    form only: the keys follow all others, and the arguments precede them.
``-- check: types``
    the answer WRONGTYPE, before anything is written, if a key is not of its declared type. ``but a b`` leaves keys out.
    ``unusual`` says whether any of the keys exists that most slots do not have.

Redis is sent only the SHA-1 of a script (EVALSHA). A pipeline, and the first command to a node of a cluster, loads all scripts
before. A server that has lost them answers NOSCRIPT and has run nothing. Then the script is loaded (``redis.wire.load_script``)
and the call repeated: by ``redis.broker`` and ``redis.shared_connection``, and by ``cluster.cluster_broker`` for a node.

``-- rule: name`` marks a line that a mutant of ``tests/proof/mutants.txt`` switches off. Comments do not reach
Redis.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from .header import Argument, Declaration, HeaderError, Key, parse

__all__ = [
    "SECOND",
    "Argument",
    "Declaration",
    "HeaderError",
    "Key",
    "Script",
    "all_names",
    "declaration",
    "load",
    "names",
]

SECOND = "+outcomes"
"""The end of the name of a script's second form."""

_RARE = frozenset(
    {"retry", "dead", "deaths", "failures", "body", "prepare_body", "claimants", "claim", "trash"}
)
"""The keys that a slot has only while something rests, has failed or died, is keyed or claimed, or can be brought back."""

_DIRECTIVE = re.compile(r"-- (include|check): (.*?)( where OUTCOME_RETENTION)?")
_PART = re.compile(r"^-- (script|section): (\w+)\n", re.MULTILINE)
_KEY = re.compile(r"^-- KEY (\w+) +(ZSET|HASH)\b", re.MULTILINE)
_LOCAL = re.compile(r"^local (?:function (\w+)|([\w, ]+?)(?: =|$))")
_TRAILING_COMMENT = re.compile(r" +-- .*$")


class Script(NamedTuple):
    """A script's name, text and SHA-1, as EVALSHA needs it."""

    name: str
    text: bytes
    sha: bytes


@cache
def sources() -> dict[str, str]:
    """Return the text of each script and section: ``commit``, ``workers/beat``, ``_retries.budget``, ``send.push``."""
    return {name: part for file, text in texts().items() for name, part in parts(file, text)}


@cache
def key_types() -> dict[str, str]:
    """Return the type of each key that a script may use: ``ZSET`` or ``HASH``."""
    return dict(key for text in texts().values() for key in _KEY.findall(text))


def texts() -> dict[str, str]:
    """Return the text of each file: ``slot/send``, ``workers``."""
    folder = files(__name__)
    entries = [("", entry) for entry in folder.iterdir()]
    entries += [("slot/", entry) for entry in (folder / "slot").iterdir()]
    return {
        place + entry.name.removesuffix(".lua"): entry.read_text(encoding="utf-8")
        for place, entry in entries
        if entry.name.endswith(".lua")
    }


def parts(file: str, text: str) -> Iterator[tuple[str, str]]:
    """Yield each script and section of a file by its name."""
    folder, _, subject = file.rpartition("/")
    _, *marked = _PART.split(text)
    for kind, name, part in zip(marked[::3], marked[1::3], marked[2::3], strict=True):
        if kind == "section":
            yield f"{subject}.{name}", part
        else:
            yield name if folder else f"{subject}/{name}", part


def _source(name: str) -> str:
    name = name.removesuffix(SECOND)
    if name not in sources():
        raise HeaderError(f"There is no {name!r} among the scripts and sections.")
    return sources()[name]


def _split(name: str) -> tuple[list[str], list[str]]:
    """Return the lines of the header of a script or section, without their dashes, and of its code."""
    lines = _source(name).rstrip("\n").split("\n")
    end = next((i for i, line in enumerate(lines) if not line.startswith("--")), len(lines))
    return [line.removeprefix("--").strip() for line in lines[:end]], lines[end:]


@cache
def declaration(name: str) -> Declaration:
    """Return what the header of the script ``name`` declares."""
    declared = parse(name, _split(name)[0], key_types())
    if not name.endswith(SECOND):
        return declared
    section = _of_second_form(name)
    keys = tuple(Key(key, key_types()[key]) for key in _said("keys", section).split())
    arguments = tuple(Argument(*each.split()) for each in _said("arguments", section).split(", "))
    return declared._replace(keys=declared.keys + keys, arguments=arguments + declared.arguments)


def _of_second_form(name: str) -> str:
    """Return the section that brings the keys of a script's second form. Empty: it has no second form."""
    directives = map(_DIRECTIVE.fullmatch, _split(name)[1])
    return next((each[2] for each in directives if each and each[3] and _said("keys", each[2])), "")


def _said(what: str, section: str) -> str:
    """Return what a section says about its ``keys``, its ``arguments`` or what it ``needs`` or ``offers``."""
    return " ".join(re.findall(rf"^-- {what}: (.*)$", _source(section), re.MULTILINE))


def _without_comments(lines: list[str]) -> list[str]:
    code = [_TRAILING_COMMENT.sub("", line) for line in lines if not line.lstrip().startswith("--")]
    return [line for line in code if line]


def _bound(lines: list[str]) -> set[str]:
    """Return the names of the outermost locals."""
    matches = [_LOCAL.match(line) for line in lines if line.startswith("local ")]
    return {name.strip() for each in matches if each for name in (each[1] or each[2]).split(",")}


def _section(section: str, script: str, bound: set[str]) -> list[str]:
    """Return the code of a section for a script that has ``bound`` names before it."""
    needs = _said("needs", section)
    optional = re.findall(r"\[(\w+)\]", needs)
    missing = set(re.sub(r"\[\w+\]", "", needs).split()) - bound
    if missing:
        raise HeaderError(
            f"{script}: {section} needs {', '.join(sorted(missing))}, bound before it is included."
        )
    absent = [name for name in optional if name not in bound]
    return [*(f"local {name}" for name in absent), *_without_comments(_split(section)[1])]


def _check(keys: tuple[Key, ...]) -> list[str]:
    """Return the code that checks the types of ``keys``. It looks at keys that most slots lack only where one of them exists."""

    def type_checks(keys: list[Key]) -> str:
        return " or ".join(f"mistyped('{key.type.lower()}', {key.name})" for key in keys)

    rare = [key for key in keys if key.name in _RARE]
    common = [key for key in keys if key.name not in _RARE]
    code = [f"local wrong = {type_checks(common) or 'nil'}"]
    if rare:
        code += [
            f"local unusual = redis.call('EXISTS', {', '.join(key.name for key in rare)}) > 0",
            f"if unusual and not wrong then wrong = {type_checks(rare)} end",
        ]
    return [*code, "if wrong then return wrong end"]


@cache
def load(name: str) -> Script:
    """Return the script ``name`` as it is sent to Redis."""
    declared = declaration(name)
    lines = declared.bindings()
    for line in _split(name)[1]:
        directive = _DIRECTIVE.fullmatch(line)
        if not directive:
            lines += _without_comments([line])
        elif directive[3] and not name.endswith(SECOND):
            if offered := _said("offers", directive[2]).split():
                lines.append(f"local {', '.join(offered)}")
        elif directive[1] == "include":
            lines += _section(directive[2], name, _bound(lines))
        else:
            left_out = directive[2].removeprefix("types").removeprefix(" but").split()
            lines += _section("_basics.mistyped", name, set())
            lines += _check(tuple(key for key in declared.keys if key.name not in left_out))
    text = "\n".join(lines).encode()
    return Script(name, text, hashlib.sha1(text, usedforsecurity=False).hexdigest().encode())


@cache
def all_names() -> tuple[str, ...]:
    scripts = tuple(sorted(name for name in sources() if "." not in name))
    return scripts + tuple(name + SECOND for name in scripts if _of_second_form(name))


@cache
def _names_by_sha() -> dict[bytes, str]:
    return {load(name).sha: name for name in all_names()}


def name_of(sha: bytes) -> str | None:
    """Return the name of the script with this SHA-1, or None if it is none of this version."""
    return _names_by_sha().get(sha)


@cache
def names() -> tuple[str, ...]:
    """Return the names of the transitions of a slot."""
    return tuple(name for name in all_names() if "/" not in name and not name.endswith(SECOND))
