"""Calls about everything that Redis holds beside messages.

These are topics, workers and their limits, schedules and their ticks, Spark consumers, requests that run only once, and
results of tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from django_rmq.core.commands.script_call import (
    AtSlot,
    Call,
    Named,
    OfKey,
    OfWorkers,
    RedisCommand,
    Reply,
    Single,
    moved,
    number,
    text,
    word,
)
from django_rmq.core.model.changed_limits import ChangedLimits
from django_rmq.core.model.changed_limits import decode as decode_limits
from django_rmq.core.model.keys import (
    answer_key,
    background_actions_key,
    bucket_key,
    changed_limits_key,
    code_versions_key,
    consumer_key,
    deletions_key,
    limits_key,
    reports_key,
    result_key,
    schedules_key,
    stacks_key,
    topics_key,
    worker_requests_key,
)
from django_rmq.core.model.replies import Allowance, Beat, Driver, Roster, WorkerSession
from django_rmq.core.model.schedule import ScheduleRecord, records
from django_rmq.core.model.stored_actions import (
    FIELDS,
    ActionProgress,
    Deletion,
    decode_actions,
    decode_deletions,
)
from django_rmq.core.model.topic import Topic
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


def _key(prefix: str, _: str) -> bytes:
    return topics_key(prefix)


def _is_ok(reply: bytes) -> bool:
    return reply == b"ok"


def redefine(topic: str, before: bytes, after: str) -> Call[bool]:
    """Write a definition if ``before`` is still the registered one; return whether it was."""
    return Call("topics/redefine", Named(_key, topic), (topic, before, after), _is_ok)


def _allowance(reply: list[Reply]) -> Allowance:
    tokens, wait_us, permits, waiting = reply
    return Allowance(tokens, wait_us, permits, waiting == b"yes")


def allow(
    topic: Topic, worker: str, *, tokens: int, in_use: int, wanted: int, lease_ms: int
) -> Call[Allowance]:
    """Request a share of the MAX_RATE and MAX_IN_FLIGHT of ``topic``, and report how many messages are in flight here.

    ``tokens``: deliveries to begin; a negative number gives tokens back. ``wanted``: messages that could be
    in flight.
    """
    return Call(
        "limits/allow",
        Named(limits_key, topic.name),
        (worker, number(topic.max_rate or 0), tokens, topic.max_in_flight or 0, in_use, wanted, lease_ms),
        _allowance,
    )


def end_permits(topic: Topic, worker: str, ended: int, lease_ms: int = 0) -> Call[int]:
    """Lower the number of messages that ``worker`` has in flight by ``ended``; return the number left.

    ``lease_ms``: how long the remaining permits are kept from now on; 0 leaves the lease as it is.
    """
    return Call("limits/ended", Named(limits_key, topic.name), (worker, ended, lease_ms), int)


def spend(spender: str, each_us: float, size: int, wanted: int) -> Call[int]:
    """Take ``wanted`` tokens, or none, from a bucket of ``size`` that gains one per ``each_us``; below 0 gives them back.

    Returns 0, or the time in microseconds until there are enough. ``spender``: letters and digits.
    """
    return Call("limits/spend", Named(bucket_key, spender), (number(each_us), size, wanted), int)


def _beat(known_members: str, known_number: str) -> Callable[[list[Reply]], Beat]:
    def parse(reply: list[Reply]) -> Beat:
        status = reply[0].decode()
        if status != "ok":
            return Beat(status, rival=reply[1] if len(reply) > 1 else b"")
        members, number = text(reply[1]), text(reply[2])
        workers = {text(worker): record or b"" for worker, record in zip(reply[6], reply[7], strict=True)}
        return Beat(
            status,
            members,
            number,
            int(reply[3]),
            text(reply[4]),
            reply[5] if number != known_number else None,
            workers if members != known_members else None,
        )

    return parse


def _assigned(reply: list[bytes]) -> str | None:
    return reply[1].decode() if reply[0] == b"ok" else None


def _roster(known: Roster) -> Callable[[list[Reply]], Roster]:
    known_records = {one.worker: one.record for one in known.sessions}

    def parse(reply: list[Reply]) -> Roster:
        now, members, number, basis, plan, rows, records = reply
        workers = [text(worker) for worker in rows[::2]]
        if members and text(members) == known.members:
            records = [known_records.get(worker) for worker in workers]
        if number and text(number) == known.number:
            plan = known.plan
        sessions = [
            WorkerSession(worker, float(ends), record or b"")
            for worker, ends, record in zip(workers, rows[1::2], records, strict=True)
        ]
        return Roster(int(now), text(members), text(number), text(basis), plan, sessions)

    return parse


def beat(
    worker: str,
    token: str,
    session_ms: int,
    *,
    record: str = "",
    known_members: str = "",
    known_number: str = "",
) -> Call[Beat]:
    """Renew the session of ``worker``, or join with a ``record`` that begins with ``token``."""
    return Call(
        "workers/beat",
        OfWorkers(),
        (worker, token, record, session_ms, known_members, known_number),
        _beat(known_members, known_number),
    )


def leave(worker: str, token: str) -> Call[str]:
    """End the session of ``worker``. Answers left or absent."""
    return Call("workers/leave", OfWorkers(), (worker, token), word)


def assign(members: str, number: str, plan: str) -> Call[str | None]:
    """Write ``plan`` if ``members`` and ``number`` are still current; return its number, otherwise None."""
    return Call("workers/assign", OfWorkers(), (members, number, plan), _assigned)


_NO_ROSTER = Roster(0, "", "", "", b"", [])


def roster(known: Roster = _NO_ROSTER) -> Call[Roster]:
    """Return all workers and the assignment, without joining.

    Of the records and the plan, which are long and change rarely, Redis sends only what is newer than in ``known``.
    """
    return Call("workers/roster", OfWorkers(), (known.members, known.number), _roster(known))


def _pairs(reply: Reply) -> Iterable[tuple[bytes, bytes]]:
    """Return the fields and values of a hash: on connections with RESP3 the reply is a map, otherwise a flat list."""
    return reply.items() if isinstance(reply, dict) else zip(reply[::2], reply[1::2], strict=True)


_REPORTS = Single(reports_key)


def _reports(key: bytes, reply: Reply) -> dict[str, WorkerReport]:
    reports = ((worker.decode("utf-8", "replace"), decode(text)) for worker, text in _pairs(reply))
    return {worker: report for worker, report in reports if report is not None}


def write_report(worker: str, report: WorkerReport) -> Call[int]:
    """Keep the report of a worker in place of its last one."""
    return RedisCommand("HSET", _REPORTS, (worker, report.encode()), int)


def read_reports() -> Call[dict[str, WorkerReport]]:
    """Return the reports of all workers, also of those that vanished."""
    return RedisCommand("HGETALL", _REPORTS, (), OfKey("reports", _reports))


def delete_reports(*workers: str) -> Call[int]:
    """Forget the reports of these workers."""
    return RedisCommand("HDEL", _REPORTS, workers, int)


_CODE_VERSIONS = Single(code_versions_key)


def _code_versions(key: bytes, reply: Reply) -> list[CodeVersion]:
    versions = (decode_code_version(name.decode("utf-8", "replace"), text) for name, text in _pairs(reply))
    return [version for version in versions if version is not None]


def write_code_version(version: CodeVersion) -> Call[int]:
    """Keep since when and until when workers have reported a version."""
    return RedisCommand("HSET", _CODE_VERSIONS, (version.name, f"{version.since_ms} {version.seen_ms}"), int)


def read_code_versions() -> Call[list[CodeVersion]]:
    """Return the versions that workers have reported."""
    return RedisCommand("HGETALL", _CODE_VERSIONS, (), OfKey("code_versions", _code_versions))


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


_CHANGED_LIMITS = Single(changed_limits_key)


def _limits(key: bytes, reply: Reply) -> dict[str, ChangedLimits]:
    limits = ((topic.decode("utf-8", "replace"), decode_limits(text)) for topic, text in _pairs(reply))
    return {topic: changed for topic, changed in limits if changed is not None}


def read_changed_limits() -> Call[dict[str, ChangedLimits]]:
    """Return the limits that were changed at run time, by topic."""
    return RedisCommand("HGETALL", _CHANGED_LIMITS, (), OfKey("limits", _limits))


def write_changed_limits(topic: str, changed: ChangedLimits) -> Call[int]:
    """Keep these limits of a topic in place of those that were changed before."""
    return RedisCommand("HSET", _CHANGED_LIMITS, (topic, changed.encode()), int)


def delete_changed_limits(topic: str) -> Call[int]:
    """Return a topic to the limits of its settings. Answers 0 if none was changed."""
    return RedisCommand("HDEL", _CHANGED_LIMITS, (topic,), int)


_ACTIONS = Single(background_actions_key)


def _actions(key: bytes, reply: Reply) -> list[ActionProgress]:
    return decode_actions(_pairs(reply))


def read_actions() -> Call[list[ActionProgress]]:
    """Return the actions in the background, the oldest first."""
    return RedisCommand("HGETALL", _ACTIONS, (), OfKey("actions", _actions))


def write_action(action: str, field: str, value: str) -> Call[int]:
    """Write a field of an action: "" (the request itself), beat, stopped or ended."""
    return RedisCommand("HSET", _ACTIONS, (f"{action}:{field}", value), int)


def count_action(action: str, outcome: str, messages: int) -> Call[int]:
    """Count messages with an outcome of an action; return how many it has by now."""
    return RedisCommand("HINCRBY", _ACTIONS, (f"{action}:did.{outcome}", messages), int)


def _stopped_by(reply: Sequence[Reply]) -> str:
    return text(reply[0] or b"")


def read_stop(action: str) -> Call[str]:
    """Return who has stopped an action; empty if nobody has."""
    return RedisCommand("HMGET", _ACTIONS, (f"{action}:stopped",), _stopped_by)


def delete_action(found: ActionProgress) -> Call[int]:
    """Forget an action."""
    fields = ["", "beat", "stopped", "ended", *(f"did.{outcome}" for outcome in found.outcomes)]
    return RedisCommand("HDEL", _ACTIONS, tuple(f"{found.action.id}:{field}" for field in fields), int)


_DELETIONS = Single(deletions_key)


def _deletions(key: bytes, reply: Reply) -> list[Deletion]:
    return decode_deletions(_pairs(reply))


def read_deletions() -> Call[list[Deletion]]:
    """Return the actions that have deleted messages, the oldest first."""
    return RedisCommand("HGETALL", _DELETIONS, (), OfKey("deletions", _deletions))


def write_deletion(deletion: str, field: str, value: str) -> Call[int]:
    """Write a field of a deletion: "" (the record itself) or undone."""
    return RedisCommand("HSET", _DELETIONS, (f"{deletion}:{field}", value), int)


def count_deletion(deletion: str, field: str, by: int) -> Call[int]:
    """Count what is kept of a deletion: ``kept`` messages, or their ``bytes``; return how many there are by now."""
    return RedisCommand("HINCRBY", _DELETIONS, (f"{deletion}:{field}", by), int)


def forget_deletions(deletions: Sequence[str]) -> Call[int]:
    """Forget deletions. What they have kept expires by itself."""
    names = tuple(f"{one}:{field}" for one in deletions for field in FIELDS)
    return RedisCommand("HDEL", _DELETIONS, names, int)


def _schedule_key(prefix: str, _: str) -> bytes:
    return schedules_key(prefix)


def _all(key: bytes, reply: Reply) -> list[ScheduleRecord]:
    return records(dict(_pairs(reply)))


def read_schedules() -> Call[list[ScheduleRecord]]:
    """Return everything that is recorded about schedules, by their names."""
    return RedisCommand("HGETALL", Named(_schedule_key, ""), (), OfKey("schedules", _all))


def change_schedule(
    name: str, field: str, value: str, *, from_now: bool = False, renewed: int | None = None
) -> Call[str]:
    """Change ``spec``, ``override``, ``paused``, ``walls`` or ``removed`` of a schedule. Answers changed, same or not_found.

    ``from_now``: its ticks count from now on, instead of from the last one. ``renewed``: change it only if no
    worker has declared it since that time, which is the one of its record.
    """
    return Call(
        "schedules/change",
        Named(_schedule_key, name),
        (name, field, value, int(from_now), "" if renewed is None else renewed),
        word,
    )


def renew_schedule(name: str, *, ends: bool = False) -> Call[str]:
    """Note that a worker declares a schedule as it is. Answers renewed or not_found.

    ``ends``: the worker declared it, and ends.
    """
    return Call("schedules/renew", Named(_schedule_key, name), (name, int(ends)), word)


def plan_tick(
    name: str, generation: int, before: int, instant: int, topic: str, crc: int, walls: str = ""
) -> Call[str]:
    """Make ``instant`` the next tick of a schedule, if ``before`` is still the latest one.

    ``walls``: what ``local_times_text`` returns. Answers planned, early or lost.
    """
    own = (name, generation, before, instant, topic, crc, walls)
    return Call("schedules/plan", Named(_schedule_key, name), own, word)


def settle_tick(name: str, generation: int, instant: int, outcome: str) -> Call[str]:
    """Note that a tick is ``written``, or ``removed`` from its slot. Answers settled, forgotten or lost."""
    own = (name, generation, instant, outcome)
    return Call("schedules/settle", Named(_schedule_key, name), own, word)


def _field(name: str) -> str:
    """Return the field of ``control_{K}`` that holds the latest tick of a schedule."""
    return f"tick:{name}"


def _tick(reply: list[bytes]) -> str:
    moved(reply)
    return reply[0].decode()


def tick(
    topic: Topic, slot: int, name: str, generation: int, instant: int, member: bytes, envelope: bytes
) -> Call[str]:
    """Put a tick into its slot. Answers stored, known (it was put there before), stale (of an earlier generation) or full.

    Raises ``SlotMoved``.
    """
    own = (_field(name), generation, instant, member, envelope)
    return Call("tick", AtSlot(topic, slot), own, _tick)


def retract(topic: Topic, slot: int, name: str, generation: int, instant: int, member: bytes) -> Call[str]:
    """Take back a tick that waits, and refuse those of earlier generations from now on.

    Answers removed, written (a consumer has taken it) or unwritten.
    """
    return Call("retract", AtSlot(topic, slot), (_field(name), generation, instant, member), word)


def _taken(reply: list[Reply]) -> Driver | None:
    return None if reply[0] == b"held" else _driver(reply[1:])


def _driver(reply: Sequence[Reply]) -> Driver | None:
    name, about, since, until = reply
    return None if name is None else Driver(text(name), text(about or b""), int(since or 0), int(until or 0))


def _name(topic: Topic, consumer: str) -> Named:
    return Named(consumer_key, f"{topic.name}:{consumer}")


def hold_consumer(
    topic: Topic,
    consumer: str,
    driver: str,
    checkpoint: str,
    about: str,
    lease_ms: int,
    *,
    starts: bool = False,
    gone: str = "",
) -> Call[Driver | None]:
    """Hold the name of a consumer for ``driver``, or renew its lease. Return None, or the other driver that has the name.

    A driver that ``starts`` gets the name if its lease has ended, if it was held for the same ``checkpoint``, or if the dead
    driver ``gone`` had it. A driver that held the name before gets it only if no other one has had it since.
    """
    own = (driver, checkpoint, about, lease_ms, int(starts), gone)
    return Call("consumers/hold", _name(topic, consumer), own, _taken)


def leave_consumer(topic: Topic, consumer: str, driver: str = "") -> Call[str]:
    """End the lease of a consumer's name if ``driver`` has it; an empty text means any driver. Answers left or absent."""
    return Call("consumers/leave", _name(topic, consumer), (driver,), word)


def driver_of_consumer(topic: Topic, consumer: str) -> Call[Driver | None]:
    """Return the last driver that had the name of a consumer, or None if no driver has had it for a day."""
    fields = ("driver", "about", "since", "until")
    return RedisCommand("HMGET", _name(topic, consumer), fields, _driver)


def reported_loss(topic: Topic, consumer: str) -> Call[str]:
    """Return what ``report_loss`` has noted last under the name of a consumer, or an empty text."""
    return RedisCommand("HMGET", _name(topic, consumer), ("reported",), _reported)


def _reported(reply: list[bytes | None]) -> str:
    return text(reply[0] or b"")


def report_loss(topic: Topic, consumer: str, claim: str) -> Call[int]:
    """Note under the name of a consumer, which a driver holds, that the loss of ``claim`` is reported."""
    return RedisCommand("HSET", _name(topic, consumer), ("reported", claim), int)


def count_consumers(topic: Topic, slot: int) -> Call[int]:
    """Return how many Spark consumers a slot remembers: at most 1,000, for thirty days after their last claim."""
    return RedisCommand("HLEN", AtSlot(topic, slot), (), int)


def _begun(reply: list[bytes]) -> tuple[str, bytes]:
    return reply[0].decode(), reply[1] if len(reply) > 1 else b""


def begin_answer(request: str, content: str, token: str, lease_ms: int) -> Call[tuple[str, bytes]]:
    """Begin ``request`` (letters and digits) as attempt ``token``; ``content`` is a hash of the request's content.

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
    return Call("answers/keep_answer", Named(answer_key, request), (token, kept, keep_ms), word)


class Kept(NamedTuple):
    """The stored state of a task: its job, and the record of its attempts."""

    stamp: int
    job: bytes
    record: bytes


def _kept(reply: Sequence[Reply]) -> Kept | None:
    stamp, job, record = reply
    return None if stamp is None or job is None or record is None else Kept(int(stamp), job, record)


def keep_result(task: str, stamp: int, keep_ms: int, job: bytes, record: bytes) -> Call[str]:
    """Store the state of ``task`` (letters and digits): its ``job``, and the ``record`` of its attempts.

    Answers ok, or stale if the stamp is not above the known one.
    """
    own = (stamp, keep_ms, job, record)
    return Call("results/keep_result", Named(result_key, task), own, word)


def result(task: str) -> Call[Kept | None]:
    """Return the stored state of ``task``, or None if there is none."""
    return RedisCommand("HMGET", Named(result_key, task), ("stamp", "job", "record"), _kept)
