"""Encode bodies as bytes and decode them: equal bodies become equal bytes, so that their messages merge.

Bytes that another program has stored are decoded without a loss of digits, because people may read, edit and replay them. What
surrounds a body in Redis is the subject of ``envelope``. When two sends are the same message is said in ``producer.identity``.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from secrets import token_hex
from typing import Any
from uuid import UUID

from django_rmq.core.model.bounds import abbreviated
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import InvalidMessage, MessageTooLarge

DEEPEST = 100
"""How many lists and objects of a body may be nested. The limit does not depend on the stack or the version of Python."""


class ExactNumber:
    """A number of a JSON text that Python's own numbers do not give back, such as ``1.50``: it is written as it was read.

    ``float()`` makes the nearest float of it.
    """

    __slots__ = ("token",)

    def __init__(self, token: str) -> None:
        self.token = token

    def __float__(self) -> float:
        return float(self.token)

    def __repr__(self) -> str:
        return self.token

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ExactNumber) and other.token == self.token

    def __hash__(self) -> int:
        return hash(self.token)


class StoredDecimal(Decimal):
    """A number of a stored body that no float has. It is written as a number again; other Decimals become text."""


class _HasNumbers(Exception):
    """The value to encode contains an ``ExactNumber`` or a ``StoredDecimal``."""


_MARK = token_hex(16)
"""Stands before the token of a number while it is encoded as a text. It never leaves the process, so no body contains it."""

_MARKED = re.compile(f'"{_MARK}([^"]*)"')


def _json_default(value: object) -> object:
    if type(value) is ExactNumber or type(value) is StoredDecimal:
        raise _HasNumbers
    if isinstance(value, (datetime, date, time)):
        return value.isoformat()
    if isinstance(value, (UUID, Decimal)):
        return str(value)
    if isinstance(value, timedelta):
        # A negative timedelta has negative days and positive seconds, so its size is written behind a sign.
        sign, size = ("-", -value) if value < timedelta() else ("", value)
        return f"{sign}P{size.days}DT{size.seconds}.{size.microseconds:06d}S"
    if type(value).__module__ == "django.utils.functional":
        return _evaluated(value)
    raise InvalidMessage(
        f"body contains {value!r} of type {type(value).__name__}, which JSON cannot represent"
    )


def _evaluated(value: Any) -> object:
    """Return the value of a lazy object of Django: a lazy translation, or for example ``request.user``."""
    # What Django gives to pickle is the value, or the call that makes it. So the core needs no import of Django.
    make, arguments = value.__reduce__()[:2]
    if hasattr(type(value), "_setup"):
        result = make(*arguments)
    else:
        function, positional, keywords = arguments[:3]
        result = function(*positional, **keywords)
    if isinstance(result, (dict, list, tuple)):
        _check_keys(result)
    return result


def _json_encoder(default: Callable[[object], object]) -> Callable[[object], str]:
    """Return the configured ``json`` encoder, made once; a ``JSONEncoder`` makes it again for each body."""
    encoder = json.JSONEncoder(
        sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=default
    )
    make = json.encoder.c_make_encoder  # type: ignore[attr-defined]
    if make is None:
        # Another implementation of Python has no encoder in C.
        return encoder.encode
    # Cycles are not looked for: encoding one ends with RecursionError.
    escaped = json.encoder.encode_basestring
    chunks: Callable[[object, int], tuple[str, ...]] = make(
        None, encoder.default, escaped, None, ":", ",", True, False, False
    )
    return lambda body: "".join(chunks(body, 0))


def _marked(value: object) -> object:
    return (
        f"{_MARK}{value}"
        if type(value) is ExactNumber or type(value) is StoredDecimal
        else _json_default(value)
    )


_encode_plain, _encode_marked = _json_encoder(_json_default), _json_encoder(_marked)


def _encode_json(body: object) -> bytes:
    """Return the JSON of ``body``; raises ``InvalidMessage`` if it is nested too deeply."""
    try:
        raw = _encode_plain(body).encode()
    except _HasNumbers:
        raw = _MARKED.sub(r"\1", _encode_marked(body)).encode()
    # Each level has two brackets, so most bodies are too short to be looked at.
    if len(raw) > 2 * DEEPEST and raw.count(b"[") + raw.count(b"{") > DEEPEST and is_deeper(body, DEEPEST):
        raise InvalidMessage(
            f"body is nested too deeply: at most {DEEPEST} lists and objects within one another"
        )
    return raw


def dumps(value: object, **options: Any) -> str:
    """Return ``value`` as ``json.dumps`` does with these options, and each ``ExactNumber`` in it as it was read."""
    try:
        return json.dumps(value, default=_json_default, **options)
    except _HasNumbers:
        return _MARKED.sub(r"\1", json.dumps(value, default=_marked, **options))


def dumps_beginning(value: object, length: int, **options: Any) -> tuple[str, bool]:
    """Return the beginning of what ``dumps`` returns, at least ``length`` characters of it, and whether that is all.

    No more is made: with an indent, lists within lists take up to a hundred times as many characters as their JSON has.
    """
    try:
        return beginning(json.JSONEncoder(default=_json_default, **options).iterencode(value), length)
    except _HasNumbers:
        pieces = json.JSONEncoder(default=_marked, **options).iterencode(value)
        return beginning((_MARKED.sub(r"\1", piece) for piece in pieces), length)


def beginning(pieces: Iterable[str], length: int) -> tuple[str, bool]:
    """Join pieces until there are more than ``length`` characters; return the text, and whether these were all."""
    joined, left = [], length
    for piece in pieces:
        joined.append(piece)
        left -= len(piece)
        if left < 0:
            return "".join(joined), False
    return "".join(joined), True


# ``json`` writes a key such as 1 as a text, so 1 and "1" would be the same key twice.
def _check_keys(value: dict[object, object] | list[object] | tuple[object, ...]) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if type(key) is not str and not isinstance(key, str):
                raise InvalidMessage(
                    f"body has the key {key!r} of type {type(key).__name__}; JSON keys must be str"
                )
            if isinstance(item, (dict, list, tuple)):
                _check_keys(item)
    else:
        for item in value:
            if isinstance(item, (dict, list, tuple)):
                _check_keys(item)


def is_deeper(value: object, levels: int) -> bool:
    """Return whether more than ``levels`` lists and objects stand within one another in ``value``."""
    if not isinstance(value, (dict, list, tuple)):
        return False
    if not levels:
        return True
    return any(is_deeper(item, levels - 1) for item in (value.values() if isinstance(value, dict) else value))


def encode_json(body: object) -> bytes:
    """Return the canonical JSON of ``body``: sorted keys, no spaces, UTF-8, so that equal bodies merge.

    Dates, times, durations, UUIDs and Decimals become text, lazy objects of Django become their values, and an ``ExactNumber``
    is written as it was read. NaN, infinities, lone surrogates, cycles, more than ``DEEPEST`` levels and keys that are not text
    raise ``InvalidMessage``.
    """
    try:
        if isinstance(body, (dict, list, tuple)):
            _check_keys(body)
        return _encode_json(body)
    except UnicodeEncodeError as error:
        raise InvalidMessage(f"body contains text that is not valid Unicode: {error.reason}") from None
    except ValueError as error:
        # NaN, infinity and integers with too many digits raise the same class. Only the text differs.
        reason = "NaN or infinity" if "range" in str(error) or "compliant" in str(error) else str(error)
        raise InvalidMessage(f"body contains {reason}, which JSON cannot represent") from None
    except RecursionError:
        raise InvalidMessage(
            f"body contains itself, or has more than {DEEPEST} lists and objects within one another"
        ) from None
    except TypeError as error:
        raise InvalidMessage(f"body cannot be written as JSON: {error}") from None


def encode_decoded(body: object) -> bytes:
    """Return the canonical JSON of a body that was JSON, so that its keys are texts; otherwise like `encode_json`."""
    try:
        return _encode_json(body)
    except (ValueError, RecursionError):
        return encode_json(body)


def encode_body(topic: Topic, body: object) -> bytes:
    """Return ``body`` as the bytes that ``topic`` stores, or raise ``InvalidMessage``/``MessageTooLarge``.

    On a topic with a type it may be an instance, or plain data that fits.
    """
    if topic.body == "json":
        raw = encode_json(body if topic.typed is None else topic.typed.plain(body))
    elif topic.body == "text":
        if not isinstance(body, str):
            raise InvalidMessage(
                f"topic {topic.name} has BODY 'text': body must be str, got {abbreviated(body)}"
            )
        try:
            raw = body.encode()
        except UnicodeEncodeError as error:
            raise InvalidMessage(f"body contains text that is not valid Unicode: {error.reason}") from None
    else:
        if not isinstance(body, (bytes, bytearray, memoryview)):
            raise InvalidMessage(
                f"topic {topic.name} has BODY 'bytes': body must be bytes, got {abbreviated(body)}"
            )
        raw = bytes(body)
    if not raw:
        raise InvalidMessage(f"body is empty; topic {topic.name} has BODY {topic.body!r}")
    check_size(topic, len(raw))
    return raw


def check_size(topic: Topic, size: int) -> None:
    """Raise ``MessageTooLarge`` if a body of ``size`` bytes exceeds the topic's MAX_BODY."""
    if size > topic.max_body:
        raise MessageTooLarge(f"body has {size} bytes; topic {topic.name} allows MAX_BODY = {topic.max_body}")


_scan_json: Callable[[str, int], tuple[object, int]] = json.JSONDecoder().scan_once  # type: ignore[attr-defined]


def decode_body(topic: Topic, raw: bytes) -> Any:
    """Return the body as plain data, also on topics with a type. Raises ``ValueError`` for bytes that do not match BODY."""
    if topic.body == "json":
        return decode_json(raw.decode())
    if topic.body == "text":
        return raw.decode()
    return raw


def exact_body(topic: Topic, raw: bytes) -> object:
    """Return the body like ``decode_body``, but with each number as it is stored.

    If another program has stored an object with a key twice, the last value counts, as it does for listeners.
    """
    return _decode_stored(raw.decode()) if topic.body == "json" else decode_body(topic, raw)


def decode_json(text: str) -> object:
    """Return the value of a JSON text. Raises ``ValueError`` for any other text.

    One scan reads a text without space around it, as `encode_json` writes it; ``json.loads`` would prepare more.
    """
    try:
        body, end = _scan_json(text, 0)
    except StopIteration:
        # The scanner ends so at a text without a value; ``json.loads`` raises ``ValueError``.
        return json.loads(text)
    return body if end == len(text) else json.loads(text)


def exact_number(token: str) -> float | ExactNumber:
    """Return the number ``token`` of a JSON text: as a float if Python writes that float so, otherwise as an ``ExactNumber``.

    Raises ``ValueError`` for a number that is too large for a float, because no listener in Python could read it.
    """
    value = float(token)
    if math.isinf(value):
        raise ValueError(f"the number {token[:40]} is out of range")
    return value if repr(value) == token else ExactNumber(token)


def unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return an object of these keys and values. Raises ``ValueError`` if a key occurs twice."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        (key, _), *_ = counts.most_common(1)
        raise ValueError(f"an object has the key {abbreviated(key)} twice")
    return fields


def stored_number(token: str) -> float | StoredDecimal:
    """Return a number of a stored body: as a float if that has exactly its value, otherwise as a ``StoredDecimal``."""
    # ``Decimal(value)`` has all digits of the binary number, which equal hardly any decimal one: 0.1 would not count
    # as a float.
    value, exact = float(token), StoredDecimal(token)
    return value if Decimal(repr(value)) == exact else exact


_decode_stored = json.JSONDecoder(parse_float=exact_number).decode
_decode_exactly = json.JSONDecoder(parse_float=exact_number, object_pairs_hook=unique_keys).decode


def exact_json(text: str | bytes) -> object:
    """Return the value of a JSON text, so that ``encode_json`` writes each of its numbers as it was.

    Raises ``ValueError`` for any other text, and for an object that has a key twice.
    """
    # ``json.loads`` detects the encoding of bytes, and has an error of its own for a byte order mark.
    if isinstance(text, bytes) or text.startswith("\ufeff"):
        return json.loads(text, parse_float=exact_number, object_pairs_hook=unique_keys)
    return _decode_exactly(text)


def floats_beside_bodies(value: object) -> object:
    """Return what ``exact_json`` has read, with floats for all numbers that are in no ``body``."""
    if isinstance(value, ExactNumber):
        return float(value)
    if isinstance(value, list):
        return [floats_beside_bodies(item) for item in value]
    if isinstance(value, dict):
        return {key: item if key == "body" else floats_beside_bodies(item) for key, item in value.items()}
    return value
