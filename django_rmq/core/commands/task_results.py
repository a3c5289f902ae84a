"""Calls about tasks: what became of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from django_rmq.core.commands.codecs import word
from django_rmq.core.commands.script_call import Call, RedisCommand
from django_rmq.core.commands.script_keys import Named
from django_rmq.core.model.keys import result_key


class Kept(NamedTuple):
    """What is known of a task."""

    stamp: int
    job: bytes
    record: bytes


def _kept(reply: Sequence[Any]) -> Kept | None:
    stamp, job, record = reply
    return None if stamp is None or job is None or record is None else Kept(int(stamp), job, record)


def keep_result(task: str, stamp: int, keep_ms: int, job: bytes, record: bytes) -> Call[str]:
    """Keep what is known of ``task`` (letters and digits): its ``job``, and the ``record`` of its attempts.

    Answers ok, or stale if the stamp is not above the known one.
    """
    own = (stamp, keep_ms, job, record)
    return Call("results/keep", Named(result_key, task), own, word)


def result(task: str) -> Call[Kept | None]:
    """Return what is known of ``task``. None: nothing."""
    return RedisCommand("HMGET", Named(result_key, task), ("stamp", "job", "record"), _kept)


__all__ = ["Kept", "keep_result", "result"]
