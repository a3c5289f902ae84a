"""Receipts: each stands for one delivery of one slot, and cannot be guessed."""

from __future__ import annotations

from django.core.signing import BadSignature, Signer

from django_rmq.exceptions import InvalidRequest

_SIGNER_SALT = "django_rmq.operations.consumption"


def sealed(topic: str, slot: int, receipt: int) -> str:
    """Return the receipt of a delivery."""
    return f"{receipt}.{Signer(salt=_SIGNER_SALT).signature(_signed(topic, slot, receipt))}"


def unsealed(topic: str, slot: int, text: str) -> int | None:
    """Return the number in a receipt.

    None: it is not of this slot. Raises ``InvalidRequest`` for text that is not a receipt.

    A receipt that was signed with a key of SECRET_KEY_FALLBACKS is valid.
    """
    number, dot, mark = text.partition(".")
    if not (dot and number.isdecimal() and number.isascii() and len(number) <= 16):
        raise InvalidRequest(f"{text[:60]!r} is not a receipt")
    try:
        Signer(salt=_SIGNER_SALT).unsign(f"{_signed(topic, slot, int(number))}:{mark}")
    except BadSignature:
        return None
    return int(number)


def _signed(topic: str, slot: int, receipt: int) -> str:
    return f"{topic} {slot} {receipt}"


__all__ = ["sealed", "unsealed"]
