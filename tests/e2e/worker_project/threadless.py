"""A listener that can end its thread, in processes that start no executor thread while the file `no-threads` is there."""

from __future__ import annotations

import os
import threading

from django_rmq import Message, listener
from django_rmq.core.consumer import watchdog
from django_rmq.core.consumer.executor_pool import ExecutorThread
from tests.e2e.worker_project.happened import write_down
from tests.e2e.worker_project.settings import WORKER_DATA

watchdog.GIVE_UP_SECONDS = float(os.environ.get("WORKER_GIVE_UP", "10"))
_start = ExecutorThread.start


def _start_if_possible(thread: ExecutorThread) -> None:
    if (WORKER_DATA / "no-threads").exists():
        raise RuntimeError("can't start new thread")
    _start(thread)


ExecutorThread.start = _start_if_possible  # type: ignore[assignment, method-assign]


def _die(batch: object) -> None:
    raise SystemExit


@listener("one-slot")
def work(message: Message) -> None:
    write_down("begun", message.body)
    if message.body["do"] == "die":
        threading.current_thread()._run_batch = _die  # type: ignore[attr-defined]
