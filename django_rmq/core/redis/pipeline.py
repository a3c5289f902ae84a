"""Many calls in one round trip."""

from __future__ import annotations

from typing import Any, Self, TypeVar

from redis.exceptions import NoScriptError, RedisError, ResponseError

from django_rmq.core.commands.script_call import Answer, Call
from django_rmq.core.model.send_results import Confirmed, Durability
from django_rmq.core.redis import wire
from django_rmq.core.redis.connection import ServerConnection
from django_rmq.core.redis.error_translation import explain, translate
from django_rmq.core.redis.write_confirmation import durability_commands, read_confirmed
from django_rmq.exceptions import RmqError

T = TypeVar("T")


class RedisPipeline:
    """Collects calls; ``execute`` runs them and returns results, errors in their places.

    ``send`` and ``receive`` are the halves of ``execute``: between them, Redis and the caller work at the
    same time. A failed connection fails every call of the pipeline, because it is not known which of them
    ran.
    """

    def __init__(self, exchange: ServerConnection) -> None:
        self.prefix = exchange.prefix
        self._exchange = exchange
        self._calls: list[Call[Any]] = []
        self._answers: list[Answer[Any]] = []
        self._connection: Any = None
        self._wanted: Durability | None = None
        self._in_order = False
        self.confirmed: Confirmed | None = None
        """What ``confirm`` has reached; available after ``receive``."""

    def add(self, call: Call[T]) -> Answer[T]:
        """Collect a call; return an object that holds its answer after the pipeline has run."""
        answer: Answer[T] = Answer()
        self._calls.append(call)
        self._answers.append(answer)
        return answer

    def confirm(self, wanted: Durability) -> None:
        """Wait, after the collected calls, until they are as durable as ``wanted``.

        Waits at most two fifths of the socket time-out for each kind of confirmation.
        """
        self._wanted = wanted

    def keep_order(self) -> None:
        """Run everything after a call again if that call has to be repeated. All calls must be safe to run twice."""
        self._in_order = True

    def __len__(self) -> int:
        return len(self._calls)

    def execute(self) -> list[Any]:
        """Run what was collected and return a result or an ``RmqError`` for each call."""
        return self.send().receive() if self._calls else []

    def send(self) -> Self:
        """Send what was collected. Raises ``ServerTrouble``; ``receive`` must not be called then."""
        exchange = self._exchange
        exchange.load_scripts()
        connection = None
        try:
            connection = exchange.take_connection()
            commands = [exchange.command(call) for call in self._calls]
            if self._wanted is not None:
                commands += durability_commands(self._wanted, connection)
            connection.send_packed_command(wire.chunks(commands))
        except RedisError as error:
            self._give_up(connection)
            raise translate(error) from error
        except BaseException:
            self._give_up(connection)
            raise
        self._connection = connection
        return self

    def receive(self) -> list[Any]:
        """Return a result or an ``RmqError`` for each call, in order."""
        connection, self._connection = self._connection, None
        calls, answers = self._taken()
        try:
            replies = [self._reply(connection) for _ in calls]
            if self._wanted is not None:
                self.confirmed = read_confirmed(self._wanted, connection)
        except RedisError as error:
            self._give_up(connection)
            raise translate(error) from error
        except BaseException:
            self._give_up(connection)
            raise
        self._exchange.give_back(connection)
        if any(isinstance(reply, NoScriptError) for reply in replies):
            self._exchange.scripts_are_lost()
            self._repeat_behind(calls, replies)
        return self._told(answers, [self._result(*both) for both in zip(calls, replies, strict=True)])

    def _taken(self) -> tuple[list[Call[Any]], list[Answer[Any]]]:
        """Return what was collected, and start collecting again."""
        taken = self._calls, self._answers
        self._calls, self._answers = [], []
        return taken

    @staticmethod
    def _reply(connection: Any) -> Any:
        try:
            return connection.read_response()
        except ResponseError as error:
            return error

    def _repeat_behind(self, calls: list[Call[Any]], replies: list[Any]) -> None:
        """Repeat the reads that follow a call that has to be repeated, or everything that follows it if in order."""
        if self.confirmed is not None:
            # These run after the confirmation.
            self.confirmed = Confirmed(None, False if self.confirmed.fsynced is not None else None)
        first = next(i for i, reply in enumerate(replies) if isinstance(reply, NoScriptError))
        for i in range(first + 1, len(calls)):
            if self._in_order or calls[i].reads:
                replies[i] = NoScriptError()

    def _result(self, call: Call[Any], reply: Any) -> Any:
        try:
            if isinstance(reply, NoScriptError):
                return self._run_again(call)
            if isinstance(reply, RedisError):
                return explain(call, self.prefix, translate(reply))
            return call.read(reply, self.prefix)
        except RmqError as error:
            return error

    def _run_again(self, call: Call[Any]) -> Any:
        if not wire.has_packed(call):
            return self._exchange.run(call)
        again = RedisPipeline(self._exchange)
        again.add(call)
        return again.execute()[0]

    @staticmethod
    def _told(answers: list[Answer[Any]], results: list[Any]) -> list[Any]:
        """Return the results, and set the answer of each call."""
        for answer, result in zip(answers, results, strict=True):
            answer.become(result)
        return results

    def _give_up(self, connection: Any) -> None:
        if connection is not None:
            self._exchange.give_back(connection, broken=True)
