"""Listeners that do what their message says, and write down that they did."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time

from asgiref.sync import sync_to_async
from django.db import connection

from django_rmq import Message, Retry, listener, send_message
from tests.e2e import ledger
from tests.e2e.worker_project import points, stalls
from tests.e2e.worker_project.happened import write_down, write_in_line
from tests.e2e.worker_project.settings import WORKER_DATA


def wait_for_the_test(seconds: float = 30) -> None:
    """Return when the test has made the file `go`."""
    end = time.monotonic() + seconds
    while not (WORKER_DATA / "go").exists() and time.monotonic() < end:
        time.sleep(0.01)


def insert(name: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO inserted VALUES (%s, %s)", [name, threading.get_ident()])


@listener("work")
@listener("shared")
@listener("one-slot")
@listener("brief")
def work(message: Message) -> None:
    body = message.body
    write_down("begun", body)
    do = body.get("do")
    if do == "wait":
        wait_for_the_test()
    elif do == "hang":
        wait_for_the_test(600)
    elif do == "kill once" and message.retries_left == message.topic.max_retries:
        os.kill(os.getpid(), signal.SIGKILL)
    elif do == "raise":
        raise ConnectionError("the database is down")
    elif do == "insert":
        insert(body["name"])
        time.sleep(0.005)
    elif do == "send":
        time.sleep(0.05)
        send_message("nobody", body)
    write_down("done", body)


@listener("kept")
def kept(message: Message) -> None:
    message.progress(0.5, str(os.getpid()))
    write_down("begun", message.body)
    is_first = message.retries_left == message.topic.max_retries
    do = message.body.get("do")
    if do == "wait":
        wait_for_the_test()
    elif do == "kill" or (do == "kill once" and is_first):
        os.kill(os.getpid(), signal.SIGKILL)
    write_down("done", message.body)


def enter(message: Message) -> tuple[int, int, int, str]:
    entry = (threading.get_ident(), message.slot, message.receipt, message.body["name"])
    ledger.write(WORKER_DATA / "ledger", "start", 0, *entry)
    return entry


def leave(message: Message, entry: tuple[int, int, int, str]) -> None:
    do = message.body.get("do")
    points.doom.passing("in-listener")
    if do == "kill":
        ledger.write_last(WORKER_DATA / "ledger", "kill", *entry)
        os.kill(os.getpid(), signal.SIGKILL)
    elif do == "fail" or (do == "fail once" and message.retries_left == message.topic.max_retries):
        ledger.write(WORKER_DATA / "ledger", "fail", 0, *entry)
        raise Retry(do)
    ledger.write(WORKER_DATA / "ledger", "end", 0, *entry)


@listener("in-line")
def in_line(message: Message) -> None:
    body = message.body
    write_in_line("begins", body)
    is_first = message.retries_left == message.topic.max_retries
    if is_first and (body["number"] * 31 + body["entity"]) % 100 == 0:
        raise Retry("one in a hundred fails once")
    write_in_line("succeeds", body)


def entered(message: Message) -> None:
    entry = enter(message)
    time.sleep(message.body["ms"] / 1000)
    leave(message, entry)


async def entered_beside(message: Message) -> None:
    entry = enter(message)
    await asyncio.sleep(message.body["ms"] / 1000)
    leave(message, entry)


for topic in ("ledger", "permits", "chaos", "poison", "killing", "taken-over"):
    listener(topic)(entered_beside if os.environ.get("WORKER_ASYNC") == "1" else entered)


@listener("moving-merge")
@listener("moving-priority")
@listener("moving-fixed")
@listener("moving-keyed")
@listener("moving-shared")
def moving(message: Message) -> None:
    """Write down whose message ran: slots change."""
    body = message.body
    entry = (threading.get_ident(), body["entity"], message.receipt, body["name"])
    ledger.write(WORKER_DATA / "ledger", "start", 0, *entry)
    time.sleep(body["ms"] / 1000)
    ledger.write(WORKER_DATA / "ledger", "end", 0, *entry)


@listener("later")
async def later(message: Message) -> None:
    write_down("begun", message.body)
    if message.body.get("do") == "insert":
        await sync_to_async(insert)(message.body["name"])
    else:
        await asyncio.get_running_loop().run_in_executor(None, wait_for_the_test)
    write_down("done", message.body)


if "WORKER_POINTS" in os.environ:
    points.install()
if "WORKER_STALLS" in os.environ:
    stalls.install()
