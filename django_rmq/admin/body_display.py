"""A body in readable form: JSON with indents, text, or bytes; first through the topic's formatter.

A copy has no body if its reader may not see any, which ``operations.authorization`` decides. The formatter is called by
``operations.message_view``.
Text from Redis stays plain text here and is escaped by the templates. Characters that would affect a browser
or a terminal (controls, bidirectional marks, invisible ones) are shown by their number.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from django.utils.translation import gettext as _

from django_rmq.core.model.body_codec import beginning, dumps_beginning, exact_body
from django_rmq.core.model.topic import Topic
from django_rmq.operations.authorization import is_redacted
from django_rmq.operations.message_view import format_body, log_failed_formatter

MAX_SHOWN = 65_536
"""Maximum number of characters of a body that a page shows; the rest is in the download."""
MAX_TOKENS = 8_000
"""Maximum number of coloured pieces on a page; a body with more is shown in one colour."""
BYTES_OF_DUMP = 4_096

Record = TypeVar("Record")

_TOKEN = re.compile(
    r'(?P<key>"(?:[^"\\]|\\.)*"(?=:))|(?P<text>"(?:[^"\\]|\\.)*")'
    r"|(?P<number>-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)|(?P<word>true|false|null)|(?P<rest>[^\"\dtfn-]+|.)",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class ShownBody:
    """A body ready to be shown: pieces of text, each with the kind that sets its colour."""

    kind: str
    """json, text, bytes, or withheld (the formatter failed)."""
    pieces: tuple[tuple[str, str], ...]
    is_cut: bool = False
    """Whether the end is left out."""
    formatted: bool = False
    """Whether a formatter made it, so that it may differ from what is stored."""


def show_body(topic: Topic, raw: bytes) -> ShownBody:
    """Return the body ``raw`` for display. Never raises: a formatter that fails withholds the body."""
    if not is_redacted(topic.name):
        return _shown(topic, raw)
    try:
        value = format_body(topic, raw)
        if isinstance(value, bytes):
            return _dump(value, formatted=True)
        if isinstance(value, str):
            return _text("text", value, formatted=True)
        pieces = json.JSONEncoder(ensure_ascii=False, indent=2, default=str).iterencode(value)
        return _json(*beginning(pieces, MAX_SHOWN), formatted=True)
    except Exception as error:  # noqa: BLE001 - whatever a function of the project raises
        log_failed_formatter(topic.name, "body", error)
        return ShownBody("withheld", (("", _("The formatter of this topic failed. See the log.")),))


def summary(topic: Topic, raw: bytes, length: int = 120, key: str | None = None) -> str:
    """Return one line of the body for a list, behind the key of the message if it has one."""
    if is_redacted(topic.name):
        # The rest of a long body does not matter here, but the formatter has to see all of it.
        shown = show_body(topic, raw)
        line = "".join(text for _kind, text in shown.pieces)
        line = re.sub(r"\s*\n\s*", " ", line) if shown.kind == "json" else line.replace("\n", "⏎")
    elif topic.body == "bytes" and not _is_text(raw[: length * 4]):
        line = raw[:length].hex(" ")
    else:
        # ``length`` characters of UTF-8 have at most four times as many bytes, and the body may be far longer.
        line = visible(raw[: length * 4].decode("utf-8", "backslashreplace")).replace("\n", "⏎")
    cut = line if len(line) <= length else f"{line[: length - 1]}…"
    return cut if key is None else f"{visible(key)}  {cut}"


def visible(text: str) -> str:
    """Return ``text`` with every invisible character replaced by its number, except line ends and tabs."""
    return "".join(char if char in "\n\t" or _is_seen(char) else _number(char) for char in text)


def _is_seen(char: str) -> bool:
    return " " <= char <= "~" or unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


def _number(char: str) -> str:
    code = ord(char)
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def readable(record: Record) -> Record:
    """Return a dataclass or a named tuple with every invisible character of its texts replaced by its number."""
    shown: Any = record
    names = getattr(shown, "_fields", None) or [one.name for one in fields(shown)]
    texts = {name: visible(text) for name in names if isinstance(text := getattr(shown, name), str)}
    changed: Record = shown._replace(**texts) if hasattr(shown, "_replace") else replace(shown, **texts)
    return changed


def _is_text(raw: bytes) -> bool:
    """Return whether the bytes can be read as text; the last character may be cut."""
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        # A character of UTF-8 has up to four bytes, so up to three may be left of one that was cut.
        if error.start < len(raw) - 3:
            return False
        text = raw[: error.start].decode()
    return all(char in "\n\r\t" or char.isprintable() for char in text)


def _shown(topic: Topic, raw: bytes) -> ShownBody:
    if topic.body == "json":
        try:
            return _json(*dumps_beginning(exact_body(topic, raw), MAX_SHOWN, ensure_ascii=False, indent=2))
        except (ValueError, RecursionError):
            pass
    if _is_text(raw):
        return _text("text", raw.decode("utf-8", "replace"))
    return _dump(raw)


def _json(text: str, is_whole: bool, *, formatted: bool = False) -> ShownBody:
    shown = _text("json", text, formatted=formatted)
    if not is_whole:
        return shown
    pieces = []
    for piece in _tokens(shown.pieces[0][1]):
        pieces.append(piece)
        if len(pieces) > MAX_TOKENS:
            return shown
    return ShownBody("json", tuple(pieces), formatted=formatted)


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    rest = ""
    for match in _TOKEN.finditer(text):
        kind = match.lastgroup or "rest"
        if kind == "rest":
            rest += match[0]
            continue
        if rest:
            yield "", rest
            rest = ""
        yield kind, match[0]
    if rest:
        yield "", rest


def _text(kind: str, text: str, *, formatted: bool = False) -> ShownBody:
    return ShownBody(kind, (("", visible(text[:MAX_SHOWN])),), len(text) > MAX_SHOWN, formatted)


def _dump(raw: bytes, *, formatted: bool = False) -> ShownBody:
    lines = []
    for start in range(0, min(len(raw), BYTES_OF_DUMP), 16):
        row = raw[start : start + 16]
        seen = "".join(chr(byte) if 0x20 <= byte < 0x7F else "·" for byte in row)
        lines.append(f"{start:06x}  {row[:8].hex(' '):<23}  {row[8:].hex(' '):<23}  {seen}")
    return ShownBody("bytes", (("", "\n".join(lines)),), len(raw) > BYTES_OF_DUMP, formatted)
