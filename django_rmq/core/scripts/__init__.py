"""The scripts: one file per transition, loaded as package data.

A file whose name begins with an underscore is a fragment; ``-- include: _name`` on a line of its own
is replaced by its text, one level deep. Every other file is a script named like its ``Broker`` method.
Those of this folder are the transitions of a slot; those in ``workers/`` are about workers and what is
assigned to them, those in ``topics/`` about definitions, those in ``limits/`` about what may be done how often, those in
``answers/`` about requests that are done once; they are loaded as ``"workers/beat"``.
"""

from __future__ import annotations

import hashlib
import re
from functools import cache
from importlib.resources import files
from typing import NamedTuple

_INCLUDE = re.compile(r"^-- include: (_\w+)$", re.MULTILINE)


class Script(NamedTuple):
    """A script's name, text and SHA-1, as EVALSHA wants it."""

    name: str
    text: bytes
    sha: bytes


def _read(name: str) -> str:
    return (files(__name__) / f"{name}.lua").read_text(encoding="utf-8")


@cache
def load(name: str) -> Script:
    """Return the script ``name`` with its fragments pasted in."""
    text = _INCLUDE.sub(lambda match: _read(match[1]).rstrip("\n"), _read(name)).encode()
    return Script(name, text, hashlib.sha1(text, usedforsecurity=False).hexdigest().encode())


@cache
def all_names() -> tuple[str, ...]:
    """Return the names of all scripts."""
    folders = (entry.name for entry in files(__name__).iterdir() if entry.is_dir())
    return tuple(name for folder in ("", *sorted(folders)) for name in names(folder))


@cache
def names(folder: str = "") -> tuple[str, ...]:
    """Return the names of the transitions of a slot, or of the scripts in ``folder``."""
    found = (entry.name for entry in (files(__name__) / folder).iterdir())
    chosen = sorted(name[:-4] for name in found if name.endswith(".lua") and not name.startswith("_"))
    return tuple(f"{folder}/{name}" if folder else name for name in chosen)
