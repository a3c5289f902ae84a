"""A Redis with a replica behind one address, which fails over again and again, each time without its last writes."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

from tests.support.servers import QUICK_SYNC, RedisServer, TcpProxy, Together, ask, wait_for_link
from tests.support.workers import eventually


class FailingRedis(Together):
    """A primary and a replica that follows through a link of its own; clients know only ``url``."""

    def __init__(self) -> None:
        self.lost_bytes: list[int] = []
        """For each fail-over, what the replica had not got of the stream of writes."""
        self.primary = RedisServer(**QUICK_SYNC)
        self._front = TcpProxy(0)

    @property
    def url(self) -> str:
        """The address of whichever server is the primary."""
        return self._front.url

    def begin(self, enter: Callable[[Any], Any]) -> None:
        enter(self.primary)
        self._front.target_port = self.primary.port
        enter(self._front)
        self._follow()

    def _follow(self) -> None:
        """Give the primary a new replica."""
        self._link = self._stack.enter_context(TcpProxy(self.primary.port))
        self.replica = self._stack.enter_context(
            RedisServer(replicaof=f"127.0.0.1 {self._link.port}", **QUICK_SYNC)
        )

    def fail_over(self) -> None:
        """Cut the replica off, let writes come to the primary for a while, kill it, and promote the replica."""
        wait_for_link(self.replica)
        self._link.cut()
        time.sleep(random.uniform(0.05, 0.5))
        eventually(lambda: _offset(self.primary) > _offset(self.replica), "a write that is lost")
        written = _offset(self.primary)
        self.primary.kill()
        self.lost_bytes.append(written - _offset(self.replica))
        ask(self.replica.port, "REPLICAOF", "NO", "ONE")
        self.primary = self.replica
        self._front.target_port = self.primary.port
        self._front.disconnect()
        self._follow()


def _offset(server: RedisServer) -> int:
    """Return how far the stream of writes has come, as a server knows it."""
    lines: bytes = ask(server.port, "INFO", "replication")
    values = dict(line.split(":", 1) for line in lines.decode().split("\r\n") if ":" in line)
    return int(values["master_repl_offset" if values["role"] == "master" else "slave_repl_offset"])
