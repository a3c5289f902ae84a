"""The steps by which each tick of a schedule becomes one message.

Any number of processes may take them at the same time, and each may die between any two steps. A step that another process has
taken changes nothing: Redis holds the state of each schedule, and each slot holds the latest tick of each schedule that was put
into it. Which tick comes next, also after some were missed, is decided in ``tick_times``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.commands.schedules import change_schedule, plan_tick, read_schedules, settle_tick
from django_rmq.core.commands.ticks import put_tick, retract
from django_rmq.core.log import LogThrottle
from django_rmq.core.model.body_codec import encode_body
from django_rmq.core.model.envelope import Envelope, derived_origin, encode_envelope
from django_rmq.core.model.schedule import (
    ScheduleRecord,
    ScheduleRecords,
    instant_text,
    local_times_text,
    tick_member,
)
from django_rmq.core.model.send_results import SendResult
from django_rmq.core.model.topic import Topic, former_slot_counts, slot_counts
from django_rmq.core.producer.placement import Outgoing, basis_of, check_stored_basis, slot_crc, slot_of_crc
from django_rmq.core.schedules.tick_times import local_time, next_instant, next_tick
from django_rmq.exceptions import (
    CallerError,
    ConfigurationError,
    RmqError,
    SlotMoved,
    TopicFull,
    UnknownTopic,
    Unreadable,
)

logger = logging.getLogger("django_rmq.schedules")

LONGEST_PAUSE = 5.0
"""The maximum number of seconds between two reads of the schedules."""


class Stepper:
    """Takes the steps that are due, of the schedules of ``topics``.

    ``sent`` is called with each message that was written.
    """

    def __init__(
        self,
        broker: Broker,
        topics: Mapping[str, Topic],
        sent: Callable[[str, SendResult], None] = lambda topic, result: None,
    ) -> None:
        self._broker = broker
        self._topics = topics
        self._sent = sent
        self._log_throttled = LogThrottle(logger)

    def step(self, also: str = "") -> float:
        """Take one step of each schedule; return the seconds until there is another one.

        ``also``: the name of a schedule whose topic may be any. Raises ``RmqError``.
        """
        now_ms = self._broker.now_ms()
        return self.step_each(self._broker.run(read_schedules()), now_ms, also)

    def step_each(self, records: ScheduleRecords, now_ms: int, also: str = "") -> float:
        """Take one step of each of these schedules, which were just read; see ``step``."""
        pause = LONGEST_PAUSE
        for name, problem in records.unreadable.items():
            self._log_throttled(name, f"Schedule {name} does not run: %s", Unreadable(problem))
        trouble: RmqError | None = None
        for record in records:
            # The workers that consume the topic of a schedule take its steps.
            if record.schedule.topic not in self._topics and record.name != also:
                continue
            try:
                pause = min(pause, self._step(record, now_ms))
            except CallerError as error:
                self._log_throttled(record.name, f"Schedule {record.name} does not run: %s", error)
            except RmqError as error:
                trouble = trouble or error  # a node may be down: the other schedules continue
        if trouble is not None:
            raise trouble
        return pause

    def settle(self, also: str = "") -> None:
        """Take the steps that are due now, at most 100 of each schedule: workers take the others. Raises ``RmqError``."""
        for _ in range(100):
            if self.step(also) > 0:
                return

    def _step(self, record: ScheduleRecord, now_ms: int) -> float:
        if record.state == "retracting":
            self._retract(record)
            return 0.0
        # The process that planned the tick may have died before it wrote it, so any process writes it.
        if record.state == "writing":
            return 0.0 if self._write(record) else 1.0
        if record.is_paused:
            return LONGEST_PAUSE
        if record.state == "written" and record.at > now_ms:
            return (record.at - now_ms) / 1000
        ran = record.ran(now_ms)
        instant = next_instant(record.schedule, record.at, now_ms, ran)
        if instant is None:
            return LONGEST_PAUSE
        out, local_times = self.message(record, instant), (local_time(record.schedule, instant), *ran)
        planned = replace(
            record,
            state="writing",
            at=instant,
            topic=out.topic.name,
            crc=out.crc or 0,
            local_times=local_times,
        )
        answer = self._broker.run(
            plan_tick(
                record.name,
                record.generation,
                record.at,
                instant,
                planned.topic,
                planned.crc,
                local_times_text(local_times),
            )
        )
        # If another process was faster, its record is read in the next step.
        if answer == "planned":
            self._write(planned)
        return 0.0 if answer != "early" else 0.05

    def message(self, record: ScheduleRecord, instant: int) -> Outgoing:
        """Return the message of a tick. Raises ``InvalidMessage``, ``ConfigurationError`` and ``UnknownTopic``."""
        headers = {"schedule": record.name, "tick": instant_text(instant)}
        schedule, member = record.schedule, tick_member(record.name, instant)
        # If Redis loses a tick, it is written again with the same origin: a listener with `once` recognises it.
        # rule: a_tick_written_again_is_another_message
        origin = derived_origin(instant, f"{self._broker.prefix} {member.decode()}")
        topic = self._topic(schedule.topic)
        if not (topic.takes_instants and topic.keyed):
            raise ConfigurationError(
                f"topic {topic.name} has the TYPE {topic.type.value} and the IDENTITY {topic.identity}: "
                "messages with a key and a due time are needed"
            )
        return message(topic, member, schedule.body, headers, instant, origin)

    def _topic(self, name: str) -> Topic:
        """Return the topic as the settings declare it, or as Redis has it."""
        if (topic := self._topics.get(name)) is not None:
            return topic
        if registered := self._broker.definitions().of(name):
            return Topic.registered(name, registered, registered["slots"])
        raise UnknownTopic(f"no topic {name!r} is declared or registered in Redis")

    def _places(self, topic: Topic, crc: int) -> list[tuple[Topic, int]]:
        """Return the slots that may have been given a tick, those of earlier slot counts first."""
        registered = self._broker.definitions().of(topic.name)
        counts = [*former_slot_counts(registered), *slot_counts(registered)] if registered else [topic.slots]
        return [(replace(topic, slots=count), slot_of_crc(crc, count)) for count in dict.fromkeys(counts)]

    def _write(self, record: ScheduleRecord) -> bool:
        """Write the planned tick into its slot; return whether it is there."""
        out = self.message(record, record.at)
        # The slots of earlier slot counts come first: one that got the tick before a re-slotting answers `known`.
        for topic, slot in self._places(out.topic, record.crc):
            try:
                answer = self._broker.run(
                    put_tick(
                        topic,
                        slot,
                        record.name,
                        record.generation,
                        record.at,
                        out.member,
                        out.envelope or b"",
                    )
                )
            except SlotMoved:
                # The topic was re-slotted; the tick belongs into the slot of the next slot count.
                continue
            if answer == "stale" and plan_again(self._broker, record):  # rule: a_stale_tick_counts_as_written
                # The schedule was just changed, or a fail-over has lost the last changes of its key, but not those of the slot.
                return True
            if answer == "full":
                error = TopicFull(
                    f"slot {slot} of topic {topic.name} is full: MAX_BACKLOG = {topic.max_backlog}"
                )
                self._log_throttled(record.name, f"Schedule {record.name} waits: %s", error)
                return False
            if answer == "stored":
                self._sent(
                    topic.name, SendResult(topic.name, slot, out.member, status="stored", score=record.at)
                )
            self._broker.run(settle_tick(record.name, record.generation, record.at, "written"))
            return True
        return False

    def _retract(self, record: ScheduleRecord) -> None:
        """Take back the latest tick, unless a consumer has taken it."""
        answers: set[str] = set()
        if record.topic:
            try:
                topic = self._topic(record.topic)
            except UnknownTopic:
                pass  # the topic is neither declared nor registered, so nothing is left of its tick
            else:
                member = tick_member(record.name, record.at)
                answers = {
                    self._broker.run(retract(place, slot, record.name, record.generation, record.at, member))
                    for place, slot in self._places(topic, record.crc)
                }
        # A re-slotting may have moved the tick from the slot that was given it, so the slot that removes it decides.
        outcome = "written" if "written" in answers and "removed" not in answers else "removed"
        self._broker.run(settle_tick(record.name, record.generation, record.at, outcome))


def plan_again(broker: Broker, record: ScheduleRecord) -> bool:
    """Take back the latest tick of a schedule and plan it again; return whether this process was the first to do so."""
    before = local_times_text(each for each in record.local_times if each.instant == record.last)
    return broker.run(change_schedule(record.name, "walls", before)) == "changed"


def message(
    topic: Topic, member: bytes, body: object, headers: dict[str, str], score: int, origin: str
) -> Outgoing:
    """Return a message of a schedule. Its due time may have passed. Raises ``InvalidMessage``."""
    basis = basis_of(topic, body, None)
    envelope = Envelope(
        encode_body(topic, body),
        slot_basis=None if basis is None else check_stored_basis(basis),
        headers=headers,
        origin=origin if topic.origin else None,
    )
    crc = slot_crc(basis, member)
    return Outgoing(topic, slot_of_crc(crc, topic.slots), member, score, encode_envelope(envelope), crc=crc)


def next_run(record: ScheduleRecord, now_ms: int) -> int | None:
    """Return when a schedule is due next (ms), or None if it is paused, removed, or never due again."""
    if record.is_paused or record.is_removed:
        return None
    if record.state in ("writing", "written") and record.at > now_ms:
        return record.at
    return next_tick(record.schedule, max(record.at, now_ms))


def lateness_ms(record: ScheduleRecord, now_ms: int) -> int:
    """Return how late the schedule is: of a tick that should have been written by now, or of the latest one."""
    if record.is_paused or record.is_removed or record.state == "retracting":
        return 0
    if record.state == "writing":
        return max(0, now_ms - record.at)
    following = next_tick(record.schedule, record.at)
    overdue = 0 if following is None else now_ms - following
    return overdue if overdue > 0 else record.late_ms
