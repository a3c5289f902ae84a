"""Tasks for the tests of the backend, which do what their arguments say."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

from django_rmq import Reject, Retry
from django_rmq.tasks import RMQBackend, framework

task: Any = framework().base.task


@task()
def noop(*args: Any, **kwargs: Any) -> None:
    pass


@task
def returns(value: Any) -> Any:
    return value


@task()
async def areturns(value: Any) -> Any:
    await asyncio.sleep(0)
    return value


@task(priority=10)
def prior(value: Any) -> Any:
    return value


@task()
def fails(text: str = "this task failed") -> None:
    raise ValueError(text)


@task()
async def afails(text: str = "this task failed") -> None:
    raise ValueError(text)


class Odd(Exception):
    """Its text cannot be shown."""

    def __init__(self, text: str) -> None:
        super().__init__(ValueError(text))


@task()
def fails_oddly() -> None:
    raise Odd("this task failed oddly")


@task()
def rejects() -> None:
    raise Reject("no")


@task()
def waits_once(path: str) -> str:
    if not Path(path).exists():
        Path(path).touch()
        raise Retry("not yet", delay=0)
    return "done"


@task()
def forks_at_last(path: str) -> str:
    if not Path(path).exists():
        Path(path).touch()
        raise Retry("not yet", delay=0)
    child = os.fork()
    if child:
        os.waitpid(child, 0)
    return "the original" if child else "the copy"


@task()
def exits() -> None:
    raise SystemExit(1)


@task()
async def aexits() -> None:
    raise SystemExit(1)


@task()
def interrupts() -> None:
    raise KeyboardInterrupt


@task()
def exits_unless(path: str) -> str:
    """Exit in the first attempt."""
    if not Path(path).exists():
        Path(path).touch()
        raise SystemExit("no such file")
    return "done"


@task()
def returns_what_json_cannot_hold() -> Any:
    return object()


@task(takes_context=True)
def attempt(context: Any, until: int = 1) -> int:
    if context.attempt < until:
        raise ValueError(f"attempt {context.attempt}")
    return int(context.attempt)


@task(takes_context=True)
async def aattempt(context: Any, until: int = 1) -> int:
    if context.attempt < until:
        raise ValueError(f"attempt {context.attempt}")
    return int(context.attempt)


@task(takes_context=True)
def own_id(context: Any) -> str:
    return str(context.task_result.id)


ran: list[Any] = []
"""What `remembers` has been called with, in this process."""


@task()
def remembers(value: Any) -> None:
    ran.append(value)


@task(takes_context=True)
def dies(context: Any, path: str, times: int) -> int:
    """Kill the worker in the middle of the first `times` attempts, once there is the file `path`-`attempt`."""
    with Path(path).open("a") as ran_at:
        ran_at.write(f"{os.getpid()}\n")
    if context.attempt <= times:
        sleeps.func(f"{path}-{context.attempt}")
        os.kill(os.getpid(), signal.SIGKILL)
    return int(context.attempt)


@task()
async def gathers(path: str, number: int) -> bool:
    """Return whether `number` of these run at the same time."""
    together.append(path)
    for _ in range(500):
        if together.count(path) >= number:
            return True
        await asyncio.sleep(0.01)
    return False


together: list[str] = []


class Backend(RMQBackend):  # type: ignore[misc]
    """Not the backend that workers know."""


def plain() -> None:
    """Not a task."""


@task()
def sleeps(path: str) -> None:
    """Return when there is such a file."""
    end = time.monotonic() + 60
    while not Path(path).exists() and time.monotonic() < end:
        time.sleep(0.01)


@task()
def takes_a_moment(value: Any) -> Any:
    time.sleep(0.05)
    return value


@task()
async def atakes_a_moment(value: Any) -> Any:
    await asyncio.sleep(0.05)
    return value
