"""The job of every queue: none; in ``benchmarks.overlap`` a sleep in the event loop, or a call of a server that answers as late.

PEER_SLEEP gives the seconds; PEER_WEB the port of that server, which ``python jobs.py`` runs. None: the job sleeps. Each such job
adds one to the number in the file PEER_ENDED when it ends; one process runs all of them. In ``benchmarks.peers.lone`` a job
writes the time of its call into the file PEER_STARTED.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import sys
import time
from functools import cache
from pathlib import Path

import redis

SLEEP = float(os.environ.get("PEER_SLEEP", "0"))
WEB = int(os.environ.get("PEER_WEB", "0"))

RAN = "peer:ran"
STARTED = "PEER_STARTED"

_idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []


def ran() -> None:
    """Record that a job runs, as far as a benchmark asks for it."""
    if STARTED in os.environ:
        _start()
    else:
        _run_once()


def _start() -> None:
    """Note the time of this call, which is the next one: one worker runs the jobs in turn, in the order of sending."""
    times = started()
    times[_calls[0]] = time.time_ns()
    _calls[0] += 1


_calls = [0]


@cache
def started() -> memoryview:
    """Return the memory of the file that has the times of the calls, in ns since the epoch."""
    with Path(os.environ[STARTED]).open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 0)).cast("Q")


@cache
def _run_once() -> None:
    """Record, once in each process, that jobs really run, if ``measuring.drain`` asks for it: it gives PEER_REDIS_PORT."""
    if port := os.environ.get("PEER_REDIS_PORT"):
        redis.Redis(port=int(port)).set(RAN, 1)


@cache
def ended() -> memoryview:
    """Return the memory of the file that has the number of jobs that have ended."""
    with Path(os.environ["PEER_ENDED"]).open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 8)).cast("Q")


async def job() -> None:
    """Sleep, or call the server on a connection that is kept; without PEER_SLEEP, do nothing."""
    ran()
    if not SLEEP:
        return
    if WEB:
        await _call()
    else:
        await asyncio.sleep(SLEEP)
    ended()[0] += 1


async def _call() -> None:
    reader, writer = _idle.pop() if _idle else await asyncio.open_connection("127.0.0.1", WEB)
    writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    head = await reader.readuntil(b"\r\n\r\n")
    body = await reader.readexactly(int(head.partition(b"Content-Length: ")[2].partition(b"\r")[0]))
    if body != b"done":
        raise RuntimeError(f"the server answered {body!r}")
    _idle.append((reader, writer))


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            await reader.readuntil(b"\r\n\r\n")
            await asyncio.sleep(SLEEP)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ndone")
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def _serve() -> None:
    server = await asyncio.start_server(_answer, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until the one who started it ends
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(_serve())
