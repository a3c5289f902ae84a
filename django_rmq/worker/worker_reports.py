"""What each worker process reports about itself every few seconds: versions, load, memory, and the calls that run longest.

A report is one field of a hash in Redis. A worker that leaves deletes its own, so a report without a live worker is that of
a process that vanished. Reports are only shown: no other worker depends on them, and a report that cannot be written is
skipped. They contain sealed ids and what listeners report of their progress, and nothing of the messages themselves.

With its report a worker reads in the same round trip what a person has asked of it: to be quiet, to resume, to stop, or for
the stacks of messages that it runs; the limits of topics that a person has changed; and the actions
that it may do in the background.
"""

from __future__ import annotations

import contextlib
import os
import platform
import random
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

from django_rmq.core.clock import uptime
from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.commands.limits import read_changed_limits
from django_rmq.core.commands.reports import (
    delete_code_versions,
    delete_reports,
    end_stacks,
    read_code_versions,
    read_reports,
    read_requests,
    write_code_version,
    write_report,
    write_stacks,
)
from django_rmq.core.commands.stored_actions import read_actions
from django_rmq.core.consumer.batch import Batch
from django_rmq.core.log import safe_logger
from django_rmq.core.model.changed_limits import ChangedLimits
from django_rmq.core.model.replies import MAX_TEXT, cut_error
from django_rmq.core.model.stored_actions import ActionProgress
from django_rmq.core.model.worker_report import (
    LONGEST_STACK,
    MOST_CALLS,
    REPLACED,
    CodeVersion,
    RunningCall,
    Stack,
    StackRequest,
    WorkerReport,
    WorkerRequest,
    decode_stack_requests,
)
from django_rmq.exceptions import RmqError
from django_rmq.message_ids import sealed_id

logger = safe_logger("django_rmq.consumer")

REPORT_SECONDS = 5.0
"""Seconds between two reports of a worker. With each one it obeys what it was asked for: the admin, the API and the commands say
"within five seconds"."""

FORGET_MS = 3_600_000
"""Milliseconds after which the report of a worker that vanished is deleted."""

CLEANING_SECONDS = 600.0
"""Mean seconds between two looks of a worker for reports to delete."""

CLOCK_SECONDS = 60.0
"""Seconds after which a worker reads the clock of Redis again, and notes that its version of the code is in use."""

ABSENT_MS = 600_000
"""Milliseconds without a worker of a version after which it begins again: as after a roll-back to it."""

MOST_VERSIONS = 50
"""The number of versions of the code that Redis keeps: those reported last."""

STACKS_MS = 300_000
"""Milliseconds for which Redis keeps the stacks that people asked for."""

_MEANINGS: dict[WorkerRequest, str] = {
    "quiet": "take no more messages",
    "resume": "take messages again",
    "stop": "end, with all processes of its command",
}


def running_calls(batches: Iterable[Batch], now_ms: int) -> list[RunningCall]:
    """Return the messages whose listeners run, those that began first first."""
    now, calls = uptime(), list[RunningCall]()
    for batch in batches:
        # The thread may end the call at any time, so both are read once.
        since, thread = batch.call_began_at, batch.thread
        if since is None or thread is None:
            continue
        since_ms = now_ms - round((now - since) * 1000)
        topic, slot = batch.topic.name, batch.slot.number
        calls += [
            RunningCall(
                topic,
                sealed_id(topic, slot, message.delivery.member),
                since_ms,
                message.max_retries - message.retries_left + 1,
                thread.name + (REPLACED if thread.hangs else ""),
                *_progress(message.reported),
            )
            for message in batch.messages_of_call()
        ]
    return sorted(calls, key=lambda one: one.since_ms)


def stacks_of(batches: Iterable[Batch], requests: Iterable[StackRequest], now_ms: int) -> list[Stack]:
    """Return the stacks of messages; that of a message that does not run is empty."""
    text_of: dict[str, str] = {}
    for batch in batches:
        thread = batch.thread
        if batch.call_began_at is None or thread is None:
            continue
        topic, slot = batch.topic.name, batch.slot.number
        for message in batch.messages_of_call():
            text_of[sealed_id(topic, slot, message.delivery.member)] = thread.stack_of(batch)
    return [Stack(one.id, one.asked_ms, now_ms, _innermost(text_of.get(one.id, ""))) for one in requests]


def _innermost(stack: str) -> str:
    if len(stack) <= LONGEST_STACK:
        return stack
    cut = stack[-LONGEST_STACK:]
    # It begins with a whole call, if there is one.
    return cut[max(0, cut.find('  File "')) :]


def _progress(reported: tuple[float, str] | None) -> tuple[float | None, str]:
    if reported is None:
        return None, ""
    fraction, text = reported
    return float(fraction), cut_error(str(text), MAX_TEXT).decode()


@dataclass(eq=False)
class ReportDuty:
    """Writes the reports of one worker, and now and then deletes those of workers that vanished long ago."""

    broker: Broker
    worker: str
    threads: int
    code: str
    batches: Callable[[], list[Batch]]
    memory_mib: Callable[[], float]
    state: Callable[[], str] = lambda: "working"
    obey: Callable[[WorkerRequest], None] = lambda request: None
    parent: int = 0
    limit: Callable[[Mapping[str, ChangedLimits]], None] = lambda changed: None
    act: Callable[[Sequence[ActionProgress]], None] = lambda actions: None
    _obeyed: str = field(default="", init=False)
    """The last request that was obeyed. Redis keeps it for a moment, and it is obeyed once."""
    _answered: str = field(default="", init=False)
    """The last request for stacks that was answered."""

    def __call__(self) -> Generator[float, None, None]:
        """Write a report, and yield the seconds until the next one. A worker that ends deletes its report."""
        clock_ms, read_at, is_changed = 0, float("-inf"), False
        # Workers that start together would otherwise all read the reports of all workers at the same moments.
        cleaning = time.monotonic() + random.uniform(0.0, 2 * CLEANING_SECONDS)
        try:
            while True:
                # A report is only for people: the next one follows soon, and the worker says itself that Redis is unavailable.
                with contextlib.suppress(RmqError):
                    if time.monotonic() - read_at > CLOCK_SECONDS:
                        clock_ms, read_at = self.broker.now_ms(), time.monotonic()
                        if self.code:
                            # Another program may have put a value of another type there. The report is written all the same.
                            with contextlib.suppress(RmqError):
                                self._record_code_version(clock_ms)
                    now_ms = clock_ms + round((time.monotonic() - read_at) * 1000)
                    is_changed = self._exchange(now_ms)
                    if time.monotonic() >= cleaning:
                        cleaning = time.monotonic() + random.uniform(0.0, 2 * CLEANING_SECONDS)
                        self.forget(now_ms)
                # Who has asked sees soon that the worker obeys.
                yield 0.0 if is_changed else REPORT_SECONDS
                is_changed = False
        finally:
            self.broker.run(delete_reports(self.worker))

    def _record_code_version(self, now_ms: int) -> None:
        """Keep since when and until when workers have reported the version of this one."""
        known = self.broker.run(read_code_versions())
        before = next((one for one in known if one.name == self.code), None)
        # Another worker may have reported it a moment later than this one has read the clock.
        goes_on = before is not None and abs(now_ms - before.seen_ms) < ABSENT_MS
        since_ms = before.since_ms if before is not None and goes_on else now_ms
        self.broker.run(write_code_version(CodeVersion(self.code, since_ms, now_ms)))
        others = sorted((one for one in known if one.name != self.code), key=lambda one: -one.seen_ms)
        if forgotten := [one.name for one in others[MOST_VERSIONS - 1 :]]:
            self.broker.run(delete_code_versions(forgotten))

    def _exchange(self, now_ms: int) -> bool:
        """Write a report, and read the last request, the changed limits and the actions for the background, in one round trip.

        Obey the request, and return whether it is a new one.
        """
        pipeline = self.broker.pipeline()
        written = pipeline.add(write_report(self.worker, self.report(now_ms)))
        asked = pipeline.add(read_requests(self.worker))
        changed = pipeline.add(read_changed_limits())
        actions = pipeline.add(read_actions())
        pipeline.execute()
        # Another program may have put a value of another type in the place of the limits. Those known until then hold.
        if not isinstance(limits := changed.result(), RmqError):
            self.limit(limits)
        if not isinstance(answer := actions.result(), RmqError):
            self.act(answer)
        written.get()
        request, stacks = asked.get()
        is_new = self._obey_new(request)
        if stacks and stacks != self._answered:
            self._answer(stacks, now_ms)
        return is_new

    def _obey_new(self, request: str) -> bool:
        if not request or request == self._obeyed:
            return False
        self._obeyed = request
        kind = request.partition(" ")[0]
        for known in get_args(WorkerRequest):
            if kind == known:
                logger.info(
                    "A person has asked this worker to %s",
                    _MEANINGS[known],
                    extra={"rmq_event": "asked", "rmq_request": known},
                )
                self.obey(known)
                return True
        return False

    def _answer(self, request: str, now_ms: int) -> None:
        stacks = stacks_of(self.batches(), decode_stack_requests(request), now_ms)
        pipeline = self.broker.pipeline()
        written = pipeline.add(write_stacks(self.worker, stacks))
        ended = pipeline.add(end_stacks(STACKS_MS))
        pipeline.execute()
        written.get()
        ended.get()
        self._answered = request

    def report(self, now_ms: int) -> WorkerReport:
        """Return what this worker is at this moment."""
        from django_rmq import __version__  # the package imports this module

        batches = self.batches()
        calls = running_calls(batches, now_ms)
        taken = {
            id(thread)
            for one in batches
            if one.async_run is None and one.call_began_at and (thread := one.thread) and not thread.hangs
        }
        return WorkerReport(
            at_ms=now_ms,
            host=platform.node(),
            pid=os.getpid(),
            version=__version__,
            python=platform.python_version(),
            code=self.code,
            load=round(_load(), 2),
            memory_mib=round(self.memory_mib(), 1),
            threads=self.threads,
            taken=len(taken),
            messages=sum(len(one.messages) - one.reported for one in batches),
            running=len(calls),
            calls=tuple(calls[:MOST_CALLS]),
            state=self.state(),
            parent=self.parent,
        )

    def forget(self, now_ms: int) -> None:
        """Delete the reports of workers that have not reported for an hour."""
        reports = self.broker.run(read_reports())
        old = [worker for worker, one in reports.items() if one.at_ms < now_ms - FORGET_MS]
        if old:
            self.broker.run(delete_reports(*old))


def _load() -> float:
    try:
        return os.getloadavg()[0]
    except OSError:
        return 0.0
