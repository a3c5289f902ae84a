"""Tasks: what became of them; and requests that must run only once. Here nothing expires."""

from __future__ import annotations

from django_rmq.core.model.keys import answer_key, result_key
from tests.oracle.keyspace import Memory


def store_result(memory: Memory, task: str, stamp: int, keep_ms: int, job: bytes, record: bytes) -> str:
    with memory.hash(result_key(memory.prefix, task)) as result:
        if int(result.get(b"stamp", b"0")) >= stamp:
            return "stale"
        result |= {b"stamp": b"%d" % stamp, b"job": job, b"record": record}
        return "ok"


def begin_request(memory: Memory, request: str, content: str, token: str, lease_ms: int) -> tuple[str, bytes]:
    with memory.hash(answer_key(memory.prefix, request)) as answer:
        now_ms, known = memory.now_ms(), answer.get(b"print")
        if known is not None and known != content.encode():
            return "other", b""
        if b"kept" in answer:
            return "done", answer[b"kept"]
        if known is not None and now_ms < int(answer.get(b"ends", b"0")) <= now_ms + lease_ms:
            return "running", b""
        ends = b"%d" % (now_ms + lease_ms)
        answer |= {b"print": content.encode(), b"token": token.encode(), b"ends": ends}
        return "new", b""


def store_answer(memory: Memory, request: str, token: str, kept: bytes, keep_ms: int) -> str:
    with memory.hash(answer_key(memory.prefix, request)) as answer:
        if answer.get(b"token") != token.encode():
            return "stale"
        for name in (b"token", b"ends") if kept else (b"print", b"token", b"ends"):
            answer.pop(name, None)
        if kept:
            answer[b"kept"] = kept
        return "ok"
