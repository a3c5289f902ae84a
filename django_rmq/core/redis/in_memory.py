"""A broker in the memory of this process, for tests of users: it runs the real scripts on fakeredis, a server in Python.

It replaces the transport only. Everything that the scripts do is as on a Redis server.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from importlib.util import find_spec
from typing import ClassVar

from django_rmq.core.commands.script_call import Call
from django_rmq.core.model.send_results import Confirmed, Durability
from django_rmq.core.model.server_checks import ServerInfo, SlowCommand
from django_rmq.core.model.topic import Topic
from django_rmq.core.redis import wire
from django_rmq.core.redis.broker import RedisBroker, RedisPipeline, ServerConnection
from django_rmq.core.redis.wire import Clock
from django_rmq.exceptions import ConfigurationError

INSTALL = "pip install 'django-redis-rmq[testing]'"
"""The command that installs what this broker runs on."""

_PREPARE = """
redis.sha1hex = python.eval("lambda text: __import__('hashlib').sha1(text).hexdigest().encode()")

local text_of = python.eval("lambda name: __import__('django_rmq.core.lua').core.lua.load(name.decode()).text")
local compiled = {}
redis.run = function(name)
  compiled[name] = compiled[name] or assert(loadstring(text_of(name), name))
  return compiled[name]()
end

local collect, calls = collectgarbage, 0
collectgarbage = function()
  calls = calls + 1
  if calls % 1000 == 0 then collect() end
end

setfenv(0, setmetatable({}, {__index = _G}))
"""
"""Lua code that adds what fakeredis lacks (redis.sha1hex), and makes it five times as fast.

fakeredis would compile a script at each call, collect all garbage after it, and search all globals at each command of a script
for one that the script has set. With this code, the globals that scripts set are in a table of their own.
"""


class InMemoryBroker(RedisBroker):
    """Runs calls on a server that lives in this process, and ends with it.

    ``clock`` returns microseconds since the epoch; by default the time of this machine. Keys that expire by themselves
    (results, answers, outcomes) do so by the time of this machine, also with a clock of a test.
    Raises ``ConfigurationError`` without the extra ``testing``.
    """

    in_memory: ClassVar[bool] = True

    def __init__(self, prefix: str = "", clock: Clock | None = None) -> None:
        super().__init__(_client(), prefix, clock or _system_clock)
        self.exchange = _Exchange(self.client, self.prefix, self.exchange.clock)

    def pipeline(self) -> _Pipeline:
        """Return a pipeline, which collects calls; ``execute`` runs all of them."""
        return _Pipeline(self.exchange)

    def servers(self) -> list[ServerInfo]:
        """Return an empty list: there is no server."""
        return []

    def slow_commands(self) -> list[SlowCommand]:
        """Return an empty list: there is no server."""
        return []

    def refused(self, topics: Iterable[Topic]) -> list[str]:
        """Return an empty list: nothing is refused in memory."""
        return []


class _Exchange(ServerConnection):
    """Sends the names of scripts instead of their digests, because the scripts are in this process."""

    def command(self, call: Call[object]) -> wire.Command:
        command = super().command(call)
        if command[0] != "EVALSHA":
            return command
        return ("EVAL", b"return redis.run('%b')" % call.script.encode(), *command[2:])

    def load_scripts(self) -> None:
        pass


class _Pipeline(RedisPipeline):
    """Collects calls. It confirms every requested durability, because memory has neither a replica nor a disk."""

    def __init__(self, exchange: ServerConnection) -> None:
        super().__init__(exchange)
        self._claimed: Durability | None = None

    def confirm(self, wanted: Durability) -> None:
        self._claimed = wanted

    def receive(self) -> list[object]:
        results = super().receive()
        if self._claimed is not None:
            self.confirmed = Confirmed(self._claimed.replicas or None, self._claimed.fsync or None)
        return results


def is_installed() -> bool:
    """Return whether fakeredis is installed, and lupa, without which it runs no script."""
    return all(find_spec(name) is not None for name in ("fakeredis", "lupa"))


def _client() -> object:
    if not is_installed():
        raise ConfigurationError(f"a broker in memory runs on fakeredis, which is not installed: {INSTALL}")
    import fakeredis

    client = fakeredis.FakeStrictRedis(server=fakeredis.FakeServer(), retry=None)
    client.eval(_PREPARE, 0)
    return client


def _system_clock() -> int:
    return time.time_ns() // 1000
