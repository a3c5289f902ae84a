"""Bodies for a fifo topic in bulk: each becomes a message of its own, with a generated key and an envelope."""

from __future__ import annotations

import os
from collections.abc import Sequence

from django_rmq.core.producer.checks import check_stored_basis
from django_rmq.core.words.envelopes import Envelope, encode_envelope
from django_rmq.core.words.topics import Topic


def lined_up(
    topic: Topic, raws: Sequence[bytes], bases: Sequence[bytes]
) -> tuple[list[bytes], Sequence[bytes], list[bytes]]:
    """Return the generated key, the slot basis and the envelope of each of ``raws``.

    ``bases`` are those of the SLOT_BASIS of ``topic``. Without one, the messages of a strict topic stand in one line.
    """
    drawn = os.urandom(16 * len(raws)).hex().encode()
    keys = [drawn[at : at + 32] for at in range(0, len(drawn), 32)]
    if topic.slot_basis is None and not topic.is_strict:
        return keys, keys, enveloped(raws)
    if topic.slot_basis is None:
        bases = [topic.name.encode()] * len(raws)
    return keys, bases, enveloped(raws, bases)


def enveloped(raws: Sequence[bytes], bases: Sequence[bytes] | None = None) -> list[bytes]:
    """Return the envelopes of messages without options, with their slot bases if these are given.

    Raises ``InvalidMessage`` for a basis that a keyed message cannot have.
    """
    if bases is None:
        head = encode_envelope(Envelope(b""))
        return [head + raw for raw in raws]
    heads = {
        basis: encode_envelope(Envelope(b"", slot_basis=check_stored_basis(basis))) for basis in set(bases)
    }
    return [heads[basis] + raw for basis, raw in zip(bases, raws, strict=True)]
