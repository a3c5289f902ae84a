"""Commands and replies of one server: what a broker and its pipelines have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from redis.exceptions import NoScriptError, RedisError, ResponseError

from django_rmq.core import lua
from django_rmq.core.commands.script_call import Call
from django_rmq.core.redis import wire
from django_rmq.core.redis.error_translation import explain, translate
from django_rmq.exceptions import WrongType

T = TypeVar("T")


class ServerConnection:
    """Sends commands to a server over the connections of ``client``, and records whether it has the scripts.

    No call is repeated, except after NOSCRIPT, which means that nothing ran.
    """

    def __init__(self, client: Any, prefix: str, clock: wire.Clock | None) -> None:
        self.client = client
        self.prefix = prefix
        self.clock = clock
        self.frames = wire.Frames(prefix)
        self._has_scripts = False

    def command(self, call: Call[Any]) -> tuple[Any, ...]:
        """Return the command that runs a call."""
        return wire.command(call, self.prefix, self.clock)

    def load_scripts(self) -> None:
        """Load every script into the server, in one round trip, so that no pipeline finds one missing."""
        if self._has_scripts:
            return
        for reply in self.each(wire.loading()):
            if isinstance(reply, RedisError):
                raise translate(reply) from reply
        self._has_scripts = True

    def scripts_are_lost(self) -> None:
        """Record that the server lacks some script: the next pipeline loads all of them again."""
        self._has_scripts = False

    def run(self, call: Call[T]) -> T:
        """Run a call and return the meaning of its reply."""
        is_framed = call.varying and self.clock is None
        packed = self.frames.written(call) if is_framed else wire.packed(self.command(call))
        try:
            reply = self._answer(call.script, packed)
        except WrongType as error:
            raise explain(call, self.prefix, error) from error
        return call.read(reply, self.prefix)

    def _answer(self, script: str, packed: bytes) -> Any:
        try:
            try:
                return self.ask(packed)
            except NoScriptError:
                self.client.execute_command("SCRIPT LOAD", lua.load(script).text)
                return self.ask(packed)
        except RedisError as error:
            raise translate(error) from error

    def ask(self, packed: bytes) -> Any:
        """Run one command like the driver does without retries, but without its bookkeeping, which takes half the time."""
        pool = self.client.connection_pool
        connection = pool.get_connection()
        try:
            connection.send_packed_command([packed])
            return connection.read_response()
        except ResponseError:
            raise
        except BaseException:
            connection.disconnect()
            raise
        finally:
            pool.release(connection)

    def each(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Return the plain answer, or the ``RedisError``, of each command, in one round trip."""
        pool = self.client.connection_pool
        replies: list[Any] = []
        try:
            connection = pool.get_connection()
            try:
                connection.send_packed_command(connection.pack_commands(commands))
                for _ in commands:
                    try:
                        replies.append(connection.read_response())
                    except ResponseError as error:
                        replies.append(error)
            finally:
                if len(replies) < len(commands):
                    connection.disconnect()
                pool.release(connection)
        except RedisError as error:
            raise translate(error) from error
        return replies

    def take_connection(self) -> Any:
        """Return a connection of the pool."""
        return self.client.connection_pool.get_connection()

    def give_back(self, connection: Any, *, broken: bool = False) -> None:
        """Return a connection to the pool."""
        if broken:
            connection.disconnect()
        self.client.connection_pool.release(connection)
