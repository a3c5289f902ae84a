"""The oracle: the protocol in plain Python, the effect of every script on a slot, without a Redis server.

``OracleBroker`` answers every call as a Redis server does and keeps the same keyspace: the same key names,
members, scores and fields, byte for byte. It is the specification with which the Lua files are compared. It
lives in one process, and its content ends with that process.

It reads a call as a server does: by the name of the script, the place, and the arguments in the order of the script's
header. A rule has the name of its script and stands in the module that has the name of the one in ``core.commands``.
Each states its rules in the order of the Lua file, and shares them with others where Lua includes a fragment.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any, Self, TypeVar, cast

from django_rmq.core.commands.script_call import Answer, Call, Named, RedisCommand
from django_rmq.core.lua import SECOND
from django_rmq.core.model import keys
from django_rmq.core.model.send_results import Confirmed, Durability
from django_rmq.core.model.server_checks import ServerInfo, SlowCommand
from django_rmq.core.model.topic import Topic, redefined
from django_rmq.exceptions import RmqError
from tests.oracle import send
from tests.oracle.keyspace import Events, Memory, Wakeups

T = TypeVar("T")

RULES: dict[str, Callable[..., Any]] = {
    script: getattr(import_module(f"tests.oracle.{module}"), script.rpartition("/")[2])
    for module, scripts in (
        ("send", "send_merge send_replace send_fifo ensure scatter put_tick retract"),
        ("fetch", "acquire acquire_slots list_held prepare"),
        ("ack", "commit commit_delivery rollback release extend progress"),
        ("upkeep", "time_out promote"),
        ("claims", "claim renew_claim fail_claimed ack_claim return_claim read_claim"),
        ("claims", "spark_consumers/hold_consumer spark_consumers/leave_consumer"),
        ("inspect", "list_messages search_messages group_deaths count_between count count_slots audit_ledger heads ranks"),
        ("inspect", "describe_messages status find_occupied find_paused find_by_digest"),
        ("operate", "replay bury remove discard reschedule purge restore pause configure adopt retire find_orphans"),
        ("reslot", "shut reopen reslot_progress move_out move_in"),
        ("history", "history/sample history/take_minute history/store_minute history/count_lateness history/count_times"),
        ("limits", "limits/allow limits/end_permits limits/spend"),
        ("membership", "workers/beat workers/leave workers/assign workers/roster"),
        ("schedules", "schedules/change_schedule schedules/renew_schedule schedules/plan_tick schedules/settle_tick"),
        ("stored_results", "stored_results/store_result stored_results/begin_request stored_results/store_answer"),
    )
    for script in scripts.split()
}  # fmt: skip
"""The rule of each script. Its arguments are the memory, what the place of a call consists of, and those of the script."""


class Pipeline:
    """Collects calls; ``execute`` passes them to ``run``, in order."""

    def __init__(self, run: Callable[[Call[Any]], Any]) -> None:
        self._run = run
        self._calls: list[tuple[Call[Any], Answer[Any]]] = []
        self._wanted: Durability | None = None
        self.confirmed: Confirmed | None = None

    def add(self, call: Call[T]) -> Answer[T]:
        """Collect a call; return an object that holds its answer after the pipeline has run."""
        answer: Answer[T] = Answer()
        self._calls.append((call, answer))
        return answer

    def confirm(self, wanted: Durability) -> None:
        """Report afterwards that everything requested was reached: memory is no less durable than that."""
        self._wanted = wanted

    def keep_order(self) -> None:
        """Do nothing: the order is always kept."""

    def __len__(self) -> int:
        return len(self._calls)

    def send(self) -> Self:
        """Do nothing: what was collected runs when its answers are asked for."""
        return self

    def receive(self) -> list[Any]:
        """Run what was collected; return the answer of each call, or an ``RmqError``, in order."""
        collected, self._calls = self._calls, []
        for call, answer in collected:
            try:
                answer.become(self._run(call))
            except RmqError as error:
                answer.become(error)
        if self._wanted is not None:
            self.confirmed = Confirmed(self._wanted.replicas or None, self._wanted.fsync or None)
        return [answer.result() for _, answer in collected]

    def execute(self) -> list[Any]:
        """Run what was collected; return the answer of each call, or an ``RmqError``, in order."""
        return self.send().receive()


class OracleBroker(Memory):
    """Runs every call on dictionaries: that of a script by its rule, and that of a plain command as a server does."""

    in_memory = True

    def run(self, call: Call[T]) -> T:
        """Run a call and return its answer. Raises ``RmqError``."""
        if isinstance(call, RedisCommand) or call.script == "insert":
            return cast("T", self._run_command(call))
        place: Any = call.place
        at = (place.name,) if isinstance(place, Named) else place
        return cast("T", RULES[call.script.removesuffix(SECOND)](self, *at, *call.own))

    def _run_command(self, call: Call[Any]) -> Any:
        """Return the answer of a plain command, or of a part of the transaction that inserts messages."""
        if call.script == "ZADD":
            self.queued = call
        elif call.script == "EXEC":
            assert self.queued is not None
            place: Any = self.queued.place
            return send.insert(self, *place, *self.queued.own)
        elif call.script not in ("MULTI", "insert"):
            return call.read(self._run_on_key(call), self.prefix)
        return None

    def _run_on_key(self, call: Call[Any]) -> Any:
        if call.script == "EXISTS":
            with self.lock:
                return sum(key in self.keyspace for key in call.keys(self.prefix))
        (key,) = call.keys(self.prefix)
        own = [argument if isinstance(argument, bytes) else str(argument).encode() for argument in call.own]
        with self.hash(key) as fields:
            if call.script == "HMGET":
                return [fields.get(name) for name in own]
            if call.script == "HLEN":
                return len(fields)
            if call.script == "HSET":
                name, value = own
                is_new, fields[name] = name not in fields, value
                return int(is_new)
            if call.script == "HINCRBY":
                name, more = own
                total = int(fields.get(name, b"0")) + int(more)
                fields[name] = b"%d" % total
                return total
            if call.script == "PEXPIRE":
                return int(bool(fields))  # the tests of time use a server
            if call.script == "HDEL":
                return sum(fields.pop(name, None) is not None for name in own)
            assert call.script == "HGETALL"
            return dict(fields)

    def definitions(self) -> keys.Definitions:
        key = keys.topics_key(self.prefix)
        with self.hash(key) as known:
            return keys.Definitions(key, known.items())

    def define(self, topic: Topic, *, replace: bool = False) -> dict[str, Any]:
        return self.redefine(
            topic.name, lambda known: redefined(topic, known) if replace or not known else known
        )

    def redefine(self, name: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
        key = keys.topics_key(self.prefix)
        with self.hash(key) as definitions:
            known = keys.definition(key, name, definitions.get(name.encode(), b""))
            wanted = change(known)
            if wanted != known:
                definitions[name.encode()] = json.dumps(wanted, sort_keys=True).encode()
            return wanted

    def undefine(self, topic: Topic) -> None:
        prefix, name = self.prefix, topic.name
        with self.lock:
            for key in (
                *keys.history_keys(prefix, name),
                keys.times_key(prefix, name),
                keys.limits_key(prefix, name),
            ):
                self.keyspace.pop(key, None)
            for key in (keys.explicit_basis_key(prefix), keys.topics_key(prefix)):
                with self.hash(key) as fields:
                    fields.pop(name.encode(), None)

    def note_slot_basis(self, topic: Topic) -> None:
        with self.hash(keys.explicit_basis_key(self.prefix)) as noted:
            noted[topic.name.encode()] = b"1"

    def has_slot_bases(self, topic: Topic) -> bool:
        with self.hash(keys.explicit_basis_key(self.prefix)) as noted:
            return topic.name.encode() in noted

    def pipeline(self) -> Pipeline:
        """Return a pipeline, which collects calls; ``execute`` runs all of them."""
        return Pipeline(self.run)

    def inbox(self, owner: str) -> bytes:
        return keys.inbox_channel(self.prefix, owner)

    def wakeups(self, topics: Iterable[Topic], inbox: bytes = b"") -> Wakeups:
        channels = {keys.wake_channel(self.prefix, topic.name) for topic in topics}
        return Wakeups(self.channels, channels, inbox)

    def worker_changes(self) -> Wakeups:
        return Wakeups(self.channels, {keys.workers_channel(self.prefix)})

    def events(self) -> Events:
        return Events(self.channels, {keys.events_channel(self.prefix)})

    def publish_events(self, payload: bytes) -> int:
        """Publish events; return how many subscribers received them."""
        return self.channels.publish(keys.events_channel(self.prefix), payload)

    def load_scripts(self) -> None: ...

    def ping(self) -> None: ...

    def servers(self) -> list[ServerInfo]:
        return []

    def slow_commands(self) -> list[SlowCommand]:
        return []

    def refused(self, topics: Iterable[Topic]) -> list[str]:
        return []

    def close(self) -> None:
        """Do nothing: there is no connection to close, and the content must stay."""
