"""Declarations: the schedules in Redis are kept equal to those that live workers declare.

Each worker renews its declarations now and then. A declaration that no worker has renewed for a while is gone with its version of
the project: the schedule is removed, or a worker that declares it in another way replaces it. So during a deployment, while
versions run side by side, no version removes what another one declares, and a schedule that Redis has lost comes back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping

from django_rmq.core.commands.broker_interface import Broker, walk
from django_rmq.core.commands.schedules import change_schedule, read_schedules, renew_schedule
from django_rmq.core.log import safe_logger
from django_rmq.core.model.schedule import Schedule, ScheduleRecord, ScheduleRecords
from django_rmq.core.schedules.stepper import LONGEST_PAUSE, plan_again
from django_rmq.core.schedules.tick_times import has_moved
from django_rmq.exceptions import ConfigurationError

logger = safe_logger("django_rmq.schedules")

RENEW_SECONDS = 30.0
"""Seconds after which a worker renews its declaration of a schedule, unless another worker has renewed it."""

GONE_SECONDS = 120.0
"""Seconds without a renewal after which no worker declares a schedule as it is."""

ENDED_SECONDS = 30.0
"""The same after a worker that declared the schedule has ended: another one that declares it renews it within some seconds."""

ZONES_SECONDS = 3600.0
"""Seconds between two comparisons of waiting ticks with the rules of their time zones."""


class Declarations:
    """Compares the schedules that this process declares with those in Redis, and changes Redis.

    ``topics``: the names of the topics of this project. A schedule of another topic is left as it is, because it
    may belong to another project. ``clock`` returns seconds.
    """

    def __init__(
        self,
        broker: Broker,
        declared: Mapping[str, Schedule],
        topics: Collection[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._broker = broker
        self._clock = clock
        self._declared = {name: each for name, each in declared.items() if each.topic in topics}
        self._ours = topics
        self._silent: dict[str, tuple[int, float]] = {}
        """Schedule that others declare -> the time of their last renewal, and since when this process has known it."""
        self._looked = float("-inf")
        self._zones_at = float("-inf")

    def start(self) -> None:
        """Declare the schedules as a worker that starts: a new version of a schedule replaces the present one at once.

        An older version, which the present one has replaced, does not, as long as there are workers with the present version.
        """
        now_ms, read = self._broker.now_ms(), self._read()
        records = {record.name: record for record in read}
        for name, each in self._declared.items():
            # A later version may have written it, whose workers read it.
            if name in read.unreadable:
                continue
            record = records.get(name)
            if record is None or record.is_removed or record.declared == each:
                self._declare(each, record)
            # rule: an_older_version_replaces_the_present_one
            elif record.former == each.digest and now_ms - record.renewed_ms < GONE_SECONDS * 1000:
                logger.info(
                    "Schedule %s of topic %s stays %s, which workers of a newer version declare; "
                    "this worker declares an older version of it",
                    name,
                    record.declared.topic,
                    record.schedule.timing,
                    extra={"rmq_event": "schedule_outdated", "rmq_topic": record.declared.topic},
                )
            else:
                self._declare(each, record)
        for record in self._undeclared(records.values()):
            logger.info(
                "Schedule %s of topic %s is not declared here; it is removed when no worker has declared it "
                "for %d s",
                record.name,
                record.declared.topic,
                GONE_SECONDS,
                extra={"rmq_event": "schedule_undeclared", "rmq_topic": record.declared.topic},
            )
        self._replan_changed_zones(records.values(), now_ms)

    def reconcile(self, records: ScheduleRecords, now_ms: int) -> bool:
        """Compare the schedules in Redis with those that are declared here, and change them; return whether any was changed."""
        now = self._clock()
        if now - self._looked > 6 * LONGEST_PAUSE:
            # rule: an_outage_counts_as_silence
            self._silent.clear()  # Redis was unavailable, so other workers could not renew their declarations.
        self._looked = now
        stored = {record.name: record for record in records}
        self._renew(stored, now_ms)
        changed = [
            name
            for name, each in self._declared.items()
            if name not in records.unreadable and self._restore(each, stored.get(name), now)
        ]
        changed += [record.name for record in self._undeclared(stored.values()) if self._remove(record, now)]
        for name in self._silent.keys() - stored.keys():
            del self._silent[name]
        return self._replan_changed_zones(stored.values(), now_ms) or bool(changed)

    def end(self) -> None:
        """Note that this worker ends. Others that declare the same schedules renew them within some seconds."""
        records = {record.name: record for record in self._read()}
        self._note_declared(
            (
                name
                for name, each in self._declared.items()
                if name in records and records[name].declared == each
            ),
            ends=True,
        )

    @property
    def topics(self) -> set[str]:
        """The topics of the schedules that are declared here."""
        return {each.topic for each in self._declared.values()}

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do: no schedule is declared here, and Redis had none of these topics."""
        return not self._declared and not self._silent

    def _read(self) -> ScheduleRecords:
        return self._broker.run(read_schedules())

    def _undeclared(self, records: Iterable[ScheduleRecord]) -> list[ScheduleRecord]:
        return [
            record
            for record in records
            if record.name not in self._declared
            and not record.is_removed
            and record.declared.topic in self._ours
        ]

    def _renew(self, known: Mapping[str, ScheduleRecord], now_ms: int) -> None:
        """Renew the schedules that are declared here as Redis has them, unless another worker has just renewed them."""
        self._note_declared(
            name
            for name, each in self._declared.items()
            if name in known
            and known[name].declared == each
            and not 0 <= now_ms - known[name].renewed_ms < RENEW_SECONDS * 1000
        )

    def _note_declared(self, names: Iterable[str], *, ends: bool = False) -> None:
        """Renew schedules. Raises the first error: others remove a schedule whose renewals Redis refuses, so this is logged."""
        list(walk(self._broker, (renew_schedule(name, ends=ends) for name in names)))

    def _restore(self, each: Schedule, record: ScheduleRecord | None, now: float) -> bool:
        """Declare a schedule that Redis does not have, or has in a version that no worker declares."""
        if record is None or record.is_removed:
            # rule: a_lost_schedule_stays_lost
            logger.warning(
                "Schedule %s of topic %s was not known to Redis; it is declared again",
                each.name,
                each.topic,
                extra={"rmq_event": "schedule_lost", "rmq_topic": each.topic},
            )
        elif record.declared == each or not self._is_gone(record, now):
            return False
        return self._declare(each, record)

    def _declare(self, each: Schedule, record: ScheduleRecord | None) -> bool:
        is_moved = record is None or each.changed(record.override).timing != record.schedule.timing
        # If another worker renews its declaration between the read and this call, the call changes nothing.
        renewed = None if record is None or record.is_removed else record.renewed_ms
        answer = self._broker.run(
            change_schedule(each.name, "spec", each.text, from_now=is_moved, renewed=renewed)
        )
        if answer == "changed":
            logger.info(
                "Schedule %s of topic %s is declared: %s",
                each.name,
                each.topic,
                each.timing,
                extra={"rmq_event": "schedule_declared", "rmq_topic": each.topic},
            )
        return answer == "changed"

    def _remove(self, record: ScheduleRecord, now: float) -> bool:
        if not self._is_gone(record, now):  # rule: an_old_worker_removes_what_a_newer_one_declares
            return False
        answer = self._broker.run(change_schedule(record.name, "removed", "1", renewed=record.renewed_ms))
        if answer == "changed":
            logger.info(
                "Schedule %s of topic %s is removed, because it is no longer declared by a worker",
                record.name,
                record.declared.topic,
                extra={"rmq_event": "schedule_removed", "rmq_topic": record.declared.topic},
            )
        return answer == "changed"

    def _is_gone(self, record: ScheduleRecord, now: float) -> bool:
        """Return whether this process has seen for long enough that no worker declares a schedule as it is."""
        renewed_ms, since = self._silent.get(record.name, (-1, now))
        # A renewal since the last comparison begins the silence again.
        if renewed_ms != record.renewed_ms:
            renewed_ms, since = self._silent[record.name] = record.renewed_ms, now
        return now - since >= (GONE_SECONDS if renewed_ms else ENDED_SECONDS)

    def _replan_changed_zones(self, records: Iterable[ScheduleRecord], now_ms: int) -> bool:
        """Plan ticks again whose time zone has other rules now; return whether there were any."""
        now, has_changed = self._clock(), False
        if now < self._zones_at:
            return False
        self._zones_at = now + ZONES_SECONDS
        for record in records:
            try:
                is_due = record.schedule.topic in self._ours and has_moved(record, now_ms)
            except ConfigurationError:
                continue  # this system does not know its time zone; the stepper logs that
            if is_due and plan_again(self._broker, record):
                has_changed = True
                logger.info(
                    "Schedule %s of topic %s is planned again, because the rules of time zone %s have changed",
                    record.name,
                    record.schedule.topic,
                    record.schedule.timezone,
                    extra={"rmq_event": "schedule_moved", "rmq_topic": record.schedule.topic},
                )
        return has_changed
