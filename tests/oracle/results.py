"""Tasks: what became of them. Here nothing expires."""

from __future__ import annotations

from django_rmq.core.model.keys import result_key
from tests.oracle.keyspace import Memory


def store_result(memory: Memory, task: str, stamp: int, keep_ms: int, job: bytes, record: bytes) -> str:
    with memory.hash(result_key(memory.prefix, task)) as result:
        if int(result.get(b"stamp", b"0")) >= stamp:
            return "stale"
        result |= {b"stamp": b"%d" % stamp, b"job": job, b"record": record}
        return "ok"
