"""The broker of a Redis Cluster: every call goes to the node that holds its slot, to all nodes at the same time.

A command that a node answered without running it (MOVED, ASK, TRYAGAIN, CLUSTERDOWN, LOADING, NOSCRIPT), or that could not be
sent, is repeated for a while. A command that was sent over a connection that broke is not repeated, because it is unknown
whether it ran.

In redis-py ``MovedError`` is an ``AskError``. Where both are meant, only ``AskError`` is named: in ``_give_up``, ``_arrive`` and
``_judge``.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import redis
from redis.crc import key_slot
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

from django_rmq.core.cluster.nodes import Node, Topology
from django_rmq.core.commands.script_call import Call, Reply
from django_rmq.core.model.send_results import Confirmed, Durability
from django_rmq.core.redis.broker import (
    Connection,
    RedisBroker,
    RedisPipeline,
    ServerConnection,
    durability_commands,
    explain,
    give_back,
    read_confirmed,
)
from django_rmq.core.redis.clients import translate
from django_rmq.core.redis.wire import Command
from django_rmq.exceptions import NodeUnavailable, RmqError, ServerUnavailable

PAUSES = (0.001, 0.05)
"""Seconds before a call is repeated: the first pause, and the longest."""

REDIRECTIONS = 16
"""How often a call follows MOVED and ASK without a pause in between."""


@dataclass(eq=False, slots=True)
class RoutedCommand:
    """One command on its way to the node of its hash slot, and its reply."""

    hash_slot: int | None
    command: Sequence[object]
    node: Node | None = None
    """The node that gets the command, whichever node serves the hash slot. None if the topology decides."""
    follows: bool = False
    """Whether the command runs again after one of its hash slot that did not run: it only reads, or the order is to be
    kept."""
    asking: bool = field(default=False, init=False)
    """Whether ASKING precedes the command, because the node is importing the hash slot and has only part of it."""
    reply: Reply = field(default=None, init=False)
    """The answer, or a ``RedisError``."""
    repeat: bool = field(default=False, init=False)
    """Whether the command did not run and has to be repeated; ``reply`` gives the reason."""


class NodeTrip:
    """Commands that are sent together, over one connection to each node concerned.

    ``send`` and ``receive`` are the halves, like those of a pipeline. ``confirmed`` is the durability that was reached of
    ``wanted``: the minimum over all nodes.
    """

    def __init__(
        self,
        cluster: Topology,
        routed_commands: Sequence[RoutedCommand],
        *,
        wanted: Durability | None = None,
        patience: float | None = None,
    ) -> None:
        self.confirmed: Confirmed | None = None
        self._cluster = cluster
        self._routed_commands = routed_commands
        self._wanted = wanted
        self._patience = cluster.patience if patience is None else patience
        self._departed: list[tuple[Node, Connection, list[RoutedCommand]]] = []
        self._in_haste = False
        """Whether a node has answered where or how each command to repeat runs, so that they are repeated without a pause."""

    def send(self) -> Self:
        """Send everything. ``receive`` repeats the commands that could not be sent."""
        if self._routed_commands:
            self._depart(self._routed_commands)
        return self

    def receive(self) -> None:
        """Wait for the replies, and repeat the commands that did not run until they run or the patience is over."""
        end, pause = time.monotonic() + self._patience, PAUSES[0]
        rounds = 0
        while self._arrive():
            again = self._to_repeat()
            rounds += 1
            # MOVED, ASK and NOSCRIPT say where or how the command runs, so it is repeated at once. Any other answer, or a chain
            # of redirections in a cluster whose nodes disagree, needs time.
            if not self._in_haste or rounds > REDIRECTIONS:
                if time.monotonic() >= end:
                    self._give_up(again)
                    return
                time.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, PAUSES[1])
            self._depart(again)

    @staticmethod
    def _give_up(routed_commands: Iterable[RoutedCommand]) -> None:
        """Give commands that no node has run an error which permits another try, whatever the last node answered."""
        for routed in routed_commands:
            # rule: what_never_ran_is_refused
            if routed.repeat and isinstance(routed.reply, (AskError, NoScriptError)):
                routed.reply = TryAgainError(
                    f"no node of the cluster ran the command in time ({routed.reply})"
                )

    def _to_repeat(self) -> list[RoutedCommand]:
        again, concerned = [], set()
        for routed in self._routed_commands:
            if routed.repeat:
                concerned.add(routed.hash_slot)
            # A command that reads, or that is in order, has run before a change that precedes it: it has to run after that.
            elif not (routed.follows and routed.hash_slot in concerned):
                continue
            again.append(routed)
        return again

    def _depart(self, routed_commands: Iterable[RoutedCommand]) -> None:
        groups: dict[Node, list[RoutedCommand]] = {}
        try:
            self._cluster.refresh()
        except RedisError as error:
            self._mark_unsent(routed_commands, error)
            return
        for routed in routed_commands:
            routed.repeat = False
            try:
                node = routed.node or self._cluster.serving(routed.hash_slot or 0)
            except RedisError as error:
                routed.reply, routed.repeat = error, True
            else:
                groups.setdefault(node, []).append(routed)
        # Connections with commands under way must not go back to their pools with unread replies.
        try:
            for node, group in groups.items():
                self._depart_to(node, group)
        except BaseException:
            self._abandon()
            raise

    def _depart_to(self, node: Node, group: list[RoutedCommand]) -> None:
        try:
            connection = node.connect()
        except RedisError as error:
            self._mark_unsent(group, error)
            return
        self._departed.append((node, connection, group))
        try:
            # A node may be new, or a replica that was promoted: each gets the scripts with its first commands.
            if not node.knows_scripts:
                node.load_scripts(connection)
        except RedisError as error:
            self._departed.pop()
            give_back(node.client, connection, broken=True)
            self._mark_unsent(group, error)
            return
        commands: list[Sequence[object]] = []
        for routed in group:
            if routed.asking:
                commands.append(("ASKING",))
            commands.append(routed.command)
        if self._wanted is not None:
            commands += durability_commands(self._wanted, connection)
        try:
            connection.send_packed_command(connection.pack_commands(commands))
        except RedisError as error:
            # A part of the commands may have been sent, so it is unknown which of them ran.
            self._departed.pop()
            give_back(node.client, connection, broken=True)
            self._mark_lost(node, group, error)

    def _mark_unsent(self, group: Iterable[RoutedCommand], error: RedisError) -> None:
        self._cluster.doubt()
        for routed in group:
            routed.reply, routed.repeat = error, True

    def _mark_lost(self, node: Node, group: Iterable[RoutedCommand], error: RedisError) -> None:
        node.failed(error)
        self._cluster.doubt()
        for routed in group:
            routed.reply = error

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
        waiting = [routed for routed in self._routed_commands if routed.repeat]
        self._in_haste = all(isinstance(routed.reply, (AskError, NoScriptError)) for routed in waiting)
        return bool(waiting)

    def _read(self, node: Node, connection: Connection, group: list[RoutedCommand]) -> None:
        wanted, unread = self._wanted, deque(group)
        try:
            while unread:
                routed = unread[0]
                # If the node refuses ASKING, it answers the command all the same, and that answer belongs to no other one.
                refusal = self._reply(connection) if routed.asking else None
                reply = self._reply(connection)
                are_errors = isinstance(refusal, RedisError) and isinstance(reply, RedisError)
                routed.reply = refusal if are_errors else reply
                self._judge(node, unread.popleft())
            confirmed = None if wanted is None else read_confirmed(wanted, connection)
        except RedisError as error:
            # The connection broke: the replies before it count, and it is unknown whether the other commands ran.
            self._mark_lost(node, unread, error)
            give_back(node.client, connection, broken=True)
            if wanted is not None:
                self._confirm(Confirmed(None, False if wanted.fsync else None))
            return
        # A node that has run none of its commands has nothing to confirm.
        if confirmed is not None and not all(routed.repeat for routed in group):
            self._confirm(confirmed)
        give_back(node.client, connection)

    @staticmethod
    def _reply(connection: Connection) -> Reply:
        try:
            return connection.read_response()
        except (ResponseError, BusyLoadingError) as error:
            return error

    def _confirm(self, confirmed: Confirmed) -> None:
        self.confirmed = confirmed if self.confirmed is None else self.confirmed.least(confirmed)

    def _judge(self, node: Node, routed: RoutedCommand) -> None:
        """Decide whether an answered command is done, repeated or redirected."""
        reply = routed.reply
        was_asking, routed.asking = routed.asking, False
        # ASK holds for one attempt only; the next one goes to the node that serves the hash slot.
        if was_asking:
            routed.node = None
        if not isinstance(reply, RedisError) or routed.hash_slot is None:
            return
        if isinstance(reply, AskError):
            target = self._cluster.node(reply.host or node.host, reply.port)
            # MOVED is the answer after a migration or a fail-over, for all later commands; ASK is one during a migration, for
            # this command only.
            if isinstance(reply, MovedError):
                self._cluster.moved(routed.hash_slot, target)
            else:
                routed.node, routed.asking = target, True
        # The node was restarted, or its scripts were flushed.
        elif isinstance(reply, NoScriptError):
            node.knows_scripts = False
        elif isinstance(reply, ClusterDownError):
            self._cluster.doubt()
        elif not isinstance(reply, (TryAgainError, BusyLoadingError)):
            return
        routed.repeat = True

    def _abandon(self) -> None:
        # The replies of these connections are unread, so none of them may be used again.
        while self._departed:
            node, connection, _ = self._departed.pop()
            with suppress(Exception):
                give_back(node.client, connection, broken=True)


T = TypeVar("T")


class Cluster(Topology):
    """A cluster in the role of a broker's client: it runs plain commands on the node of their keys."""

    def execute_command(self, name: str, key: bytes, *arguments: object) -> Reply:
        """Run one command on the node of its key, and return the plain answer."""
        routed = RoutedCommand(key_slot(key), (name, key, *arguments))
        NodeTrip(self, [routed]).send().receive()
        if isinstance(routed.reply, RedisError):
            raise routed.reply
        return routed.reply

    def everywhere(self, *command: object) -> dict[Node, Reply]:
        """Run one command on each primary; return the answers of those that answered.

        Raises ``RedisError`` if none answered.
        """
        primaries = self.primaries()
        routed_commands = [RoutedCommand(None, command, node) for node in primaries]
        NodeTrip(self, routed_commands, patience=0).send().receive()
        replies = {
            node: routed.reply
            for node, routed in zip(primaries, routed_commands, strict=True)
            if not isinstance(routed.reply, Exception)
        }
        if not replies:
            raise (
                routed_commands[0].reply
                if routed_commands
                else redis.ConnectionError("no node of the cluster serves anything")
            )
        return replies


class ClusterBroker(RedisBroker):
    """A broker whose server is a Redis Cluster.

    If one node cannot answer a call of a pipeline, ``NodeUnavailable`` takes its place; the other calls have
    their results.
    """

    client: Cluster

    def run(self, call: Call[T]) -> T:
        pipeline = self.pipeline()
        answer = pipeline.add(call)
        pipeline.execute()
        return answer.get()

    def load_scripts(self) -> None:
        """Do nothing: each node gets the scripts with its first call."""

    def pipeline(self) -> ClusterPipeline:
        return ClusterPipeline(self.client, self.exchange)

    def close(self) -> None:
        self.client.close()

    def ping(self) -> None:
        self._everywhere("PING")

    def now_ms(self) -> int:
        """Return the earliest clock of all primaries, in ms, so that nothing is asked for before it is due."""
        if self.exchange.clock is not None:
            return self.exchange.clock() // 1000
        times = self._everywhere("TIME").values()
        return min(int(seconds) * 1000 + int(micros) // 1000 for seconds, micros in times)

    def _on_all(self, commands: Sequence[Command]) -> dict[str, list[Reply]]:
        """Run all commands on each primary, which concern the server and no key; return the replies of each node."""
        # A node that has become a replica answers these commands as before, so the topology is read again first.
        self.client.doubt()
        try:
            primaries = self.client.primaries()
        except RedisError as error:
            raise translate(error) from error
        routed_commands = [RoutedCommand(None, command, node) for node in primaries for command in commands]
        NodeTrip(self.client, routed_commands).send().receive()
        replies: dict[str, list[Reply]] = {}
        for routed in routed_commands:
            replies.setdefault(str(routed.node), []).append(routed.reply)
        return replies

    def _each(self, commands: Sequence[tuple[Any, ...]]) -> list[Reply]:
        """Run each command on the node of its key, which is its second part; return the replies in the same order."""
        routed_commands = [RoutedCommand(key_slot(command[1]), command) for command in commands]
        NodeTrip(self.client, routed_commands).send().receive()
        return [routed.reply for routed in routed_commands]

    def _everywhere(self, *command: object) -> dict[Node, Reply]:
        try:
            return self.client.everywhere(*command)
        except RedisError as error:
            raise translate(error) from error

    def inbox(self, owner: str) -> bytes:
        """Return nothing: a script learns only of the subscribers of its own node."""
        return b""

    def _subscription_client(self) -> Reply:
        # A Redis Cluster forwards published messages to all nodes, so a subscription to any of them suffices.
        try:
            return self.client.some_node().client
        except RedisError as error:
            raise translate(error) from error


class ClusterPipeline(RedisPipeline):
    """Collects calls and runs them on all nodes concerned at the same time.

    While a hash slot moves, calls of one slot may run in another order than they were collected in, unless
    ``keep_order`` was called; calls that only read still come after what preceded them.
    """

    def __init__(self, cluster: Cluster, exchange: ServerConnection) -> None:
        super().__init__(exchange)
        self._cluster = cluster

    def send(self) -> Self:
        self._routed_commands = [self._routed_commands_of(call) for call in self._calls]
        flat = [routed for routed_commands in self._routed_commands for routed in routed_commands]
        self._trip = NodeTrip(self._cluster, flat, wanted=self._wanted)
        self._trip.send()
        return self

    def receive(self) -> list[Reply]:
        calls, answers = self._take_calls()
        self._trip.receive()
        self.confirmed = self._trip.confirmed
        return self._set_answers(
            answers, [self._joined(*both) for both in zip(calls, self._routed_commands, strict=True)]
        )

    def _routed_commands_of(self, call: Call[object]) -> list[RoutedCommand]:
        follows = self._in_order or call.reads
        return [
            RoutedCommand(key_slot(part.keys(self.prefix)[0]), self._exchange.command(part), follows=follows)
            for part in call.parts()
        ]

    def _joined(self, call: Call[object], routed_commands: list[RoutedCommand]) -> Reply:
        """Return the answer of a call, combined from those of its parts; if all parts failed, the first error."""
        answers = [self._answer(call, routed) for routed in routed_commands]
        if call.join is None:
            return answers[0]
        troubles = [answer for answer in answers if isinstance(answer, RmqError)]
        if answers and len(troubles) == len(answers):
            return troubles[0]
        try:
            return call.join(answers)
        except RmqError as error:
            return error

    def _answer(self, call: Call[object], routed: RoutedCommand) -> Reply:
        try:
            if isinstance(routed.reply, RedisError):
                return explain(call, self.prefix, _trouble(routed))
            return call.read(routed.reply, self.prefix)
        except RmqError as error:
            return error


def _trouble(routed: RoutedCommand) -> RmqError:
    error = routed.reply
    trouble = translate(error)
    # The cluster stays available for the slots of the other nodes, unless it reports CLUSTERDOWN.
    if type(trouble) is ServerUnavailable and not isinstance(error, ClusterDownError):
        of_node = NodeUnavailable(f"a node of the cluster: {trouble}")
        of_node.refuses_writes = trouble.refuses_writes
        return of_node
    return trouble
