"""The oracle: the protocol in plain Python, the effect of every script on a slot, without a Redis server.

``OracleBroker`` answers every call as a Redis server does and keeps the same keyspace: the same key names,
members, scores and fields, byte for byte. It is the specification with which the Lua files are compared. It
lives in one process, and its content ends with that process.

Transitions are functions, grouped by module: ``sending``, ``taking``, ``ending``, ``claims``, ``people``,
``tending``, ``moving``, and those that change nothing: ``listing``, ``looking``, ``seeking``. Each states its
rules in the order of the Lua file of the same name, and shares them with others where Lua includes a
fragment.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar, cast

from django_rmq.core.calls.call import Call
from django_rmq.core.words.keys import events_channel, wake_channel, workers_channel
from django_rmq.core.words.servers import Server
from django_rmq.core.words.topics import Topic
from tests.oracle import (
    answers,
    claims,
    ending,
    history,
    inserting,
    limits,
    listing,
    looking,
    moving,
    people,
    results,
    schedules,
    seeking,
    sending,
    taking,
    tending,
    ticks,
    topics,
    upkeep,
    workers,
)
from tests.oracle.channels import Events, Wakeups
from tests.oracle.keyspace import Memory
from tests.oracle.pipeline import Pipeline

T = TypeVar("T")


class OracleBroker(Memory):
    """Runs every transition on dictionaries. ``core.calls`` explains arguments and answers.

    It is the table from a transition's name to its function.
    """

    in_memory = True

    send_merge = sending.send_merge
    send_replace = sending.send_replace
    send_fifo = sending.send_fifo
    insert = inserting.insert
    part_of_insert = inserting.part_of_insert
    ensure = sending.ensure

    acquire = taking.acquire
    acquire_all = taking.acquire_all
    held = taking.held
    prepare = taking.prepare

    commit = ending.commit
    commit_all = ending.commit_all
    rollback = ending.rollback
    release = ending.release
    extend = ending.extend
    progress = ending.progress
    expire = upkeep.expire
    promote = upkeep.promote

    claim = claims.claim
    renew = claims.renew
    ack = claims.ack
    fail_claimed = claims.fail_claimed
    return_claim = claims.return_claim
    read_claim = claims.read_claim
    hold_consumer = claims.hold_consumer
    leave_consumer = claims.leave_consumer
    count_consumers = claims.count_consumers
    driver_of_consumer = claims.driver_of_consumer

    replay = people.replay
    bury = people.bury
    remove = people.remove
    cancel = people.cancel
    discard = people.discard
    reschedule = people.reschedule
    purge = people.purge

    pause = tending.pause
    configure = tending.configure
    adopt = tending.adopt
    retire = tending.retire
    loose = tending.loose

    shut = moving.shut
    reopen = moving.reopen
    survey = moving.survey
    move_out = moving.move_out
    move_in = moving.move_in

    peek = listing.peek
    find = listing.find
    between = listing.between
    count = looking.count
    audit = looking.audit
    look = looking.look
    status = looking.status
    ranks = looking.ranks
    heads = looking.heads
    seek = seeking.seek

    definitions = topics.definitions
    define = topics.define
    redefine = topics.redefine
    undefine = topics.undefine
    note_slot_basis = topics.note_slot_basis
    has_slot_bases = topics.has_slot_bases

    beat = workers.beat
    leave = workers.leave
    assign = workers.assign
    roster = workers.roster

    tick = ticks.tick
    retract = ticks.retract

    read_schedules = schedules.read_schedules
    change_schedule = schedules.change_schedule
    renew_schedule = schedules.renew_schedule
    plan_tick = schedules.plan_tick
    settle_tick = schedules.settle_tick

    allow = limits.allow
    end_permits = limits.end_permits
    spend = limits.spend

    begin_answer = answers.begin_answer
    keep_answer = answers.keep_answer

    keep_result = results.keep_result
    result = results.result

    sample = history.sample
    claim_minute = history.claim_minute
    note_late = history.note_late
    note_times = history.note_times
    times = history.times
    keep_minute = history.keep_minute
    minutes = history.minutes

    def run(self, call: Call[T]) -> T:
        """Run a call and return its answer. Raises ``RmqError``."""
        return cast("T", getattr(self, call.name)(**call.given))

    def pipeline(self) -> Pipeline:
        """Return a pipeline, which collects calls; ``execute`` runs all of them."""
        return Pipeline(self.run)

    def wakeups(self, topics: Iterable[Topic]) -> Wakeups:
        """Subscribe to the wake-ups of ``topics``."""
        return Wakeups(self.channels, {wake_channel(self.prefix, topic.name) for topic in topics})

    def worker_changes(self) -> Wakeups:
        """Subscribe to changes of membership and assignment: pairs of an empty text and a number."""
        return Wakeups(self.channels, {workers_channel(self.prefix)})

    def events(self) -> Events:
        """Subscribe to the events of messages."""
        return Events(self.channels, {events_channel(self.prefix)})

    def publish_events(self, payload: bytes) -> int:
        """Publish events; return how many subscribers received them."""
        return self.channels.publish(events_channel(self.prefix), payload)

    def load_scripts(self) -> None:
        """Do nothing: there are no scripts here."""

    def ping(self) -> None:
        """Do nothing: memory always answers."""

    def servers(self) -> list[Server]:
        """Return an empty list: there is no server."""
        return []

    def refused(self, topics: Iterable[Topic]) -> list[str]:
        """Return an empty list: memory refuses nothing."""
        return []

    def close(self) -> None:
        """Do nothing: there is no connection to close, and the content must stay."""
