"""The causes of errors: what the first lines of errors have in common, by which dead messages are grouped."""

from __future__ import annotations

import re
from hashlib import blake2b

LONGEST_ERROR = 200
"""Maximum number of characters of an error by which messages are grouped."""

_QUOTED = re.compile(r"(?<!\w)'[^']*'(?!\w)|\"[^\"]*\"|`[^`]*`|“[^”]*”|«[^»]*»")
_WORD = re.compile(r"[\w~@.+-]+")


def cause_of(error: str, error_class: str) -> str:
    """Return the id of an error's cause."""
    return cause_of_pattern(error_pattern(error, error_class), error_class)


def cause_of_pattern(pattern: str, error_class: str) -> str:
    """Return a short id for a class and a pattern."""
    text = f"{error_class}\n{pattern}".encode("utf-8", "backslashreplace")
    return blake2b(text, digest_size=6).hexdigest()


def error_pattern(error: str, error_class: str) -> str:
    """Return the first line of an error without its class, and with signs in place of what differs from message to message."""
    line = error.partition("\n")[0].strip()
    if error_class:
        line = line.removeprefix(error_class).lstrip().removeprefix(":").lstrip()
    line = _WORD.sub(_sign, _QUOTED.sub("'…'", line[: 5 * LONGEST_ERROR]))
    return line if len(line) <= LONGEST_ERROR else f"{line[: LONGEST_ERROR - 1]}…"


def _sign(match: re.Match[str]) -> str:
    """Return ``#`` for a word that is a number, an id or an address; other words as they are."""
    word = match[0]
    bare = word.rstrip(".-")
    is_id = any(map(str.isdigit, bare)) or "@" in bare or (len(bare) >= 24 and bare.isalnum())
    return f"#{word[len(bare) :]}" if is_id else word
