"""Text that only this deployment can read or make, such as sealed ids and cursors.

Its keys are derived from SECRET_KEY, as in ``django.core.signing``, and text that was sealed with a key in
``SECRET_KEY_FALLBACKS`` stays valid. The same text sealed for the same purpose and context gives the same result, so a
sealed id names the same message in a log, in an event and in the admin.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Iterator
from functools import lru_cache

from django.core.signing import Signer
from django.utils.crypto import salted_hmac
from django.utils.http import urlsafe_base64_decode, urlsafe_base64_encode

LONGEST_PLAIN = 512
"""Maximum size in bytes of a message that a plain id contains; the id of a longer one is always sealed."""

_MARK_BYTES = 16
_BLOCK_BYTES = 64


def seal(purpose: str, context: bytes, text: bytes) -> str:
    """Return ``text`` encrypted and signed, as URL-safe characters; reading it requires the same ``context``."""
    mark_key, stream_key = _keys(Signer().key, purpose)
    mark = _mark(mark_key, context, text)
    return urlsafe_base64_encode(mark + _masked(stream_key, mark, text))


def unseal(purpose: str, context: bytes, sealed: str) -> bytes | None:
    """Return the text given to ``seal``, or None if this deployment did not seal it for this purpose and context.

    Only the characters that ``seal`` returned are accepted, not others that base64 decodes to the same bytes.
    """
    raw = from_base64url(sealed)
    if raw is None:
        return None
    mark, masked = raw[:_MARK_BYTES], raw[_MARK_BYTES:]
    signer = Signer()
    for secret in (signer.key, *signer.fallback_keys):
        mark_key, stream_key = _keys(secret, purpose)
        text = _masked(stream_key, mark, masked)
        # The comparison takes the same time for every wrong mark, so a mark cannot be guessed byte by byte.
        if hmac.compare_digest(mark, _mark(mark_key, context, text)):
            return text
    return None


def from_base64url(text: str) -> bytes | None:
    """Return the bytes whose form in base64url, without padding, is exactly ``text``, or None if there are none."""
    try:
        raw = urlsafe_base64_decode(text)
    except ValueError:
        return None
    return raw if urlsafe_base64_encode(raw) == text else None


def digest(member: bytes) -> bytes:
    """Return the SHA-1 of a member, a digest that a script can compute too. It is never shown unsealed."""
    return hashlib.sha1(member, usedforsecurity=False).digest()


def sealed_id(topic: str, slot: int, member: bytes) -> str:
    """Return an id that contains nothing of the message: for logs, and for people who may not read the message.

    It is ``<slot>~<sealed digest>``. Without the secret key, a guess of the message cannot be checked against
    it.
    """
    return f"{slot}~{seal('id', topic.encode(), digest(member))}"


def unsealed_digest(topic: str, sealed: str) -> bytes | None:
    """Return the digest in a sealed id, from the text after its tilde, or None if it is not an id of this topic."""
    return unseal("id", topic.encode(), sealed)


@lru_cache(maxsize=32)
def _keys(secret: str | bytes, purpose: str) -> tuple[bytes, bytes]:
    """Return the signing key and the stream key that one secret gives for one purpose."""
    salt = f"django_rmq.sealing.{purpose}"
    mark, stream = (
        salted_hmac(salt, use, secret=secret, algorithm="sha256").digest() for use in ("mark", "stream")
    )
    return mark, stream


def _mark(key: bytes, context: bytes, text: bytes) -> bytes:
    # Without its length, another split of the same bytes into context and text would have the same mark.
    return hmac.digest(key, len(context).to_bytes(4) + context + text, "sha256")[:_MARK_BYTES]


def _masked(key: bytes, mark: bytes, text: bytes) -> bytes:
    """Encrypt or decrypt. The mark is unique to context and text, so no stream is ever used for two texts."""
    stream = b"".join(_blocks(key, mark, len(text)))
    return bytes(a ^ b for a, b in zip(text, stream, strict=False))


def _blocks(key: bytes, mark: bytes, length: int) -> Iterator[bytes]:
    for number in range(math.ceil(length / _BLOCK_BYTES)):
        yield hashlib.blake2b(mark + number.to_bytes(8), key=key).digest()
