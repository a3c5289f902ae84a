"""The broker of a Redis Cluster: every call goes to the node that holds its slot, to all nodes at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self, TypeVar

import redis
from redis.crc import key_slot
from redis.exceptions import ClusterDownError, RedisError

from django_rmq.core.cluster.nodes import Node, Topology
from django_rmq.core.cluster.routing import NodeTrip, RoutedCommand
from django_rmq.core.commands.script_call import Call, Reply
from django_rmq.core.redis.broker import RedisBroker, RedisPipeline, ServerConnection, explain
from django_rmq.core.redis.clients import translate
from django_rmq.core.redis.wire import Command
from django_rmq.exceptions import NodeUnavailable, RmqError, ServerUnavailable

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
        routed_commands = [RoutedCommand(None, command, node) for node in self.primaries()]
        NodeTrip(self, routed_commands, patience=0).send().receive()
        replies = {
            routed.node: routed.reply for routed in routed_commands if not isinstance(routed.reply, Exception)
        }
        if not replies:
            raise (
                routed_commands[0].reply
                if routed_commands
                else redis.ConnectionError("no node of the cluster serves anything")
            )
        return {node: reply for node, reply in replies.items() if node is not None}


class ClusterBroker(RedisBroker):
    """A broker whose server is a Redis Cluster.

    If one node cannot answer a call of a pipeline, ``NodeUnavailable`` takes its place; the other calls have
    their results.
    """

    client: Cluster

    def run(self, call: Call[T]) -> T:
        """Run a call on the node of its slot, or of its slots, and return its answer. Raises ``RmqError``."""
        pipeline = self.pipeline()
        answer = pipeline.add(call)
        pipeline.execute()
        return answer.get()

    def load_scripts(self) -> None:
        """Do nothing: each node gets the scripts with its first call."""

    def pipeline(self) -> ClusterPipeline:
        """Return a pipeline that sends each call to its node."""
        return ClusterPipeline(self.client, self.exchange)

    def close(self) -> None:
        self.client.close()

    def ping(self) -> None:
        """Raise ``ServerTrouble`` unless a primary answers."""
        self._everywhere("PING")

    def now_ms(self) -> int:
        """Return the earliest clock of all primaries, in ms, so that nothing is asked for before it is due."""
        if self.exchange.clock is not None:
            return self.exchange.clock() // 1000
        times = self._everywhere("TIME").values()
        return min(int(seconds) * 1000 + int(micros) // 1000 for seconds, micros in times)

    def _on_all(self, commands: Sequence[Command]) -> dict[str, list[Reply]]:
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
    """Collects calls and runs them on all nodes concerned at the same time; see ``RedisPipeline``.

    While a hash slot moves, calls of one slot may run in another order than they were collected in, unless
    ``keep_order`` was called; calls that only read still come after what preceded them.
    """

    def __init__(self, cluster: Cluster, exchange: ServerConnection) -> None:
        super().__init__(exchange)
        self._cluster = cluster

    def send(self) -> Self:
        """Send the collected calls."""
        self._routed_commands = [self._routed_commands_of(call) for call in self._calls]
        flat = [routed for routed_commands in self._routed_commands for routed in routed_commands]
        self._trip = NodeTrip(self._cluster, flat, wanted=self._wanted)
        self._trip.send()
        return self

    def receive(self) -> list[Reply]:
        """Return a result or an ``RmqError`` for each call, in order."""
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
