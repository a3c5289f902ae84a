"""The way of commands to the nodes of a Redis Cluster and back, all nodes at the same time.

A command that a node answered without running it (MOVED, ASK, TRYAGAIN, CLUSTERDOWN, LOADING, NOSCRIPT), or that could not be
sent, is repeated for a while. A command that was sent over a connection that broke is not repeated, because it is unknown
whether it ran.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self

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
from django_rmq.core.commands.script_call import Reply
from django_rmq.core.model.send_results import Confirmed, Durability
from django_rmq.core.redis.broker import Connection, durability_commands, give_back, read_confirmed

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
        for at, routed in enumerate(group):
            try:
                if routed.asking:
                    connection.read_response()
                routed.reply = connection.read_response()
            except (ResponseError, BusyLoadingError) as error:
                routed.reply = error
            except RedisError as error:
                # The connection broke: the replies before it count, and it is unknown whether the other commands ran.
                self._mark_lost(node, group[at:], error)
                give_back(node.client, connection, broken=True)
                self._confirm_nothing()
                return
            self._judge(node, routed)
        if self._wanted is not None:
            try:
                confirmed = read_confirmed(self._wanted, connection)
            except RedisError as error:
                self._mark_lost(node, (), error)
                give_back(node.client, connection, broken=True)
                self._confirm_nothing()
                return
            # A node that has run none of its commands has nothing to confirm.
            if not all(routed.repeat for routed in group):
                self._confirm(confirmed)
        give_back(node.client, connection)

    def _confirm_nothing(self) -> None:
        if self._wanted is not None:
            self._confirm(Confirmed(None, False if self._wanted.fsync else None))

    def _confirm(self, confirmed: Confirmed) -> None:
        self.confirmed = confirmed if self.confirmed is None else self.confirmed.least(confirmed)

    def _judge(self, node: Node, routed: RoutedCommand) -> None:
        """Decide whether an answered routed is done, repeated or redirected."""
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
