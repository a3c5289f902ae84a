"""Calls about what workers report, what they are asked for, and the versions of the code that they have reported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from django_rmq.core.commands.script_call import Call, RedisCommand, Reply, Single, pairs, text
from django_rmq.core.model.keys import code_versions_key, reports_key, stacks_key, worker_requests_key
from django_rmq.core.model.worker_report import (
    CodeVersion,
    Stack,
    StackRequest,
    WorkerReport,
    decode,
    decode_code_version,
    decode_stack_requests,
    decode_stacks,
    encode_stacks,
)

_REPORTS = Single(reports_key)


def _reports(reply: Reply) -> dict[str, WorkerReport]:
    reports = ((worker.decode("utf-8", "replace"), decode(text)) for worker, text in pairs(reply))
    return {worker: report for worker, report in reports if report is not None}


def write_report(worker: str, report: WorkerReport) -> Call[int]:
    """Keep the report of a worker in place of its last one."""
    return RedisCommand("HSET", _REPORTS, (worker, report.encode()), int)


def read_reports() -> Call[dict[str, WorkerReport]]:
    """Return the reports of all workers, also of those that vanished."""
    return RedisCommand("HGETALL", _REPORTS, (), _reports)


def delete_reports(*workers: str) -> Call[int]:
    """Forget the reports of these workers."""
    return RedisCommand("HDEL", _REPORTS, workers, int)


_CODE_VERSIONS = Single(code_versions_key)


def _code_versions(reply: Reply) -> list[CodeVersion]:
    versions = (decode_code_version(name.decode("utf-8", "replace"), text) for name, text in pairs(reply))
    return [version for version in versions if version is not None]


def write_code_version(version: CodeVersion) -> Call[int]:
    """Keep since when and until when workers have reported a version."""
    return RedisCommand("HSET", _CODE_VERSIONS, (version.name, f"{version.since_ms} {version.seen_ms}"), int)


def read_code_versions() -> Call[list[CodeVersion]]:
    """Return the versions that workers have reported."""
    return RedisCommand("HGETALL", _CODE_VERSIONS, (), _code_versions)


def delete_code_versions(names: Sequence[str]) -> Call[int]:
    """Forget these versions."""
    return RedisCommand("HDEL", _CODE_VERSIONS, tuple(names), int)


_REQUESTS = Single(worker_requests_key)


class WorkerRequests(NamedTuple):
    """The last requests to a worker; each is empty if there is none."""

    request: str
    """To be quiet, to resume or to stop."""
    stacks: str
    """For the stacks of some messages."""


def _stacks_field(worker: str) -> str:
    # Workers of versions without stacks read only the field that has their id.
    return f"{worker} stacks"


def _requests(reply: Sequence[Reply]) -> WorkerRequests:
    return WorkerRequests(*(text(value or b"") for value in reply))


_STACKS = Single(stacks_key)


def ask_worker(worker: str, request: str) -> Call[int]:
    """Keep a request in place of the last one to this worker."""
    return RedisCommand("HSET", _REQUESTS, (worker, request), int)


def end_requests(after_ms: int) -> Call[int]:
    """Let Redis forget all requests to workers ``after_ms`` from now."""
    # The whole hash expires, because a single field cannot before Redis 7.4.
    return RedisCommand("PEXPIRE", _REQUESTS, (after_ms,), int)


def read_requests(worker: str) -> Call[WorkerRequests]:
    """Return the last requests to this worker."""
    return RedisCommand("HMGET", _REQUESTS, (worker, _stacks_field(worker)), _requests)


def ask_for_stacks(worker: str, request: str) -> Call[int]:
    """Keep a request for stacks in place of the last one to this worker."""
    return RedisCommand("HSET", _REQUESTS, (_stacks_field(worker), request), int)


def _stack_requests(reply: Sequence[Reply]) -> list[list[StackRequest]]:
    return [decode_stack_requests(value or b"") for value in reply]


def read_stack_requests(workers: Sequence[str]) -> Call[list[list[StackRequest]]]:
    """Return the stacks that each of these workers was asked for."""
    return RedisCommand("HMGET", _REQUESTS, tuple(map(_stacks_field, workers)), _stack_requests)


def write_stacks(worker: str, stacks: Sequence[Stack]) -> Call[int]:
    """Keep the stacks of a worker in place of its last ones."""
    return RedisCommand("HSET", _STACKS, (worker, encode_stacks(stacks)), int)


def end_stacks(after_ms: int) -> Call[int]:
    """Let Redis forget all stacks ``after_ms`` from now."""
    return RedisCommand("PEXPIRE", _STACKS, (after_ms,), int)


def _stacks(reply: Sequence[Reply]) -> list[list[Stack]]:
    return [decode_stacks(value or b"") for value in reply]


def read_stacks(workers: Sequence[str]) -> Call[list[list[Stack]]]:
    """Return the last stacks of each of these workers."""
    return RedisCommand("HMGET", _STACKS, tuple(workers), _stacks)
