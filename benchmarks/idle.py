"""What a worker costs that has nothing to do: ``runrmqconsumers`` with 1,024 slots of one topic, left alone for some seconds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

from benchmarks.harness import Row, cpu_of, descendants, redis_seconds

SLOTS = 1024
ROOT = Path(__file__).parents[1]
GOAL_COMMANDS, GOAL_WORKER, GOAL_REDIS = 5.0, 0.01, 0.02


@contextmanager
def workers(url: str, slots: int, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``runrmqconsumers`` until the block ends."""
    process = subprocess.Popen(
        [sys.executable, "manage.py", "runrmqconsumers", *arguments],
        cwd=ROOT,
        env={
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "benchmarks.worker_project.settings",
            "REDIS_URL": url,
            "SLOTS": str(slots),
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _commands_per_second(client: redis.Redis, seconds: float) -> float:
    """Return how many commands clients send; what scripts call is not counted."""
    count, end = 0, time.monotonic() + seconds
    with client.monitor() as monitor:
        # A command of ours ends the wait, and is not counted.
        while time.monotonic() < end:
            if not monitor.connection.can_read(timeout=0.1):
                continue
            count += monitor.next_command()["client_type"] != "lua"
    return count / seconds


def _is_waiting_everywhere(client: redis.Redis) -> bool:
    """Whether the worker has told all senders until when it sleeps."""
    pipeline = client.pipeline(transaction=False)
    for slot in range(SLOTS):
        pipeline.hexists(f"control_{{noop_{slot}}}", "sleeping_until")
    return all(pipeline.execute())


def measure(client: redis.Redis, url: str, seconds: float) -> list[Row]:
    """Return the rows of an idle worker."""
    client.flushall()
    with workers(url, SLOTS) as process:
        end = time.monotonic() + 60
        while not _is_waiting_everywhere(client):
            if time.monotonic() > end or process.poll() is not None:
                raise RuntimeError("the idle worker did not start")
            time.sleep(0.2)
        time.sleep(2)
        worker, served, begun = cpu_of(*descendants(process.pid)), redis_seconds(client), time.monotonic()
        time.sleep(seconds)
        spent = time.monotonic() - begun
        worker = (cpu_of(*descendants(process.pid)) - worker) / spent
        served = (redis_seconds(client) - served) / spent
        commands = _commands_per_second(client, seconds)
    return [
        _row(
            "idle worker: commands/s sent", f"{commands:.1f}", commands, GOAL_COMMANDS, f"≤ {GOAL_COMMANDS:g}"
        ),
        _row("idle worker: CPU of its processes", f"{worker:.1%} of a core", worker, GOAL_WORKER, "≤ 1 %"),
        _row("idle worker: CPU of Redis", f"{served:.1%} of a core", served, GOAL_REDIS, "≤ 2 %"),
    ]


def _row(work: str, ours: str, value: float, most: float, goal: str) -> Row:
    return Row(
        f"{work}, {SLOTS:,} slots", ours, "-", "-", goal, value <= most, {"value": value, "goal": most}
    )
