"""Processes: the children of a supervisor, and what their parent does when one has died."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from typing import Any

from django.db import connections as databases

from django_rmq import connections
from django_rmq.conf import get_config
from django_rmq.core.consumer import fork_guard
from django_rmq.core.consumer.progress import (
    FORCED,
    RECYCLE,
    SERVER,
    USAGE,
    Ending,
    RecoveryResult,
    SharedProgress,
    settle,
)
from django_rmq.core.consumer.rate_limits import return_permits
from django_rmq.core.consumer.supervisor import Supervisor
from django_rmq.core.log.safe_logger import safe_logger
from django_rmq.core.log.throttle import LogThrottle
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import ConfigurationError, ServerTrouble, SlotMoved
from django_rmq.opaque_ids import sealed_id
from django_rmq.worker.worker_process import ProcessOptions, WorkerProcess

logger = safe_logger("django_rmq.consumer")

START_SECONDS = 0.5
"""Seconds for which a new process waits before it asks an unavailable server again."""


def before_fork() -> None:
    """Close what processes must not share."""
    databases.close_all()
    connections.close()


def run_child(topics: Iterable[Topic], options: ProcessOptions, notes: SharedProgress, parent: int) -> int:
    """Run as a child of the supervisor until SIGTERM, or until the parent is gone; return one of the ends of ``notes``."""
    asked: list[int] = []
    working: list[WorkerProcess] = []

    def ask(number: int, frame: object) -> None:
        # A repeated signal counts once: both the system and the parent may send it to the process group.
        asked.append(number)
        if working:
            working[0].stop()

    fork_guard.handle_signal(signal.SIGTERM, ask)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
    try:
        if asked:
            return RECYCLE
        worker = _begun(topics, options, notes, parent, asked)
        if worker is None:
            return RECYCLE
        working.append(worker)
        if asked:
            return RECYCLE
        return worker.run()
    except ServerTrouble as error:
        logger.error("A worker process cannot continue: %s", error, extra={"rmq_event": "trouble"})  # noqa: TRY400 - one line says it
        return SERVER
    except (ConfigurationError, SlotMoved) as error:
        logger.error("A worker process cannot continue: %s", error, extra={"rmq_event": "trouble"})  # noqa: TRY400 - one line says it
        # Once messages have been processed, a successor can begin. If it cannot, it says so itself.
        return FORCED if notes.processed else USAGE


def _begun(
    topics: Iterable[Topic], options: ProcessOptions, notes: SharedProgress, parent: int, asked: list[int]
) -> WorkerProcess | None:
    """Return a worker as soon as Redis (or the coordinator) answers. None: it was told to end before that."""
    complain = LogThrottle(logger)
    while not asked and os.getppid() == parent:
        try:
            return WorkerProcess(topics, options, notes=notes, parent=parent)
        except ServerTrouble as error:
            complain("server", "A worker process is waiting for its server (%s)", error)
            notes.beat(0, False)
            time.sleep(START_SECONDS)
    return None


def _settle_for(topics: list[Topic], notes: SharedProgress) -> int:
    """Settle the messages that a dead process had in hand; return how many were given back."""
    try:
        broker = connections.get_broker("coordinator")
        served = [connections.present(topic) for topic in topics]
        settled = settle(broker, served, notes)
        return_permits(broker, served, notes.owner)
    finally:
        try:
            connections.end_session(notes.owner, notes.token)
        except ServerTrouble as error:
            logger.warning(
                "Cannot end the session of worker %s; others take over its slots when it expires: %s",
                notes.owner,
                error,
            )
    _log_settled(settled)
    return settled.count("released")


def _log_settled(settled: RecoveryResult) -> None:
    """Log which messages a dead process had in hand: what it was running may have killed it."""
    if done := settled.count("committed"):
        logger.info(
            "Committed %d messages that a dead process had finished",
            done,
            extra={"rmq_event": "committed_for", "rmq_messages": done},
        )
    waiting = settled.by_topic("released")
    charges: dict[Ending, str] = {
        "charged": "Recorded a time-out for %d messages of topic %s that a dead process was running: %s%s",
        "overran": "Recorded a failure for %d messages of topic %s whose listener exceeded HARD_TIMEOUT: %s%s",
    }
    for ending, text in charges.items():
        for topic, count in settled.by_topic(ending).items():
            ids = [sealed_id(topic, slot, member) for slot, member in settled.named(ending, topic)]
            named = ", ".join(ids) + (f" and {count - len(ids)} more" if count > len(ids) else "")
            had = waiting.get(topic, 0)
            rest = f"; {had} of this topic had not begun, and were given back" if had else ""
            logger.warning(
                text,
                count,
                topic,
                named,
                rest,
                extra={
                    "rmq_event": "charged_for",
                    "rmq_topic": topic,
                    "rmq_messages": count,
                    "rmq_ids": ids,
                },
            )


def supervise(chosen: list[Topic], options: ProcessOptions, **how: Any) -> Supervisor:
    """Return a supervisor of worker processes; ``how`` are its options, and may shorten the list ``chosen`` at the start."""
    parent = os.getpid()
    threads = options.threads or get_config().consumer.threads

    def died(notes: SharedProgress) -> int:
        return _settle_for(chosen, notes) if notes.owner else 0

    return Supervisor(
        child=lambda notes: run_child(chosen, options, notes, parent),
        make_notes=lambda: SharedProgress(threads),
        died=died,
        before_fork=before_fork,
        **how,
    )


__all__ = ["before_fork", "run_child", "supervise"]
