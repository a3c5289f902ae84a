"""Listeners that end their process, or leave processes of their own behind."""

from __future__ import annotations

import ctypes
import os
import time

from django_rmq import Message, listener
from tests.e2e.worker_project.happened import write_down


@listener("work")
@listener("one-slot")
def work(message: Message) -> None:
    body = message.body
    write_down("begun", body)
    do, _, code = body.get("do", "").partition(" ")
    is_first = message.retries_left == message.topic.max_retries
    if do == "os" and is_first:
        os._exit(int(code))
    elif do == "c" and is_first:
        ctypes.CDLL(None).exit(int(code))
    elif do == "orphan":
        leave_orphan()
    write_down("done", body)


def leave_orphan() -> None:
    """Start a process that outlives its parent."""
    child = os.fork()
    if child == 0:
        if os.fork() == 0:
            time.sleep(0.2)
        os._exit(0)
    os.waitpid(child, 0)
