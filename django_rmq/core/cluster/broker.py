"""A Redis Cluster behind a broker's methods: every call goes to the node that holds its slot.

``Cluster`` knows which primary serves which of the 16,384 hash slots, and keeps connections to each.
``ClusterBroker`` and its pipelines talk to all nodes concerned at once. What a node answers without having run it (MOVED,
ASK, TRYAGAIN, CLUSTERDOWN, LOADING, NOSCRIPT), and what could not be sent at all, is repeated for a while; what was
sent over a connection that broke is not: nobody knows whether it ran.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import reduce
from typing import Any, Self

import redis
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import (
    AskError,
    BusyLoadingError,
    ClusterDownError,
    MovedError,
    NoScriptError,
    RedisError,
    ResponseError,
    TryAgainError,
)

from django_rmq.core import scripts
from django_rmq.core.redis.broker import (
    READS,
    Broker,
    Call,
    Clock,
    Pipeline,
    Transitions,
    durability_commands,
    explain,
    read_confirmed,
    translate,
)
from django_rmq.core.redis.pool import Pool
from django_rmq.core.words.results import Confirmed, Durability
from django_rmq.core.words.samples import Sample
from django_rmq.exceptions import NodeUnavailable, RmqError, ServerUnavailable

PATIENCE_SECONDS = 1.0
"""How long a call is repeated that no node has run, unless the cluster was made with another patience."""

REFRESH_SECONDS = 0.02
"""Between two looks at who serves what."""

PAUSES = (0.001, 0.05)
"""Seconds before a call is repeated: at first, and at most."""

RESTS = (0.1, 2.0)
"""Seconds for which nobody tries a node that could not be reached: at first, and at most."""

PROBE_SECONDS = 0.25
"""How long a node that has failed may take to answer a PING before it is trusted with more."""

REDIRECTIONS = 16
"""Times that a call follows MOVED and ASK without a pause in between."""

KEYS_OF_SLOT = {"heads": 5, "acquire_all": 5, "history/sample": 6}
"""Scripts that ask for many slots, and how many keys of each."""


def parse_seeds(urls: Iterable[str]) -> tuple[list[tuple[str, int]], dict[str, Any]]:
    """Return the addresses in the URLs of some nodes, and the options of connections that the last one names.

    Raises ``ValueError`` for what is no URL of a Redis.
    """
    seeds: list[tuple[str, int]] = []
    options: dict[str, Any] = {}
    for url in urls:
        options = redis.connection.parse_url(url)  # type: ignore[no-untyped-call]
        seeds.append((options.pop("host", "localhost"), options.pop("port", 6379)))
        options.pop("db", None)
    return seeds, options


class Node:
    """One server of a cluster."""

    def __init__(self, host: str, port: int, options: Mapping[str, Any]) -> None:
        self.host, self.port = host, port
        self.client = redis.Redis(connection_pool=Pool(host=host, port=port, **options))
        self.knows_scripts = False
        self._rests_until = 0.0
        self._rest = RESTS[0]
        self._trouble: RedisError | None = None
        """Why it failed last; it has not answered since."""

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def rests(self) -> bool:
        """Whether it failed a moment ago."""
        return time.monotonic() < self._rests_until

    def connect(self) -> Any:
        """Return a connection of the pool; raise ``RedisError`` without trying where the last try has just failed."""
        trouble = self._trouble
        if trouble is not None and self.rests:
            raise type(trouble)(f"{trouble} ({self}, a moment ago)")
        try:
            if trouble is not None:
                self._probe()
            connection = self.client.connection_pool.get_connection()
        except RedisError as error:
            self.failed(error)
            raise
        self._trouble, self._rest = None, RESTS[0]
        return connection

    def _probe(self) -> None:
        """Make sure that it answers soon: a process that stands still lets itself be connected to."""
        pool = self.client.connection_pool
        short = {"socket_timeout": PROBE_SECONDS, "socket_connect_timeout": PROBE_SECONDS}
        connection = pool.connection_class(**{**pool.connection_kwargs, **short})
        try:
            connection.connect()
            connection.send_command("PING")
            connection.read_response()
        except BusyLoadingError:
            pass  # what is asked of it will be told the same
        finally:
            connection.disconnect()

    def failed(self, error: RedisError) -> None:
        """Leave it alone for a while."""
        self._trouble = error
        self._rests_until = time.monotonic() + self._rest
        self._rest = min(self._rest * 2, RESTS[1])

    def give_back(self, connection: Any, *, broken: bool = False) -> None:
        """Return a connection to the pool."""
        if broken:
            connection.disconnect()
        self.client.connection_pool.release(connection)

    def ask(self, *command: Any) -> Any:
        """Send one command and return the plain answer."""
        connection, broken = self.connect(), True
        try:
            connection.send_command(*command)
            reply = connection.read_response()
            broken = False
        except ResponseError:
            broken = False
            raise
        except RedisError as error:
            self.failed(error)
            raise
        finally:
            self.give_back(connection, broken=broken)
        return reply

    def load_scripts(self, connection: Any) -> None:
        """Give it every script."""
        texts = [scripts.load(name).text for name in scripts.all_names()]
        connection.send_packed_command(connection.pack_commands([("SCRIPT LOAD", text) for text in texts]))
        for _ in texts:
            connection.read_response()
        self.knows_scripts = True


class Cluster:
    """Which node serves which hash slot, as far as is known here; whoever is told otherwise says so to it.

    ``seeds`` are (host, port) pairs of some nodes, ``options`` those of redis-py's connections. ``patience``: seconds
    for which is repeated what no node has run. Nothing is connected before the first call.
    """

    def __init__(
        self,
        seeds: Iterable[tuple[str, int]],
        options: Mapping[str, Any],
        *,
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        self.patience = patience
        self.options = dict(options)
        self._lock = threading.Lock()
        self._nodes: dict[tuple[str, int], Node] = {}
        self._seeds = [self.node(host, port) for host, port in seeds]
        self._serving: list[Node | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        self._primaries: list[Node] = []
        self._is_stale = True
        self._looked_at = float("-inf")

    def node(self, host: str, port: int) -> Node:
        """Return the node at an address."""
        found = self._nodes.get((host, port))
        return found or self._nodes.setdefault((host, port), Node(host, port, self.options))

    def serving(self, hash_slot: int) -> Node:
        """Return the primary of a hash slot; raise ``RedisError`` where there is none."""
        node = self._serving[hash_slot]
        if node is None:
            self._is_stale = True
            raise redis.ConnectionError(f"no node of the cluster serves hash slot {hash_slot}")
        return node

    def primaries(self) -> list[Node]:
        """Return all nodes that serve hash slots."""
        self.look()
        return self._primaries

    def moved(self, hash_slot: int, node: Node) -> None:
        """Note that a node says who serves a hash slot now, and that more may have changed."""
        self._serving[hash_slot] = node
        self._is_stale = True

    def doubt(self) -> None:
        """Look anew who serves what before the next call."""
        self._is_stale = True

    def look(self) -> None:
        """Ask the nodes in turn who serves what, if there is doubt; raise ``RedisError`` where none ever told it."""
        if not self._is_stale:
            return
        with self._lock:
            trouble: RedisError = redis.ConnectionError("no node of the cluster serves anything")
            if time.monotonic() - self._looked_at < REFRESH_SECONDS:
                if not self._primaries:
                    raise trouble
                return
            known = list(self._nodes.values())
            random.shuffle(known)
            for node in sorted(known, key=lambda node: node.rests):
                try:
                    rows = node.ask("CLUSTER", "SLOTS")
                except RedisError as error:
                    trouble = error
                    continue
                if rows:
                    self._note(node, rows)
                    self._is_stale = False
                    break
            self._looked_at = time.monotonic()
            if not self._primaries:
                raise trouble

    def _note(self, told_by: Node, rows: list[Any]) -> None:
        serving: list[Node | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        present = set(self._seeds)
        primaries: dict[Node, None] = {}
        for first, last, *replicated in rows:
            # The primary comes first; a node that does not know its own address sends an empty one.
            nodes = [
                self.node(host.decode() if host else told_by.host, int(port)) for host, port, *_ in replicated
            ]
            present.update(nodes)
            primaries.update(dict.fromkeys(nodes[:1]))
            serving[first : last + 1] = nodes[:1] * (last + 1 - first)
        self._serving, self._primaries = serving, list(primaries)
        for address, node in list(self._nodes.items()):
            if node not in present:
                del self._nodes[address]
                node.client.connection_pool.disconnect(inuse_connections=False)

    def execute_command(self, *command: Any) -> Any:
        """Run one command on the node of its key (the second argument), and return the plain answer."""
        errand = Errand(key_slot(command[1]), command)
        Trip(self, [errand]).send().receive()
        if isinstance(errand.reply, RedisError):
            raise errand.reply
        return errand.reply

    def everywhere(self, *command: Any) -> dict[Node, Any]:
        """Run one command on each primary; return the answers of those that answered.

        Raises ``RedisError`` where none did.
        """
        errands = [Errand(None, command, node) for node in self.primaries()]
        Trip(self, errands, patience=0).send().receive()
        found = {errand.node: errand.reply for errand in errands if not isinstance(errand.reply, Exception)}
        if not found:
            raise (
                errands[0].reply
                if errands
                else redis.ConnectionError("no node of the cluster serves anything")
            )
        return {node: reply for node, reply in found.items() if node is not None}

    def some_node(self) -> Node:
        """Return any primary, rather one that could be reached of late."""
        nodes = self.primaries()
        return random.choice([node for node in nodes if not node.rests] or nodes)

    def close(self) -> None:
        """Close all connections."""
        for node in list(self._nodes.values()):
            node.client.connection_pool.disconnect()


class Errand:
    """One command on its way to the node of its hash slot, and what came back."""

    __slots__ = ("asking", "command", "follows", "hash_slot", "node", "repeat", "reply")

    def __init__(
        self,
        hash_slot: int | None,
        command: Sequence[Any],
        node: Node | None = None,
        *,
        follows: bool = False,
    ) -> None:
        self.hash_slot = hash_slot
        self.command = command
        self.node = node
        """Who is asked, whoever serves the hash slot."""
        self.follows = follows
        """It runs again behind a command of its hash slot that did not run: it reads, or the order is to be kept."""
        self.asking = False
        """The node has the hash slot only in part as yet, and is asked all the same."""
        self.reply: Any = None
        """What it answered, or a ``RedisError``."""
        self.repeat = False
        """It did not run; ``reply`` says why."""


class Trip:
    """Commands that travel together: one connection to each node concerned.

    ``send`` and ``receive`` are the halves, as those of a pipeline. ``confirmed`` is what ``wanted`` has
    come to, the least of all nodes.
    """

    def __init__(
        self,
        cluster: Cluster,
        errands: Sequence[Errand],
        *,
        wanted: Durability | None = None,
        patience: float | None = None,
    ) -> None:
        self.confirmed: Confirmed | None = None
        self._cluster = cluster
        self._errands = errands
        self._wanted = wanted
        self._patience = cluster.patience if patience is None else patience
        self._departed: list[tuple[Node, Any, list[Errand]]] = []
        self._in_haste = False

    def send(self) -> Self:
        """Send everything; what cannot be sent is tried again by ``receive``."""
        if self._errands:
            self._depart(self._errands)
        return self

    def receive(self) -> None:
        """Wait for the replies, and repeat what did not run until it does or patience ends."""
        end, pause = time.monotonic() + self._patience, PAUSES[0]
        rounds = 0
        while self._arrive():
            again = self._to_repeat()
            rounds += 1
            if not self._in_haste or rounds > REDIRECTIONS:
                if time.monotonic() >= end:
                    self._give_up(again)
                    return
                time.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, PAUSES[1])
            self._depart(again)

    @staticmethod
    def _give_up(errands: Iterable[Errand]) -> None:
        """Say of those that no node has run that they may be tried again later, whatever the last node answered."""
        for errand in errands:
            if errand.repeat and isinstance(errand.reply, (AskError, NoScriptError)):
                errand.reply = TryAgainError(f"no node has run it in time ({errand.reply})")

    def _to_repeat(self) -> list[Errand]:
        again, concerned = [], set()
        for errand in self._errands:
            if errand.repeat:
                concerned.add(errand.hash_slot)
            # What was read, or done in order, behind a change that did not run has to come after it.
            elif not (errand.follows and errand.hash_slot in concerned):
                continue
            again.append(errand)
        return again

    def _depart(self, errands: Iterable[Errand]) -> None:
        groups: dict[Node, list[Errand]] = {}
        try:
            self._cluster.look()
        except RedisError as error:
            self._note_unsent(errands, error)
            return
        for errand in errands:
            errand.repeat = False
            try:
                node = errand.node or self._cluster.serving(errand.hash_slot or 0)
            except RedisError as error:
                errand.reply, errand.repeat = error, True
            else:
                groups.setdefault(node, []).append(errand)
        try:
            for node, group in groups.items():
                self._depart_to(node, group)
        except BaseException:
            self._abandon()
            raise

    def _depart_to(self, node: Node, group: list[Errand]) -> None:
        try:
            connection = node.connect()
        except RedisError as error:
            self._note_unsent(group, error)
            return
        self._departed.append((node, connection, group))
        try:
            if not node.knows_scripts:
                node.load_scripts(connection)
        except RedisError as error:
            self._departed.pop()
            node.give_back(connection, broken=True)
            self._note_unsent(group, error)
            return
        commands: list[Sequence[Any]] = []
        for errand in group:
            if errand.asking:
                commands.append(("ASKING",))
            commands.append(errand.command)
        if self._wanted is not None:
            commands += durability_commands(self._wanted, connection)
        try:
            connection.send_packed_command(connection.pack_commands(commands))
        except RedisError as error:
            self._departed.pop()
            node.give_back(connection, broken=True)
            self._note_lost(node, group, error)

    def _note_unsent(self, group: Iterable[Errand], error: RedisError) -> None:
        self._cluster.doubt()
        for errand in group:
            errand.reply, errand.repeat = error, True

    def _note_lost(self, node: Node, group: Iterable[Errand], error: RedisError) -> None:
        node.failed(error)
        self._cluster.doubt()
        for errand in group:
            errand.reply = error

    def _arrive(self) -> bool:
        """Read all replies; return whether anything is to be repeated."""
        self._in_haste = True
        try:
            while self._departed:
                node, connection, group = self._departed[-1]
                self._read(node, connection, group)
                self._departed.pop()
        except BaseException:
            self._abandon()
            raise
        waiting = [errand for errand in self._errands if errand.repeat]
        self._in_haste = all(isinstance(errand.reply, (AskError, NoScriptError)) for errand in waiting)
        return bool(waiting)

    def _read(self, node: Node, connection: Any, group: list[Errand]) -> None:
        for at, errand in enumerate(group):
            try:
                if errand.asking:
                    connection.read_response()
                errand.reply = connection.read_response()
            except (ResponseError, BusyLoadingError) as error:
                errand.reply = error
            except RedisError as error:
                self._note_lost(node, group[at:], error)
                node.give_back(connection, broken=True)
                self._confirm_nothing()
                return
            self._judge(node, errand)
        if self._wanted is not None:
            try:
                confirmed = read_confirmed(self._wanted, connection)
            except RedisError as error:
                self._note_lost(node, (), error)
                node.give_back(connection, broken=True)
                self._confirm_nothing()
                return
            if not all(errand.repeat for errand in group):
                self._confirm(confirmed)
        node.give_back(connection)

    def _confirm_nothing(self) -> None:
        if self._wanted is not None:
            self._confirm(Confirmed(None, False if self._wanted.fsync else None))

    def _confirm(self, confirmed: Confirmed) -> None:
        self.confirmed = confirmed if self.confirmed is None else self.confirmed.least(confirmed)

    def _judge(self, node: Node, errand: Errand) -> None:
        """Decide what becomes of an errand that was answered."""
        reply = errand.reply
        asked, errand.asking = errand.asking, False
        if asked:
            errand.node = None
        if not isinstance(reply, RedisError) or errand.hash_slot is None:
            return
        if isinstance(reply, AskError):
            named = self._cluster.node(reply.host or node.host, reply.port)
            if isinstance(reply, MovedError):
                self._cluster.moved(errand.hash_slot, named)
            else:
                errand.node, errand.asking = named, True
        elif isinstance(reply, NoScriptError):
            node.knows_scripts = False
        elif isinstance(reply, ClusterDownError):
            self._cluster.doubt()
        elif not isinstance(reply, (TryAgainError, BusyLoadingError)):
            return
        errand.repeat = True

    def _abandon(self) -> None:
        while self._departed:
            node, connection, _ = self._departed.pop()
            with suppress(Exception):
                node.give_back(connection, broken=True)


class ClusterBroker(Broker):
    """A broker whose server is a Redis Cluster.

    A pipeline's call that one node cannot answer has ``NodeUnavailable`` in its place; the others have their results.
    """

    client: Cluster

    # Here each call finds its way to a node: nothing is written before that.
    send_merge = Transitions.send_merge
    send_replace = Transitions.send_replace

    def __init__(self, client: Cluster, prefix: str = "", clock: Clock | None = None) -> None:
        super().__init__(client, prefix, clock)

    def load_scripts(self) -> None:
        """Do nothing: each node gets the scripts when it is first asked."""

    def pipeline(self) -> ClusterPipeline:
        """Return a pipeline that sends each call to its node."""
        return ClusterPipeline(self)

    def close(self) -> None:
        """Close all connections."""
        self.client.close()

    def ping(self) -> None:
        """Raise ``ServerTrouble`` unless a primary answers."""
        self._everywhere("PING")

    def now_ms(self) -> int:
        """Return the clock of that primary which is behind all others, in ms: nothing is asked for before it is due."""
        if self._clock is not None:
            return self._clock() // 1000
        times = self._everywhere("TIME").values()
        return min(int(seconds) * 1000 + int(micros) // 1000 for seconds, micros in times)

    def _on_all(self, *command: Any) -> dict[str, Any]:
        try:
            errands = [Errand(None, command, node) for node in self.client.primaries()]
        except RedisError as error:
            raise translate(error) from error
        Trip(self.client, errands).send().receive()
        return {f"the node {errand.node}": errand.reply for errand in errands}

    def _each(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        errands = [Errand(key_slot(command[1]), command) for command in commands]
        Trip(self.client, errands).send().receive()
        return [errand.reply for errand in errands]

    def _everywhere(self, *command: Any) -> dict[Node, Any]:
        try:
            return self.client.everywhere(*command)
        except RedisError as error:
            raise translate(error) from error

    def _ear(self) -> Any:
        # What is published on one node is heard on all.
        try:
            return self.client.some_node().client
        except RedisError as error:
            raise translate(error) from error

    def _run(self, call: Call) -> Any:
        pipeline = self.pipeline()
        pipeline._run(call)  # noqa: SLF001 - a pipeline is its broker's other half
        (result,) = pipeline.execute()
        if isinstance(result, RmqError):
            raise result
        return result


class ClusterPipeline(Pipeline):
    """Collects calls and runs them on all nodes concerned at once; see ``Pipeline``.

    While a hash slot moves, calls of one slot may run in another order than they were collected in, unless
    ``keep_order`` says otherwise; what only reads still comes after what stood before it.
    """

    _broker: ClusterBroker

    def send(self) -> Self:
        """Send what was collected."""
        self._errands = [self._errands_of(call) for call in self._calls]
        flat = [errand for errands in self._errands for errand in errands]
        self._trip = Trip(self._broker.client, flat, wanted=self._wanted)
        self._trip.send()
        return self

    def receive(self) -> list[Any]:
        """Return a result or an ``RmqError`` for each call, in order."""
        calls, self._calls = self._calls, []
        self._trip.receive()
        self.confirmed = self._trip.confirmed
        return [self._told(call, errands) for call, errands in zip(calls, self._errands, strict=True)]

    def _errands_of(self, call: Call) -> list[Errand]:
        follows = self._in_order or call.script in READS
        if call.script not in KEYS_OF_SLOT:
            return [Errand(key_slot(call.keys[0]), self._broker._command(call), follows=follows)]  # noqa: SLF001 - a pipeline is its broker's other half
        count = KEYS_OF_SLOT[call.script]
        parts = [call.keys[at : at + count] for at in range(0, len(call.keys), count)]
        return [
            Errand(key_slot(keys[0]), self._broker._command(call._replace(keys=keys)), follows=follows)  # noqa: SLF001 - as above
            for keys in parts
        ]

    def _told(self, call: Call, errands: list[Errand]) -> Any:
        if call.script not in KEYS_OF_SLOT:
            return self._answer(call, errands[0])
        answers = [self._answer(call, errand) for errand in errands]
        troubles = [answer for answer in answers if isinstance(answer, RmqError)]
        if call.script == "history/sample":
            # A sum without some of its parts would be none.
            return troubles[0] if troubles else reduce(Sample.plus, answers)
        if answers and len(troubles) == len(answers):
            return troubles[0]
        if call.script != "heads":
            return [answer if isinstance(answer, RmqError) else answer[0] for answer in answers]
        # Nothing is known of a node that is away; the slots of the others are what the caller can work on.
        return [None if isinstance(answer, RmqError) else answer[0] for answer in answers]

    @staticmethod
    def _answer(call: Call, errand: Errand) -> Any:
        try:
            if isinstance(errand.reply, RedisError):
                return explain(call, _trouble(errand))
            return call.read(errand.reply)
        except RmqError as error:
            return error


def _trouble(errand: Errand) -> RmqError:
    error = errand.reply
    found = translate(error)
    # One node away is not all away; CLUSTERDOWN is.
    if type(found) is ServerUnavailable and not isinstance(error, ClusterDownError):
        return NodeUnavailable(f"a node of the cluster: {found}")
    return found


__all__ = ["Cluster", "ClusterBroker", "ClusterPipeline", "Node", "parse_seeds"]
