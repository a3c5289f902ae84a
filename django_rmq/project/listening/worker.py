"""Consuming from Django: which topics a worker serves, and what surrounds its listeners.

Builds worker processes from the settings and gives them their Django hooks; the consumer knows none.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from django.db import close_old_connections
from django.db import connections as databases

from django_rmq.core.consumer import Dispatcher, Hooks
from django_rmq.core.consumer.duties import Duties, trim_dead
from django_rmq.core.consumer.limits import return_permits
from django_rmq.core.consumer.notes import Notes, settle
from django_rmq.core.consumer.supervisor import RECYCLE, Supervisor
from django_rmq.core.coordination import Worker, topic_slots
from django_rmq.core.logs.complaints import Complaints
from django_rmq.core.logs.safe import safe_logger
from django_rmq.core.telling import history
from django_rmq.core.topics.definitions import as_registered, register_topics
from django_rmq.core.words.messages import Topic, slot_counts
from django_rmq.exceptions import ConfigurationError, RmqError, ServerTrouble, SlotMoved
from django_rmq.project import connections
from django_rmq.project.listening import registry
from django_rmq.project.settings import get_config
from django_rmq.project.watching import announcing

logger = safe_logger("django_rmq.consumer")

LEAVE_SECONDS = 2.0
"""How long leaving the other workers may take; past that their session with us runs out."""

START_SECONDS = 0.5
"""How long a new process waits for a server that does not answer before it asks again."""

LOOK_SECONDS = 0.5
"""Between two looks at the parent process, at the memory in use and at the coordinator."""

UNSETTLED_SECONDS = 10.0
"""A worker that does not know its slots for so long is not ready."""


def chosen_topics(names: Iterable[str] = (), exclude: Iterable[str] = ()) -> list[Topic]:
    """Return the topics to serve: those named, or all that have a listener, less the excluded ones.

    Imports the listeners. Raises ``ConfigurationError`` for listeners that cannot be imported and for a
    named topic without one, and ``UnknownTopic`` for a name that is not declared.
    """
    config = get_config()
    failed = registry.discover()
    if failed:
        reasons = "; ".join(f"{one.module}: {one.reason}" for one in failed)
        raise ConfigurationError(f"listeners cannot be imported: {reasons}") from failed[0].error
    listeners = registry.listeners()
    for name in listeners:
        config.topic(name)
    excluded = {config.topic(name).name for name in exclude}
    named = [config.topic(name) for name in names]
    for topic in named:
        if topic.name not in listeners:
            raise ConfigurationError(
                f"topic {topic.name} has no listener: write one with @listener({topic.name!r}) "
                f"in the {config.autodiscover or 'listeners'}.py of an installed app"
            )
    wanted = named or [topic for topic in config.topics.values() if topic.name in listeners]
    chosen = [topic for topic in dict.fromkeys(wanted) if topic.name not in excluded]
    if not chosen:
        raise ConfigurationError("there is no topic to consume: no declared topic has a listener")
    without = sorted(
        topic.name
        for topic in config.topics.values()
        if topic.listener and topic.name not in listeners and not named
    )
    if without:
        logger.warning("Topics without a listener are not consumed: %s", ", ".join(without))
    return chosen


@dataclass(frozen=True, slots=True)
class Options:
    """How a worker process consumes. Times in seconds; None: the settings', or never."""

    threads: int | None = None
    burst: bool = False
    shutdown_timeout: float | None = None
    max_messages: int | None = None
    max_memory: int | None = None
    """MiB of resident memory."""
    max_idle_time: float | None = None


def check_start(topics: Iterable[Topic]) -> list[Topic]:
    """Make sure, before any process is forked, that workers could start; return the topics that they can consume.

    A topic whose registered definition cannot be read is left out, with an error in the log.

    Raises ``ConfigurationError`` where workers could not come together or a strict DURABILITY is not met,
    ``TopicMismatch`` where Redis knows another definition, and ``ServerTrouble`` where it (or ZooKeeper) does
    not answer.
    """
    chosen = list(topics)
    connections.check_coordinator()
    broker = connections.get_broker("worker")
    broker.ping()
    _look_at_server(chosen)
    known = broker.definitions()
    for topic in chosen:
        if topic.name in known.unreadable:
            logger.error(
                "Topic %s is not consumed: %s",
                topic.name,
                known.problem(topic.name),
                extra={"rmq_event": "unreadable", "rmq_topic": topic.name},
            )
    readable = [topic for topic in chosen if topic.name not in known.unreadable]
    if not readable:
        raise ConfigurationError("no topic can be consumed: Redis holds no definition that can be read")
    register_topics(broker, readable)
    return readable


def _look_at_server(topics: list[Topic]) -> None:
    """Warn of what may lose messages; refuse it where DURABILITY is strict."""
    found = connections.server_flaws(topics)
    if found and get_config().durability == "strict":
        reasons = " ".join(f"{flaw.message} {flaw.hint}" for flaw in found)
        raise ConfigurationError(f'RMQ["DURABILITY"] is "strict": {reasons}')
    for flaw in found:
        logger.warning("%s %s", flaw.message, flaw.hint, extra={"rmq_event": "server_flaw"})


def before_fork() -> None:
    """Close what no two processes may share."""
    databases.close_all()
    connections.close()


class WorkerProcess:
    """One worker in this process: a dispatcher, and the coordinator that says which slots are its own.

    Make it after the last fork. ``parent`` is the process without which it shall not go on. ``notes`` is
    memory that it shares with it.
    """

    def __init__(
        self,
        topics: Iterable[Topic],
        options: Options,
        *,
        notes: Notes | None = None,
        parent: int | None = None,
    ) -> None:
        config = get_config()
        self._topics = chosen = list(topics)
        """As the settings have them."""
        self._moved = True
        """Some topic may have other slots than the others were told."""
        self._served: list[Topic] = []
        """As the others were told."""
        self._load_slots()
        threads = options.threads or config.consumer.threads
        shutdown_timeout = options.shutdown_timeout
        if shutdown_timeout is None:
            shutdown_timeout = config.consumer.shutdown_timeout
        self._notes = notes
        self._parent = parent
        self._max_memory = options.max_memory
        self._max_messages = options.max_messages
        self._next_look = 0.0
        self._settled_at = float("-inf")
        self._wants_successor = False
        self._leaving: threading.Thread | None = None
        self._reporter = announcing.Reporter()
        duties_broker, hours = connections.get_broker("coordinator"), config.history.hours
        times = history.TimesCount(duties_broker) if hours else None
        counting: dict[str, Any] = {"handed_out": times.note, "took": times.note_calls} if times else {}
        self.dispatcher = Dispatcher(
            connections.get_broker("worker"),
            chosen,
            registry.listeners(),
            threads=threads,
            hooks=Hooks(
                before=close_old_connections,
                after=close_old_connections,
                end=databases.close_all,
                around=announcing.around,
            ),
            burst=options.burst,
            shutdown_timeout=shutdown_timeout,
            poll_seconds=config.consumer.poll_interval,
            max_messages=options.max_messages,
            max_idle_time=options.max_idle_time,
            beat=self._beat,
            settled=lambda: self.coordinator.wait_settled(0.0),
            confirmed=lambda: self.coordinator.confirmed(),  # noqa: PLW0108 - it is made below
            leaving=self._leave,
            on_moved=self._note_move,
            swept=[connections.present(topic) for topic in config.topics.values() if topic not in chosen],
            notes=notes,
            watcher=self._reporter,
            **counting,
        )
        worker = Worker(
            id=self.dispatcher.owner,
            host=socket.gethostname(),
            pid=os.getpid(),
            started=time.time(),
            threads=threads,
            topics=topic_slots(self._served),
        )
        token = notes.token if notes is not None else uuid4().hex
        self.coordinator = connections.coordinator_maker()(
            worker, self.dispatcher.own, self.dispatcher.disown, token
        )
        self.dispatcher.lookout.add("coordinator", self.coordinator.is_alive, self.coordinator.revive)
        everything = [connections.present(topic) for topic in config.topics.values()]
        self._duties = Duties(
            [
                *trim_dead(duties_broker, everything, self._slots_to_look_after),
                *history.sampling(duties_broker, everything, hours, self._may_sample, connections.present),
                *([times.flushing] if times else []),
            ]
        )
        if notes is not None:
            notes.owner = worker.id

    def run(self) -> int:
        """Join, work until told to stop or done, leave; return 0, 1 (something had to be left behind) or ``RECYCLE``."""
        self._beat()
        # What is loaded by now stays: the collector need not look at it again between messages.
        gc.collect()
        gc.freeze()
        self.coordinator.start()
        self._duties.start()
        try:
            self.dispatcher.run()
        finally:
            self._duties.stop()
            self._leave()
            if self._leaving is not None:
                self._leaving.join(LEAVE_SECONDS + 0.5)
            self._duties.join(LEAVE_SECONDS)
            self._reporter.stop(LEAVE_SECONDS)
            if (events := connections.events()) is not None:
                events.flush(LEAVE_SECONDS)
            self._beat()
        dispatcher = self.dispatcher
        if dispatcher.forced or dispatcher.exit_asked:
            return 1
        enough = self._max_messages is not None and dispatcher.processed >= self._max_messages
        return RECYCLE if self._wants_successor or enough else 0

    def stop(self) -> None:
        """Let running listeners end, and end with ``RECYCLE``. Safe in signal handlers."""
        self._wants_successor = True
        self.dispatcher.stop()

    def _note_move(self, topic: str) -> None:
        self._moved = True
        self._next_look = 0.0

    def _load_slots(self) -> bool:
        """Look which slots the topics have by now, and return whether that has changed."""
        registered = connections.get_broker("worker").definitions()
        served = [as_registered(topic, registered.get(topic.name, {})) for topic in self._topics]
        # While a topic is re-slotted nobody says when that is over.
        self._moved = any(
            len(slot_counts(registered[topic.name])) > 1 for topic in self._topics if topic.name in registered
        )
        changed, self._served = served != self._served, served
        return changed

    def _follow(self) -> None:
        """Tell the others which slots we serve, where topics were re-slotted."""
        try:
            if self._load_slots():
                self.coordinator.announce(topics=self._served)
                logger.info("Topics have other slots by now", extra={"rmq_event": "moved"})
        except RmqError:
            self._moved = True

    def _leave(self) -> None:
        """Let others take our slots while we settle what is in hand."""
        if self._leaving is None:
            self._leaving = threading.Thread(
                target=self.coordinator.stop, args=(LEAVE_SECONDS,), name="rmq-leaving", daemon=True
            )
            self._leaving.start()

    def _slots_to_look_after(self, topic: Topic) -> Sequence[range]:
        """Return the slots that no other worker looks after: our own, or our share of those that nobody owns."""
        me = self.dispatcher.owner
        if topic.serial and topic.name in self.dispatcher.topics:
            return self.coordinator.owned().get(topic.name, ())
        crew = [member.worker for member in self.coordinator.members()]
        serving = [one.id for one in crew if any(topic.name == each.name for each in one.topics)]
        sharing = sorted(serving or [one.id for one in crew])
        return (
            [range(sharing.index(me), connections.present(topic).slots, len(sharing))]
            if me in sharing
            else ()
        )

    def _may_sample(self, topic: Topic) -> bool:
        """Return whether we own slot 0; of topics without owners anybody may try."""
        if not (topic.serial and topic.name in self.dispatcher.topics):
            return True
        return any(0 in run for run in self.coordinator.owned().get(topic.name, ()))

    def _beat(self) -> None:
        now = time.monotonic()
        is_look = now >= self._next_look
        if is_look and self.coordinator.wait_settled(0.0):
            self._settled_at = now
        if self._notes is not None and not self.dispatcher.lookout.is_whole:
            # The watchdog counts from here as well.
            self._notes.unready()
        elif self._notes is not None:
            # Slots move whenever a worker comes or goes; only who stays without them is not ready.
            self._notes.beat(self.dispatcher.processed, now - self._settled_at < UNSETTLED_SECONDS)
        if not is_look:
            return
        self._next_look = now + LOOK_SECONDS
        if self._moved:
            self._follow()
        if self._parent is not None and os.getppid() != self._parent:
            logger.error("The parent process is gone: ending", extra={"rmq_event": "orphaned"})
            self._parent = None
            self.stop()
        if self._max_memory is not None and (used := memory_mib()) > self._max_memory:
            logger.info(
                "%.0f MiB of memory are in use, more than %d: another process takes over",
                used,
                self._max_memory,
                extra={"rmq_event": "max_memory"},
            )
            self._max_memory = None
            self.stop()


def memory_mib() -> float:
    """Return the resident memory of this process; where the system does not tell, the most it ever had."""
    try:
        pages = int(Path("/proc/self/statm").read_bytes().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1_048_576
    except (OSError, ValueError, IndexError):
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most / (1_048_576 if sys.platform == "darwin" else 1024)


def run_child(topics: Iterable[Topic], options: Options, notes: Notes, parent: int) -> int:
    """Be a child of the supervisor: work until SIGTERM, or until the parent is gone; return the exit code."""
    asked: list[int] = []
    working: list[WorkerProcess] = []

    def ask(number: int, frame: object) -> None:
        # Asked twice is asked once: a group's signal comes from the system and from the parent.
        asked.append(number)
        if working:
            working[0].stop()

    signal.signal(signal.SIGTERM, ask)
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
        logger.error("A worker process cannot go on: %s", error, extra={"rmq_event": "trouble"})  # noqa: TRY400 - one line says it
        return 3
    except (ConfigurationError, SlotMoved) as error:
        logger.error("A worker process cannot go on: %s", error, extra={"rmq_event": "trouble"})  # noqa: TRY400 - one line says it
        return 2


def _begun(
    topics: Iterable[Topic], options: Options, notes: Notes, parent: int, asked: list[int]
) -> WorkerProcess | None:
    """Return a worker as soon as Redis (or the coordinator) answers; None: it was told to end before that."""
    complain = Complaints(logger)
    while not asked and os.getppid() == parent:
        try:
            return WorkerProcess(topics, options, notes=notes, parent=parent)
        except ServerTrouble as error:
            complain("server", "A worker process waits for its server (%s)", error)
            notes.beat(0, False)
            time.sleep(START_SECONDS)
    return None


def supervise(topics: Iterable[Topic], options: Options, **how: Any) -> Supervisor:
    """Return a supervisor of worker processes; ``how`` are its options."""
    chosen, parent = list(topics), os.getpid()
    threads = options.threads or get_config().consumer.threads

    def died(notes: Notes) -> int:
        if not notes.owner:
            return 0
        try:
            broker = connections.get_broker("coordinator")
            served = [connections.present(topic) for topic in chosen]
            settled = settle(broker, served, notes)
            return_permits(broker, served, notes.owner)
        finally:
            try:
                connections.end_session(notes.owner, notes.token)
            except ServerTrouble as error:
                logger.warning(
                    "Others take over from worker %s only when its session ends: %s", notes.owner, error
                )
        if settled.committed:
            logger.info(
                "Committed %d messages that a dead process had done",
                settled.committed,
                extra={"rmq_event": "committed_for", "rmq_messages": settled.committed},
            )
        if settled.charged:
            logger.warning(
                "Charged %d messages that a dead process was running as timed out",
                settled.charged,
                extra={"rmq_event": "charged_for", "rmq_messages": settled.charged},
            )
        return settled.released

    return Supervisor(
        child=lambda notes: run_child(chosen, options, notes, parent),
        make_notes=lambda: Notes(threads),
        died=died,
        before_fork=before_fork,
        **how,
    )


def ready_line(topics: Iterable[Topic], threads: int, processes: int = 1) -> str:
    """Return one line that says what is being consumed."""
    parts = ", ".join(f"{topic.name} ({topic.slots} slots)" for topic in topics)
    several = f" in each of {processes} processes" if processes > 1 else ""
    return f"Consuming {parts} with {threads} threads{several}"
