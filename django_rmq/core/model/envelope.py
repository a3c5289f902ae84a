"""The envelope of a message: its body, headers, limits and origin, and how they are stored as bytes.

Scripts read the first bytes of an envelope, so its form is part of the protocol. Members that hold their own envelope, and the
values that are derived from a stored message (its key, body, slot basis and origin), are here as well. Which member a send has is
decided by ``core.producer.identity``.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple
from uuid import UUID

from django_rmq.core.model.body_codec import ExactNumber, decode_body, encode_json
from django_rmq.core.model.bounds import OTHER_FORM, abbreviated
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import InvalidMessage

MARK = b"\xff"
"""How a drawn member begins. A key is UTF-8, so none begins like this."""
WIDTH = 16
"""The bytes of a drawn member, behind which there may be an envelope."""


def is_drawn(topic: Topic, member: bytes) -> bool:
    """Return whether the member was drawn for a send without a key, so that no other send has the same member."""
    return topic.is_fifo and member.startswith(MARK)


def key_of(topic: Topic, member: bytes) -> str | None:
    """Return the key of a message, or None if it has none."""
    if not topic.keyed or is_drawn(topic, member):
        return None
    return member.decode("utf-8", "replace")


_PLAIN = b"0 {}\n"
"""The head of most envelopes."""
_FIRST = MARK[0]
"""The first byte of a drawn member."""
_BODY = WIDTH + len(_PLAIN)
"""Where the body begins in most drawn members."""
LARGEST_HELD = 1024
"""The bytes of the largest envelope in a member: scripts copy members more often than envelopes."""


def envelope_of(topic: Topic, member: bytes, stored: bytes | None) -> bytes | None:
    """Return the envelope of a message: the ``stored`` one, or else the one that its member holds. None if it has neither."""
    if stored is None and is_drawn(topic, member) and member.startswith(b"0 {", WIDTH):
        return member[WIDTH:]
    return stored if topic.keyed else None


def content_of(topic: Topic, member: bytes, stored: bytes | None) -> Envelope:
    """Return the content of a message. Without an envelope the member is the body."""
    envelope = envelope_of(topic, member, stored)
    return Envelope(member) if envelope is None else decode_envelope(envelope)


def raw_body(topic: Topic, member: bytes, stored: bytes | None) -> bytes:
    """Return the body of ``content_of``, in less time."""
    if stored is None:
        if not topic.is_fifo:
            return member
        if member[WIDTH:_BODY] == _PLAIN and member[0] == _FIRST:
            return member[_BODY:]
    envelope = envelope_of(topic, member, stored)
    return member if envelope is None else body_of(envelope)


def stored_basis(topic: Topic, member: bytes, stored: bytes | None) -> bytes | None:
    """Return the slot basis of a stored message, or None if it cannot be computed again."""
    content = content_of(topic, member, stored)
    try:
        if content.slot_basis is not None:
            return content.slot_basis.encode()
        if topic.slot_basis is None or key_of(topic, member) is not None:
            return member
        return basis_bytes(decode_body(topic, content.body)[topic.slot_basis])
    except (*OTHER_FORM, InvalidMessage):
        # Another program has stored a body without the field, one that does not match BODY, or a basis that is no text.
        return None


def future_expiry(expires_ms: int, now_ms: int) -> int:
    """Return the expiry of a message that is sent again: without one (0) if it has passed, or it would die at once."""
    return expires_ms if expires_ms > now_ms else 0


class Envelope(NamedTuple):
    """The content of ``body_{K}`` for one keyed message."""

    body: bytes
    expires_ms: int = 0
    """The instant (ms) after which the message is not delivered; 0 if it never expires."""
    slot_basis: str | None = None
    headers: dict[str, str] | None = None
    origin: str | None = None
    """What identifies the send (topics with ORIGIN). All copies of the message keep it."""
    bodies: tuple[bytes, ...] | None = None
    """All bodies, in the order of sending (topics with ACCUMULATE); ``body`` is the last one. None if there is only one."""
    max_retries: int | None = None
    """How often the message may be tried again, at most as often as its topic allows. None if the topic's number applies."""
    timeout: int | None = None
    """Seconds until a delivery of the message times out, at most those of its topic. None if the topic's TIMEOUT applies."""


_LIMITS = re.compile(r"(\d*) (\d*)")


def encode_envelope(envelope: Envelope) -> bytes:
    """Return ``expires_ms SP meta-JSON LF body``. Scripts read only the leading number, and the limits.

    The limits are the first entry of the meta: ``!`` comes before the name of any other.

    With ``bodies`` the number has an additional leading 0, and behind the LF is what `collected` returns.
    """
    meta = _meta(envelope)
    if envelope.bodies is not None:
        return b"0%d %s\n%s" % (envelope.expires_ms, meta, collected(envelope.bodies))
    return b"%d %s\n%s" % (envelope.expires_ms, meta, envelope.body)


def _meta(envelope: Envelope) -> bytes:
    _, _, basis, headers, origin, _, max_retries, timeout = envelope
    if not headers and origin is None and max_retries is None and timeout is None:
        # Most messages have at most a basis. This takes a third of the time.
        return b"{}" if basis is None else b'{"basis":%s}' % encode_json(basis)
    meta: dict[str, object] = {}
    if basis is not None:
        meta["basis"] = basis
    if headers:
        meta["headers"] = headers
    if origin is not None:
        meta["origin"] = origin
    if max_retries is not None or timeout is not None:
        meta["!"] = f"{_text(max_retries)} {_text(timeout)}"
    return encode_json(meta)


def _text(limit: int | None) -> str:
    return "" if limit is None else str(limit)


def _limits(text: object) -> tuple[int | None, int | None]:
    match = _LIMITS.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        return None, None
    return int(match[1]) if match[1] else None, int(match[2]) if match[2] else None


def collected(bodies: Sequence[bytes]) -> bytes:
    """Return the number of bodies in nine digits, a space, and the length of each, a colon and the body."""
    return b"%09d " % len(bodies) + b"".join(b"%d:%s" % (len(body), body) for body in bodies)


def _uncollected(raw: bytes) -> tuple[bytes, ...]:
    """Return the bodies of `collected`. Raises ``ValueError`` for anything else."""
    parts, at = [], 10
    while at < len(raw):
        colon = raw.index(b":", at, at + 11)
        # ``int`` also takes a sign, with which this loop would go back and never end.
        if not raw[at:colon].isdigit():
            raise ValueError("the length of a body is not a number")
        at = colon + 1 + int(raw[at:colon])
        parts.append(raw[colon + 1 : at])
    if not parts or at != len(raw) or int(raw[:9]) != len(parts):
        raise ValueError("the bodies do not have the length that they say")
    return tuple(parts)


def decode_envelope(raw: bytes) -> Envelope:
    """Return the parts of ``raw``. A value that is not an envelope is treated as a body, so that nothing is lost."""
    head, newline, body = raw.partition(b"\n")
    if not newline:
        return Envelope(raw)
    try:
        expires, collects, meta = _head(head)
        headers, origin = meta.get("headers"), meta.get("origin")
        bodies = _uncollected(body) if collects else None
        return Envelope(
            bodies[-1] if bodies else body,
            expires,
            meta.get("basis"),
            # ``_head`` is cached, so messages share its result, and a listener may change its headers.
            headers.copy() if headers else headers,
            origin if isinstance(origin, str) and origin else None,
            bodies,
            *(_limits(meta["!"]) if "!" in meta else ()),
        )
    except OTHER_FORM:
        return Envelope(raw)


def body_of(raw: bytes) -> bytes:
    """Return the body of ``decode_envelope``, in less time."""
    head, newline, body = raw.partition(b"\n")
    return body if newline and _is_plain(head) else decode_envelope(raw).body


@lru_cache(1024)
def _is_plain(head: bytes) -> bool:
    """Return whether what follows ``head`` is one body."""
    # If the head is that of no envelope, or of several bodies, all of it counts as the body.
    return not decode_envelope(head + b"\n").body


@lru_cache(1024)
def _head(head: bytes) -> tuple[int, bool, dict[str, Any]]:
    """Return when the message expires, whether it collects bodies, and its meta. Raises ``ValueError`` for anything else.

    The results are cached, because the messages of an entity often have the same head.
    """
    expires, space, text = head.partition(b" ")
    if not (space and expires.isdigit()):
        raise ValueError("not the head of an envelope")
    return int(expires), expires.startswith(b"0") and len(expires) > 1, json.loads(text)


def new_origin() -> str:
    """Return the origin of a new send: a UUID of version 7 in 32 hexadecimal digits.

    It begins with the time, so rows with the origins of successive sends are close together in an index.
    """
    return _uuid7(time.time_ns() // 1_000_000, os.urandom(10))


def derived_origin(instant: int, text: str) -> str:
    """Return the origin of a message that is the same whenever it is sent, as ``text`` names it.

    It has the form of ``new_origin``, but begins with ``instant`` (ms), and has a hash of ``text`` in place of random bits.
    """
    return _uuid7(instant, blake2b(text.encode(), digest_size=10).digest())


def _uuid7(ms: int, tail: bytes) -> str:
    number = ms << 80 | int.from_bytes(tail)
    return f"{number & ~(0xF << 76 | 0x3 << 62) | 0x7 << 76 | 0x2 << 62:032x}"


def uuid_of(raw: bytes) -> UUID:
    """Return a hash of ``raw`` as a UUID of version 8, with 121 bits of it.

    MariaDB refuses 16 bytes that are not a UUID, and of version 8 also those whose ninth byte is 0x80.
    """
    drawn = int.from_bytes(blake2b(raw, digest_size=16).digest())
    return UUID(int=drawn & ~(0xF << 76 | 0x7 << 61) | 0x8 << 76 | 0x5 << 61)


def basis_bytes(value: object) -> bytes:
    """Return the bytes of a slot basis: text as UTF-8, bytes as they are, anything else as canonical JSON.

    A value that JSON carries as text (a UUID, a date) counts as that text. So the slot computed from the
    value equals the slot computed later from the stored body.
    """
    if isinstance(value, bytes):
        return value
    # A bool is an int as well, and is a word in JSON.
    if type(value) is int and value.bit_length() < 64:
        return b"%d" % value
    try:
        if isinstance(value, str):
            return value.encode()
        # A listener reads the number as a float, and the slot is computed again from the body that a listener reads.
        raw = encode_json(float(value) if isinstance(value, ExactNumber) else value)
    except UnicodeEncodeError:
        raise InvalidMessage(f"slot_basis {abbreviated(value)} is not valid Unicode") from None
    return str(json.loads(raw)).encode() if raw.startswith(b'"') else raw
