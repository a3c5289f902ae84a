# pyright: strict
"""A project's code, as type checkers see it. A comment names what mypy and pyright must find in its line; elsewhere nothing.

`test_user_types.py` runs both. Nothing here is ever executed.
"""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, assert_type

import django_rmq
from django_rmq import (
    Message,
    MessageStatus,
    Reject,
    RemoveResult,
    Retry,
    Send,
    SendResult,
    SendResults,
    acancel_message,
    aensure_message,
    amessage_status,
    aremove_message,
    asend_message,
    asend_messages,
    cancel_message,
    ensure_message,
    listener,
    message_status,
    remove_message,
    replay_message,
    schedule,
    send_message,
    send_messages,
)

LATER = datetime.now(UTC) + timedelta(minutes=15)


@dataclass
class Price:
    sku: int
    price: float


def misspell() -> None:
    from django_rmq import send_mesage  # noqa: F401 # mypy: attr-defined; pyright: reportAttributeAccessIssue

    print(django_rmq.listner)  # mypy: attr-defined; pyright: reportAttributeAccessIssue


def send() -> None:
    assert_type(send_message("prices", {"sku": 1}), SendResult)
    assert_type(send_messages("prices", [{"sku": 1}, Send({"sku": 2}, key="b")]), SendResults)
    assert_type(ensure_message("prices", {"sku": 1}, key="a", delay=timedelta(seconds=2)), SendResult)
    send_message("orders", {"order": 9}, fixed_time=LATER, on_commit=False)
    send_message("orders", 9, fixed_tme=LATER)  # mypy: call-arg; pyright: reportCallIssue
    send_message("orders", 9, priority="high")  # mypy: arg-type; pyright: reportArgumentType
    send_messages("orders", [9], key="k")  # mypy: call-arg; pyright: reportCallIssue
    sent = send_message("prices", {"sku": 1})
    if sent.status == "refused" or not sent.ok:
        raise RuntimeError(sent.id)
    if sent.status == "refuse":  # mypy: comparison-overlap; pyright: reportUnnecessaryComparison
        return
    print(sent.stat)  # mypy: attr-defined; pyright: reportAttributeAccessIssue


async def send_from_a_coroutine() -> None:
    assert_type(await asend_message("prices", {"sku": 1}, key="a"), SendResult)
    assert_type(await asend_messages("prices", [{"sku": 1}], headers={"a": "b"}), SendResults)
    assert_type(await aensure_message("prices", {"sku": 1}), SendResult)
    await asend_message("orders", 9, fixed_tme=LATER)  # mypy: call-arg; pyright: reportCallIssue
    await asend_message("orders", 9, priority="high")  # mypy: arg-type; pyright: reportArgumentType
    await asend_messages("orders", [9], fsinc=True)  # mypy: call-arg; pyright: reportCallIssue
    await asend_message("prices")  # mypy: call-arg; pyright: reportCallIssue
    asend_message("prices", {"sku": 1})  # mypy: unused-coroutine; pyright: reportUnusedCoroutine


def ask() -> str:
    found = message_status("orders", key="o-1")
    assert_type(found, MessageStatus)
    if found.state == "wating":  # mypy: comparison-overlap; pyright: reportUnnecessaryComparison
        return ""
    if found.state in ("waiting", "resting"):
        return f"due {found.due}"
    return f"{found.progress}" if found.state == "running" else found.reason


def take_back(sent: SendResult) -> bool:
    assert_type(remove_message("orders", id=sent.id), RemoveResult)
    assert_type(cancel_message("orders", {"order": 9}), RemoveResult)
    cancel_message("orders", id=7)  # mypy: arg-type; pyright: reportArgumentType
    removed = remove_message("orders", key="o-1", using="default")
    if removed.status == "in_flight":  # mypy: comparison-overlap; pyright: reportUnnecessaryComparison
        return False
    word = replay_message("orders", key="o-1")
    if word == "replaid":  # mypy: comparison-overlap; pyright: reportUnnecessaryComparison
        return False
    ensure_message("orders", {"order": 9}, id=sent.id, priority=50)
    return removed == "waiting" or removed.status == "running"


async def take_back_from_a_coroutine(sent: SendResult) -> None:
    assert_type(await aremove_message("orders", id=sent.id), RemoveResult)
    assert_type(await acancel_message("orders", key="o-1"), RemoveResult)
    assert_type(await amessage_status("orders", id=sent.id), MessageStatus)
    await acancel_message("orders", ids=[sent.id])  # mypy: call-arg; pyright: reportCallIssue


@listener("prices")
def render(message: Message[Price]) -> None:
    assert_type(message.body, Price)
    assert_type(message.bodies, list[Price])
    print(message.body.skuu)  # mypy: attr-defined; pyright: reportAttributeAccessIssue
    if message.retries_left > 3:
        raise Retry("busy", delay=30)
    raise Reject("no such price")


@listener("orders", batch_size=100)
def close(messages: list[Message[Any]]) -> None:
    for message in messages:
        message.reject("too late")


@listener("mails", batch_size=5)
async def mail(messages: list[Message[Price]]) -> None:
    print(len(messages))


@schedule("nightly", topic="reports", cron="0 3 * * *")
@listener("reports", once=True)
async def report(message: Message[Any]) -> bool:
    return message.headers.get("quick") is None


@listener("wrong", batch_size=5)  # mypy: type-var; pyright: reportArgumentType
def takes_one(message: Message[Any]) -> None: ...


@listener("wrong")  # mypy: type-var; pyright: reportArgumentType
def takes_many(messages: list[Message[Any]]) -> None: ...


@listener("wrong", batch_sise=5)  # mypy: call-overload; pyright: reportCallIssue
def is_misspelt(message: Message[Any]) -> None: ...


def untyped(message: Message) -> int:
    return int(message.body["sku"])


def text(message: Message[str]) -> int:
    return message.body  # mypy: return-value; pyright: reportReturnType


def call(message: Message[Price]) -> None:
    assert_type(render(message), None)
    render([message])  # mypy: arg-type; pyright: reportArgumentType
