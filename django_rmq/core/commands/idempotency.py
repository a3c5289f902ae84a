"""Calls for requests that must run only once, and for their stored results."""

from __future__ import annotations

from django_rmq.core.commands.codecs import word
from django_rmq.core.commands.script_call import Call
from django_rmq.core.commands.script_keys import Named
from django_rmq.core.model.keys import answer_key


def _begun(reply: list[bytes]) -> tuple[str, bytes]:
    return reply[0].decode(), reply[1] if len(reply) > 1 else b""


def begin_answer(request: str, content: str, token: str, lease_ms: int) -> Call[tuple[str, bytes]]:
    """Begin ``request`` (letters and digits) as attempt ``token``; ``content`` is a hash of what is requested.

    Answers new, running or other without a result, or done with the stored result.
    """
    return Call(
        "answers/begin",
        Named(answer_key, request),
        (content, token, lease_ms),
        _begun,
    )


def keep_answer(request: str, token: str, kept: bytes, keep_ms: int) -> Call[str]:
    """Store the result of a request; an empty result forgets that the request was begun. Answers ok or stale."""
    return Call("answers/keep", Named(answer_key, request), (token, kept, keep_ms), word)
