"""The job of every queue does nothing. In ``benchmarks.peers lone`` it writes the time of its call into the file PEER_STARTED."""

from __future__ import annotations

import mmap
import os
import time
from functools import cache
from pathlib import Path

import redis

RAN = "peer:ran"
STARTED = "PEER_STARTED"


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
