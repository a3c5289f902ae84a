"""The oracle: the protocol in plain Python, the effect of every script on a slot, without a Redis server.

``OracleBroker`` answers every call as a Redis server does and keeps the same keyspace: the same key names,
members, scores and fields, byte for byte. It is the specification with which the Lua files are compared. It
lives in one process, and its content ends with that process.

It reads a call as a server does: by the name of the script, the place, and the arguments in the order of the script's
header. ``RULES`` says which function states the rules of a script. Functions are grouped by module: ``sending``,
``taking``, ``ending``, ``claims``, ``people``, ``tending``, ``moving``, and those that change nothing: ``listing``,
``looking``, ``seeking``. Each states its rules in the order of the Lua file, and shares them with others where Lua
includes a fragment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

from django_rmq.core.commands.script_call import Call, Named, RedisCommand
from django_rmq.core.lua import SECOND
from django_rmq.core.model.keys import events_channel, inbox_channel, wake_channel, workers_channel
from django_rmq.core.model.server_info import ServerInfo, SlowCommand
from django_rmq.core.model.topic import Topic
from tests.oracle import (
    answers,
    claims,
    commands,
    ending,
    history,
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


RULES: dict[str, Callable[..., Any]] = {
    "ack_claim": claims.ack_claim,
    "acquire": taking.acquire,
    "acquire_slots": taking.acquire_slots,
    "adopt": tending.adopt,
    "audit_ledger": looking.audit_ledger,
    "count_between": listing.count_between,
    "bury": people.bury,
    "claim": claims.claim,
    "commit": ending.commit,
    "commit_delivery": ending.commit_delivery,
    "configure": tending.configure,
    "count": looking.count,
    "count_slots": looking.count_slots,
    "discard": people.discard,
    "ensure": sending.ensure,
    "time_out": upkeep.time_out,
    "extend": ending.extend,
    "fail_claimed": claims.fail_claimed,
    "search_messages": listing.search_messages,
    "group_deaths": listing.group_deaths,
    "heads": looking.heads,
    "list_held": taking.list_held,
    "describe_messages": looking.describe_messages,
    "find_orphans": tending.find_orphans,
    "move_in": moving.move_in,
    "move_out": moving.move_out,
    "find_occupied": looking.find_occupied,
    "pause": tending.pause,
    "find_paused": looking.find_paused,
    "list_messages": listing.list_messages,
    "prepare": taking.prepare,
    "progress": ending.progress,
    "promote": upkeep.promote,
    "purge": people.purge,
    "ranks": looking.ranks,
    "read_claim": claims.read_claim,
    "release": ending.release,
    "remove": people.remove,
    "renew_claim": claims.renew_claim,
    "reopen": moving.reopen,
    "replay": people.replay,
    "reschedule": people.reschedule,
    "restore": people.restore,
    "retire": tending.retire,
    "retract": ticks.retract,
    "return_claim": claims.return_claim,
    "rollback": ending.rollback,
    "scatter": sending.scatter,
    "find_by_digest": seeking.find_by_digest,
    "send_fifo": sending.send_fifo,
    "send_merge": sending.send_merge,
    "send_replace": sending.send_replace,
    "shut": moving.shut,
    "status": looking.status,
    "reslot_progress": moving.reslot_progress,
    "put_tick": ticks.put_tick,
    "idempotent_requests/begin_request": answers.begin_request,
    "idempotent_requests/store_answer": answers.store_answer,
    "spark_consumers/hold_consumer": claims.hold_consumer,
    "spark_consumers/leave_consumer": claims.leave_consumer,
    "history/take_minute": history.take_minute,
    "history/store_minute": history.store_minute,
    "history/count_lateness": history.count_lateness,
    "history/sample": history.sample,
    "history/count_times": history.count_times,
    "limits/allow": limits.allow,
    "limits/end_permits": limits.end_permits,
    "limits/spend": limits.spend,
    "results/store_result": results.store_result,
    "schedules/change_schedule": schedules.change_schedule,
    "schedules/plan_tick": schedules.plan_tick,
    "schedules/renew_schedule": schedules.renew_schedule,
    "schedules/settle_tick": schedules.settle_tick,
    "workers/assign": workers.assign,
    "workers/beat": workers.beat,
    "workers/leave": workers.leave,
    "workers/roster": workers.roster,
}
"""The rule of each script. Its arguments are the memory, what the place of a call consists of, and those of the script."""


class OracleBroker(Memory):
    """Runs every call on dictionaries: that of a script by its rule, and that of a plain command as a server does."""

    in_memory = True

    definitions = topics.definitions
    define = topics.define
    redefine = topics.redefine
    undefine = topics.undefine
    note_slot_basis = topics.note_slot_basis
    has_slot_bases = topics.has_slot_bases

    def run(self, call: Call[T]) -> T:
        """Run a call and return its answer. Raises ``RmqError``."""
        if isinstance(call, RedisCommand) or call.script == "insert":
            return cast("T", commands.run(self, call))
        place: Any = call.place
        at = (place.name,) if isinstance(place, Named) else place
        return cast("T", RULES[call.script.removesuffix(SECOND)](self, *at, *call.own))

    def pipeline(self) -> Pipeline:
        """Return a pipeline, which collects calls; ``execute`` runs all of them."""
        return Pipeline(self.run)

    def inbox(self, owner: str) -> bytes:
        """Return the channel to which sends may push messages for a worker."""
        return inbox_channel(self.prefix, owner)

    def wakeups(self, topics: Iterable[Topic], inbox: bytes = b"") -> Wakeups:
        """Subscribe to the wake-ups of ``topics``, and to what sends push to ``inbox``."""
        channels = {wake_channel(self.prefix, topic.name) for topic in topics}
        return Wakeups(self.channels, channels, inbox)

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

    def servers(self) -> list[ServerInfo]:
        """Return an empty list: there is no server."""
        return []

    def slow_commands(self) -> list[SlowCommand]:
        return []

    def refused(self, topics: Iterable[Topic]) -> list[str]:
        """Return an empty list: memory refuses nothing."""
        return []

    def close(self) -> None:
        """Do nothing: there is no connection to close, and the content must stay."""
