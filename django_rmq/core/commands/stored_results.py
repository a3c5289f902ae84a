"""Calls about two results that are kept for a while: the answer to a request that runs only once, and the state of a task.

``operations.sends`` decides which requests run once, ``tasks.execution`` when the state of a task is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from django_rmq.core.commands.script_call import Call, Named, RedisCommand, Reply, word
from django_rmq.core.model.keys import answer_key, result_key


def _begun(reply: list[bytes]) -> tuple[str, bytes]:
    return reply[0].decode(), reply[1] if len(reply) > 1 else b""


def begin_request(request: str, content: str, token: str, lease_ms: int) -> Call[tuple[str, bytes]]:
    """Begin ``request`` (letters and digits) as attempt ``token``; ``content`` is a hash of the request's content.

    Answers new, running or other without a result, or done with the stored result.
    """
    return Call(
        "stored_results/begin_request",
        Named(answer_key, request),
        (content, token, lease_ms),
        _begun,
    )


def store_answer(request: str, token: str, kept: bytes, keep_ms: int) -> Call[str]:
    """Store the result of a request; an empty result forgets that the request was begun. Answers ok or stale."""
    return Call("stored_results/store_answer", Named(answer_key, request), (token, kept, keep_ms), word)


class Kept(NamedTuple):
    """The stored state of a task: its job, and the record of its attempts."""

    stamp: int
    job: bytes
    record: bytes


def _kept(reply: Sequence[Reply]) -> Kept | None:
    stamp, job, record = reply
    return None if stamp is None or job is None or record is None else Kept(int(stamp), job, record)


def store_result(task: str, stamp: int, keep_ms: int, job: bytes, record: bytes) -> Call[str]:
    """Store the state of ``task`` (letters and digits): its ``job``, and the ``record`` of its attempts.

    Answers ok, or stale if the stamp is not above the known one.
    """
    own = (stamp, keep_ms, job, record)
    return Call("stored_results/store_result", Named(result_key, task), own, word)


def result(task: str) -> Call[Kept | None]:
    """Return the stored state of ``task``, or None if there is none."""
    return RedisCommand("HMGET", Named(result_key, task), ("stamp", "job", "record"), _kept)
