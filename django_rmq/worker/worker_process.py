"""The worker of one process: a dispatcher with Django's hooks, made from the settings, and its periodic checks.

``run_child`` runs it as a child of a supervisor. ``supervise`` makes that supervisor, which settles the messages of a child
that died. How processes are started, watched and replaced is the part of ``core.worker_processes.supervisor``.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from django.db import connections as databases

from django_rmq import connections, schedules
from django_rmq.conf import get_config
from django_rmq.connections import coordinators
from django_rmq.core import forked_copies
from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.commands.limits import read_changed_limits
from django_rmq.core.consumer import AssignmentCallbacks, Dispatcher, WorkerCallbacks, WorkerOptions
from django_rmq.core.consumer.shared_notes import SharedNotes
from django_rmq.core.coordination import Coordinator, Worker, topic_slots
from django_rmq.core.dead_retention import trim_dead
from django_rmq.core.duties import Duty, DutyThread
from django_rmq.core.log import LogThrottle, name_worker, safe_logger
from django_rmq.core.model.changed_limits import ChangedLimits, limited
from django_rmq.core.model.stored_actions import ActionProgress
from django_rmq.core.model.topic import Topic, slot_counts
from django_rmq.core.model.worker_report import WorkerRequest
from django_rmq.core.monitoring import history
from django_rmq.core.rate_limits import return_permits
from django_rmq.core.threads import start_daemon
from django_rmq.core.topic_registration import as_registered
from django_rmq.core.unserved_topics import UnservedTopics
from django_rmq.core.worker_processes.child_process import (
    DONE_FOR_GOOD,
    FORCED,
    HARD_TIMEOUT_EXCEEDED,
    RECYCLE,
    SERVER,
    USAGE,
)
from django_rmq.core.worker_processes.crash_recovery import Ending, RecoveryResult, settle
from django_rmq.core.worker_processes.supervisor import Supervisor, collect_less
from django_rmq.database_access import threads_of_duties
from django_rmq.exceptions import ConfigurationError, RmqError, ServerTrouble, SlotMoved
from django_rmq.message_ids import sealed_id
from django_rmq.observability import announcements
from django_rmq.outbox import relay
from django_rmq.worker import listener_registry, once
from django_rmq.worker.listener_hooks import hooks
from django_rmq.worker.worker_reports import ReportDuty

logger = safe_logger("django_rmq.consumer")

START_SECONDS = 0.5
"""Seconds for which a new process waits before it asks an unavailable server again."""


def before_fork() -> None:
    """Close the connections, which processes must not share."""
    databases.close_all()
    for alias, settings in databases.settings.items():
        # A pool keeps its connections open, and two processes would read each other's answers from them. Django's backends
        # of PostgreSQL and Oracle have a pool, and close it only in its own tests.
        # rule: shares_a_pool_with_its_children
        if settings["OPTIONS"].get("pool"):
            getattr(databases[alias], "close_pool", lambda: None)()
    connections.close()


def run_child(topics: Iterable[Topic], options: ProcessOptions, notes: SharedNotes, parent: int) -> int:
    """Run as a child of the supervisor until SIGTERM, or until the parent is gone; return one of the exit codes."""
    asked: list[int] = []
    working: list[WorkerProcess] = []

    def ask(number: int, frame: object) -> None:
        # A repeated signal counts once: both the system and the parent may send it to the process group.
        asked.append(number)
        if working:
            working[0].stop()

    forked_copies.handle_signal(signal.SIGTERM, ask)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
    try:
        # A signal that was blocked since before the fork arrives when it is unblocked.
        if asked:
            return RECYCLE
        worker = _begun(topics, options, notes, parent, asked)
        if worker is None:
            return RECYCLE
        working.append(worker)
        # The signal may have come before the handler had a worker to stop.
        if asked:
            return RECYCLE
        return worker.run()
    except (ServerTrouble, ConfigurationError, SlotMoved) as error:
        logger.error("A worker process cannot continue: %s", error, extra={"rmq_event": "trouble"})  # noqa: TRY400 - one line says it
        if isinstance(error, ServerTrouble):
            return SERVER
        # Once messages have been processed, a successor can begin. If it cannot, it says so itself.
        return FORCED if notes.processed else USAGE


def _begun(
    topics: Iterable[Topic], options: ProcessOptions, notes: SharedNotes, parent: int, asked: list[int]
) -> WorkerProcess | None:
    """Return a worker as soon as Redis (or the coordinator) answers, or None if a signal or the end of the parent came first."""
    log_throttled = LogThrottle(logger)
    while not asked and os.getppid() == parent:
        try:
            return WorkerProcess(topics, options, notes=notes, parent=parent)
        except ServerTrouble as error:
            # The process waits for its server itself. Its beats keep the watchdog from killing it.
            log_throttled("server", "A worker process is waiting for its server (%s)", error)
            notes.beat(0, False)
            time.sleep(START_SECONDS)
    return None


def _settle_for(topics: list[Topic], notes: SharedNotes) -> int:
    """Settle the messages that a dead process had in flight; return how many were given back."""
    try:
        broker = connections.get_broker("coordinator")
        changed: Mapping[str, ChangedLimits] = {}
        # Without them, the permits of a limit that was changed end with their lease.
        with suppress(RmqError):
            changed = broker.run(read_changed_limits())
        served = [limited(connections.with_present_slots(topic), changed.get(topic.name)) for topic in topics]
        settled = settle(broker, served, notes)
        _log_settled(settled)
        if settled.trouble is not None:
            raise settled.trouble
        # What is settled stays settled. The permits then end with their lease, too.
        with suppress(RmqError):
            return_permits(broker, served, notes.owner)
    finally:
        try:
            # The session ends even if settling failed, so that other workers need not wait until it expires.
            coordinators.end_session(notes.owner, notes.token)
        except ServerTrouble as error:
            logger.warning(
                "Cannot end the session of worker %s; others take over its slots when it expires: %s",
                notes.owner,
                error,
            )
    return settled.count("released")


def _log_settled(settled: RecoveryResult) -> None:
    """Log which messages a dead process had in flight: those that it was running may have killed it."""
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
                extra={"rmq_event": "charged_for", "rmq_topic": topic, "rmq_messages": count, "rmq_ids": ids},
            )


def supervise(chosen: list[Topic], options: ProcessOptions, **how: Any) -> Supervisor:
    """Return a supervisor of worker processes; ``how`` are its options, and may shorten the list ``chosen`` at the start."""
    # A child whose parent dies at once has another parent when it first looks, so the id is noted before the fork.
    parent = os.getpid()
    threads = options.threads or get_config().consumer.threads

    def died(notes: SharedNotes) -> int:
        return _settle_for(chosen, notes) if notes.owner else 0

    return Supervisor(
        child=lambda notes: run_child(chosen, options, notes, parent),
        make_notes=lambda: SharedNotes(threads),
        died=died,
        before_fork=before_fork,
        **how,
    )


LEAVE_SECONDS = 2.0
"""Maximum seconds for leaving the other workers; after that the session ends by itself."""

LOOK_SECONDS = 0.5
"""Seconds between two checks of the parent process, the memory in use and the coordinator."""

FULL_SECONDS = 10.0
"""Seconds without capacity for a topic after which other workers should own its slots. REST says "10 s"."""

STUCK_SECONDS = 60.0
"""Seconds without capacity for a topic after which a worker is not ready."""

DEFINITIONS_SECONDS = 30.0
"""Seconds between two checks whether Redis still has the definitions of topics."""

UNSETTLED_SECONDS = 10.0
"""Seconds without knowing its slots after which a worker is not ready."""


RunParts = Callable[[str, Callable[[], bool]], bool]
"""Does a part of each action that no other worker does, as this worker and until the function says so; returns whether there
was one. What does it is above the workers."""


class BackgroundActions:
    """Does parts of actions in a thread of its own, which lives as long as there is something to do."""

    def __init__(self, worker: str, run_parts: RunParts) -> None:
        self._worker = worker
        self._run_parts = run_parts
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._log_throttled = LogThrottle(logger)

    def begin_if_needed(self, actions: Sequence[ActionProgress]) -> None:
        """Begin if one of these actions has not ended."""
        is_alive = self._thread is not None and self._thread.is_alive()
        if is_alive or self._stopped.is_set() or all(one.ended_ms is not None for one in actions):
            return
        self._thread = start_daemon(self._run, "rmq-actions")

    def stop(self) -> None:
        """End after the current step. Another worker goes on at once."""
        self._stopped.set()

    def join(self, seconds: float) -> None:
        """Wait until the thread has ended, for at most ``seconds``."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                if not self._run_parts(self._worker, self._stopped.is_set):
                    return
        except RmqError as error:
            # The next report begins again.
            self._log_throttled("actions", "An action in the background cannot continue now: %s", error)
        finally:
            # The audit trail may have used a database.
            databases.close_all()


@dataclass(frozen=True, slots=True)
class ProcessOptions:
    """The options of a worker process. Times are in seconds; None means the setting, or never."""

    threads: int | None = None
    burst: bool = False
    shutdown_timeout: float | None = None
    max_messages: int | None = None
    max_memory: int | None = None
    """MiB of resident memory."""
    max_idle_time: float | None = None
    run_parts: RunParts = lambda worker, is_over: False
    """Does parts of the actions in the background."""


class WorkerProcess:
    """One worker in this process: a dispatcher, and the coordinator that decides which slots it owns.

    Make it after the last fork. Without the process ``parent``, with which it shares ``notes``, it ends.
    """

    def __init__(
        self,
        topics: Iterable[Topic],
        options: ProcessOptions,
        *,
        notes: SharedNotes | None = None,
        parent: int | None = None,
    ) -> None:
        config = get_config()
        self._config = config
        self._topics = list(topics)
        """The topics as in the settings."""
        self._moved = True
        """Whether some topic may have other slots than this worker has published."""
        self._served: list[Topic] = []
        """The topics as this worker has published them."""
        self._load_slots()
        self._notes = notes
        self._parent = parent
        self._max_memory = options.max_memory
        self._max_messages = options.max_messages
        self._next_look = 0.0
        self._settled_at = float("-inf")
        self._is_stuck = False
        """Whether it has had no capacity for a topic for long."""
        self._wants_successor = False
        self._is_too_large = False
        """Whether it has used more memory than its limit before its first message."""
        self._is_stopping = False
        self._is_quiet = False
        self._publishing = threading.Lock()
        self._leaving: threading.Thread | None = None
        self._reporter = announcements.Reporter()
        self._threads = threads = options.threads or config.consumer.threads
        duties_broker = connections.get_broker("coordinator")
        times = history.TimesCount(duties_broker) if config.history_retention else None
        self.dispatcher = self._new_dispatcher(options, threads, times)
        self._limited = {topic.name: topic for topic in self._topics}
        """The topics with the limits that the dispatcher applies."""
        # If Redis does not answer now, the first report reads the limits that were changed before this worker began.
        with suppress(RmqError):
            self.limit(connections.get_broker("worker").run(read_changed_limits()))
        name_worker(self.dispatcher.owner)
        self.coordinator = self._new_coordinator(threads)
        self.dispatcher.thread_watch.add("coordinator", self.coordinator.is_alive, self.coordinator.revive)
        self._actions = BackgroundActions(self.dispatcher.owner, options.run_parts)
        self._duties = self._new_duties(duties_broker, times)
        # The supervisor settles what an owner had in flight, so a process that dies before this line has nothing to
        # settle.
        if notes is not None:
            notes.owner = self.dispatcher.owner

    def _new_coordinator(self, threads: int) -> Coordinator:
        worker = Worker(
            id=self.dispatcher.owner,
            host=socket.gethostname(),
            pid=os.getpid(),
            started=time.time(),
            threads=threads,
            topics=topic_slots(self._served),
        )
        token = self._notes.token if self._notes is not None else uuid4().hex
        return coordinators.coordinator_maker()(worker, self.dispatcher.own, self.dispatcher.disown, token)

    def _new_dispatcher(
        self, options: ProcessOptions, threads: int, times: history.TimesCount | None
    ) -> Dispatcher:
        config = self._config
        callbacks = WorkerCallbacks(beat=self._beat, watcher=self._reporter)
        if times:
            callbacks = callbacks._replace(handed_out=times.note, took=times.note_calls)
        shutdown_timeout = options.shutdown_timeout
        if shutdown_timeout is None:
            shutdown_timeout = config.consumer.shutdown_timeout
        return Dispatcher(
            connections.get_broker("worker"),
            self._topics,
            listener_registry.listeners(),
            WorkerOptions(
                threads=threads,
                burst=options.burst,
                shutdown_timeout=shutdown_timeout,
                poll_seconds=config.consumer.poll_interval,
                max_messages=options.max_messages,
                max_idle_time=options.max_idle_time,
            ),
            hooks=hooks(),
            notes=self._notes,
            ownership=AssignmentCallbacks(
                settled=lambda: self.coordinator.wait_settled(0.0),
                confirmed=lambda: self.coordinator.confirmed(),  # noqa: PLW0108 - it is made afterwards
                leaving=self._leave,
                on_moved=self._record_move,
            ),
            callbacks=callbacks,
        )

    def _new_duties(self, broker: Broker, times: history.TimesCount | None) -> list[DutyThread]:
        """Return a thread of duties for Redis, and one for each database that duties use."""
        minutes = round((self._config.history_retention or 0) / 60)
        everything = [connections.with_present_slots(topic) for topic in self._config.topics.values()]
        served = {topic.name for topic in self._topics}
        of_redis: list[Duty] = [
            # The first, because a duty that has not begun does nothing at the end.
            *([times.flushing] if times else []),
            UnservedTopics(broker, [topic for topic in everything if topic.name not in served]),
            *trim_dead(broker, everything, self._slots_to_look_after),
            *history.sampling(
                broker,
                everything,
                minutes,
                self._may_sample,
                partial(connections.with_former_slots, most=history.MOST_SLOTS),
            ),
            *schedules.duties(),
            self._keep_definitions,
            ReportDuty(
                broker,
                self.dispatcher.owner,
                self._threads,
                self._config.code_version,
                self.dispatcher.batches,
                memory_mib,
                self._state,
                self.obey,
                self._parent or 0,
                self.limit,
                self._actions.begin_if_needed,
            ),
        ]
        relaying = relay.duties() if self._config.uses_outbox else []
        databases = listener_registry.once_databases()
        forgetting = once.forgetting(self._topics, databases, self._config.once_retention, self._may_sample)
        return [DutyThread(of_redis), *threads_of_duties((*forgetting, *relaying))]

    def _keep_definitions(self) -> Generator[float, None, None]:
        """Look now and then whether Redis still has the definitions of topics, which are then registered again."""
        while True:
            connections.refresh_definitions()
            yield DEFINITIONS_SECONDS

    def run(self) -> int:
        """Join the other workers, work until stopped or done, and leave; return one of the exit codes."""
        self._beat()
        collect_less()
        self.coordinator.start()
        for duties in self._duties:
            duties.start()
        try:
            self.dispatcher.run()
        finally:
            self._actions.stop()
            for duties in self._duties:
                duties.stop()
            self._leave()
            if self._leaving is not None:
                # The thread gives up after LEAVE_SECONDS itself, and needs a moment to end.
                self._leaving.join(LEAVE_SECONDS + 0.5)
            # A database that does not answer may keep its thread, and none of the others.
            until = time.monotonic() + LEAVE_SECONDS
            for duties in self._duties:
                duties.join(max(0.0, until - time.monotonic()))
            self._actions.join(max(0.0, until - time.monotonic()))
            self._reporter.stop(LEAVE_SECONDS)
            if (events := connections.events()) is not None:
                events.flush(LEAVE_SECONDS)
            self._beat()
        dispatcher = self.dispatcher
        if dispatcher.exceeded_hard_timeout:
            return HARD_TIMEOUT_EXCEEDED
        if dispatcher.forced:
            return FORCED
        enough = self._max_messages is not None and dispatcher.processed >= self._max_messages
        return RECYCLE if self._wants_successor or enough else DONE_FOR_GOOD

    def stop(self) -> None:
        """Let running listeners end, and end with ``RECYCLE``. Safe in signal handlers."""
        self._wants_successor = True
        self.dispatcher.stop()

    def _record_move(self, topic: str) -> None:
        self._moved = True
        self._next_look = 0.0

    def _load_slots(self) -> bool:
        """Read the current slots of the topics, and return whether they have changed."""
        registered = connections.get_broker("worker").definitions()
        served = [as_registered(topic, registered.get(topic.name, {})) for topic in self._topics]
        # The end of a re-slotting is not announced.
        self._moved = any(
            len(slot_counts(registered[topic.name])) > 1 for topic in self._topics if topic.name in registered
        )
        changed, self._served = served != self._served, served
        return changed

    def _follow(self) -> None:
        """Publish which slots this worker serves, if topics were re-slotted."""
        try:
            if self._load_slots():
                self._publish()
                logger.info("The slot count of a topic has changed", extra={"rmq_event": "moved"})
        except RmqError:
            # The next check tries again.
            self._moved = True

    def obey(self, request: WorkerRequest) -> None:
        """Do what a person has asked of this worker. Any thread may call it."""
        if request == "stop":
            self._is_stopping = True
            if self._notes is not None and self._parent is not None:
                self._notes.ask_for_stop()
            else:
                self.stop()
            return
        with self._publishing:
            self._is_quiet = request == "quiet"
        self._publish()

    def limit(self, changed: Mapping[str, ChangedLimits]) -> None:
        """Apply the limits of topics that were changed at run time, and those of the settings to all others."""
        now = {topic.name: limited(topic, changed.get(topic.name)) for topic in self._topics}
        different = [topic for name, topic in now.items() if topic != self._limited[name]]
        if different:
            self._limited = now
            self.dispatcher.change_limits(different)
            logger.info(
                "The limits of these topics have changed: %s",
                ", ".join(topic.name for topic in different),
                extra={"rmq_event": "limits_changed", "rmq_topics": [topic.name for topic in different]},
            )

    def _publish(self) -> None:
        """Publish the topics that this worker serves: none while it is quiet, so that others get its slots."""
        # Two threads publish, and what the last one publishes has to be what holds.
        with self._publishing:
            self.coordinator.announce(topics=[] if self._is_quiet else self._served)

    def _state(self) -> str:
        if self._is_stopping or self._wants_successor:
            return "stopping"
        return "quiet" if self._is_quiet else "working"

    def _leave(self) -> None:
        """Let other workers take the slots while this one settles its deliveries."""
        if self._leaving is None:
            # The server of the coordinator may be unavailable, and must not keep the dispatcher from settling.
            self._leaving = start_daemon(partial(self.coordinator.stop, LEAVE_SECONDS), "rmq-leaving")

    def _slots_to_look_after(self, topic: Topic) -> Sequence[range]:
        """Return the slots that only this worker looks after: those that it owns, or its share of slots without owners."""
        me = self.dispatcher.owner
        if topic.serial and topic.name in self.dispatcher.topics:
            return self.coordinator.owned().get(topic.name, ())
        live_workers = [member.worker for member in self.coordinator.members()]
        serving = [one.id for one in live_workers if any(topic.name == each.name for each in one.topics)]
        # Each worker computes its share from the list that all of them have, so they need not ask each other.
        sharing = sorted(serving or [one.id for one in live_workers])
        return (
            [range(sharing.index(me), connections.with_present_slots(topic).slots, len(sharing))]
            if me in sharing
            else ()
        )

    def _may_sample(self, topic: Topic) -> bool:
        """Return whether this worker owns slot 0; of topics without owners, any worker may sample."""
        if not (topic.serial and topic.name in self.dispatcher.topics):
            return True
        return any(0 in run for run in self.coordinator.owned().get(topic.name, ()))

    def _beat(self) -> None:
        now = time.monotonic()
        is_look = now >= self._next_look
        if is_look and self.coordinator.wait_settled(0.0):
            self._settled_at = now
        # rule: beats_without_all_its_threads
        if self._notes is not None and not self.dispatcher.thread_watch.is_whole:
            # The watchdog also counts from here.
            self._notes.unready()
        elif self._notes is not None:
            # Slots move whenever a worker joins or leaves; only a worker that stays without them is not
            # ready.
            is_ready = now - self._settled_at < UNSETTLED_SECONDS
            self._notes.beat(self.dispatcher.processed, is_ready and not self._is_stuck)
        if not is_look:
            return
        self.coordinator.note_full(self.dispatcher.full_topics(FULL_SECONDS))
        self._is_stuck = bool(self.dispatcher.full_topics(STUCK_SECONDS))
        self._next_look = now + LOOK_SECONDS
        if self._moved:
            self._follow()
        # No one would replace this process, or settle its messages after its death.
        if self._parent is not None and os.getppid() != self._parent:
            logger.error("The parent process has died; stopping", extra={"rmq_event": "orphaned"})
            self._parent = None
            self.stop()
        if self._max_memory is not None and (used := memory_mib()) > self._max_memory:
            self._exceed_memory(used, self._max_memory)

    def _exceed_memory(self, used: float, limit: int) -> None:
        """End the process because it uses more MiB than its limit, if it has processed a message."""
        # If processes need more before their first message, each would be replaced before it had consumed anything.
        if self.dispatcher.processed:
            logger.info(
                "Memory use of %.0f MiB is above the limit of %d MiB; the process is replaced",
                used,
                limit,
                extra={"rmq_event": "max_memory"},
            )
            self._max_memory = None
            self.stop()
        elif not self._is_too_large:
            self._is_too_large = True
            logger.error(
                "Memory use of %.0f MiB before the first message is above the limit of %d MiB; the process is replaced "
                "after its first messages. Raise --max-memory",
                used,
                limit,
                extra={"rmq_event": "max_memory"},
            )


def memory_mib() -> float:
    """Return the resident memory of this process in MiB; if the system does not report it, its maximum so far."""
    try:
        pages = int(Path("/proc/self/statm").read_bytes().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1_048_576
    except (OSError, ValueError, IndexError):
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most / (1_048_576 if sys.platform == "darwin" else 1024)
