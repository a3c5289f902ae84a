"""What the package offers to the tests of others: captured messages, draining, a given time, fixtures."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import redis
from asgiref.sync import async_to_sync
from django.test import TestCase, override_settings
from django.utils import timezone

from django_rmq import (
    ConfigurationError,
    InvalidMessage,
    Message,
    Reject,
    Retry,
    UnknownTopic,
    asend_message,
    ensure_message,
    listener,
    send_message,
    send_messages,
)
from django_rmq.conf import get_config
from django_rmq.connections import get_broker
from django_rmq.exceptions import OperationRefused
from django_rmq.operations import Actor, Operations
from django_rmq.testing import (
    Clock,
    RMQTestMixin,
    adrain,
    assert_message_sent,
    assert_no_messages,
    captured_messages,
    clock_from_now,
    drain,
    memory_broker,
)
from django_rmq.worker.listener_registry import isolated
from tests.support.brokers import direct

ROOT = Path(__file__).parents[2]
TOPICS = {
    "prices": {"TYPE": "range_merge", "SLOTS": 4, "TIME_RANGE": 5},
    "renders": {"TYPE": "priority", "SLOTS": 4, "BACKOFF": 0},
    "orders": {"TYPE": "fixed_time", "SLOTS": 4, "BACKOFF": 60},
    "few": {"TYPE": "priority", "SLOTS": 1, "MAX_RETRIES": 1, "BACKOFF": 0},
    "keyed": {"TYPE": "priority", "SLOTS": 1, "IDENTITY": "key"},
}


@pytest.fixture(autouse=True)
def _settings(redis_url: str, prefix: str) -> Iterator[None]:
    rmq = {"REDIS": redis_url, "KEY_PREFIX": prefix, "TOPICS": TOPICS, "AUTODISCOVER": None}
    with override_settings(RMQ=rmq), isolated():
        yield


@pytest.fixture
def clock() -> Iterator[Clock]:
    """A broker in memory whose time stands still until it is advanced."""
    with memory_broker(found := clock_from_now()):
        yield found


def depth(name: str) -> dict[str, int]:
    topic, broker = get_config().topic(name), direct(get_broker())
    counts = [broker.count(topic, slot) for slot in range(topic.slots)]
    states = ("store", "prepare", "retry", "dead")
    found = {state: sum(getattr(count, state) for count in counts) for state in states}
    return {state: number for state, number in found.items() if number}


def test_captured_messages_go_nowhere_and_are_seen_as_they_were_given() -> None:
    with captured_messages() as messages:
        result = send_message("renders", {"sku": 1}, priority=500)
        send_messages("prices", [1, 2], time_range=timedelta(seconds=1))
        ensure_message("keyed", "x", key="k", priority=20)
    assert [(message.topic, message.body, message.options) for message in messages] == [
        ("renders", {"sku": 1}, {"priority": 500}),
        ("prices", 1, {"time_range": timedelta(seconds=1)}),
        ("prices", 2, {"time_range": timedelta(seconds=1)}),
        ("keyed", "x", {"key": "k", "priority": 20}),
    ]
    assert [message.ensure for message in messages] == [False, False, False, True]
    assert (messages[3].key, messages[3].member) == ("k", b"k")
    assert result.ok
    assert messages.of("prices") == messages[1:3]
    assert depth("renders") == depth("prices") == {}
    send_message("renders", {"sku": 1}, priority=500)
    assert len(messages) == 4


def test_captured_messages_are_validated_as_ever() -> None:
    with captured_messages() as messages:
        with pytest.raises(InvalidMessage):
            send_message("renders", 1, priority=1)
        with pytest.raises(UnknownTopic):
            send_message("render", 1)
    assert messages == []


def test_captured_messages_may_be_delivered_all_the_same() -> None:
    with captured_messages(deliver=True) as messages:
        send_message("renders", 1, priority=500)
    assert messages[0].result.status == "stored"
    assert depth("renders") == {"store": 1}


def test_claims_are_refused_where_spark_cannot_read(clock: Clock) -> None:
    operations = Operations(Actor("tester", "command"))
    with override_settings(RMQ={"BROKER": "memory", "TOPICS": TOPICS}):
        for act in (operations.claims, operations.return_claims):
            with pytest.raises(OperationRefused, match="memory"):
                act("prices")


def test_assertions_look_at_topic_body_key_and_options() -> None:
    with captured_messages() as messages:
        assert_no_messages()
        send_message("renders", {"sku": 1}, priority=500)
        send_message("keyed", "x", key="k", priority=20)
        assert_no_messages("prices")
        assert assert_message_sent("renders", body={"sku": 1}, priority=500) == [messages[0]]
        assert assert_message_sent("keyed", 1, key="k") == [messages[1]]
        assert_message_sent("renders", count=0, body={"sku": 2})
    assert_message_sent("renders", messages=messages)


@pytest.mark.parametrize(
    ("topic", "wanted"),
    [
        ("prices", {}),
        ("renders", {"count": 2}),
        ("renders", {"count": 0}),
        ("renders", {"body": {"sku": 2}}),
        ("renders", {"priority": 501}),
        ("renders", {"key": "k"}),
    ],
)
def test_an_assertion_that_fails_says_what_was_sent(topic: str, wanted: dict[str, Any]) -> None:
    with captured_messages():
        send_message("renders", {"sku": 1}, priority=500)
        with pytest.raises(AssertionError, match=r"renders: \{'sku': 1\} \{'priority': 500\}"):
            assert_message_sent(topic, **wanted)
        with pytest.raises(AssertionError, match="expected no message, found 1; sent"):
            assert_no_messages()


def test_an_assertion_outside_a_capture_says_how_it_is_used() -> None:
    with pytest.raises(RuntimeError, match="captured_messages"):
        assert_message_sent("renders")


def test_drain_runs_listeners_on_what_is_due_and_on_what_they_send(clock: Clock) -> None:
    seen: list[Any] = []

    @listener("prices")
    def ordered(message: Message) -> None:
        seen.append(message.body)
        send_message("renders", {"render": message.body}, priority=50)

    @listener("renders")
    def render(message: Message) -> None:
        seen.append(message.body)
        assert message.extend()

    send_messages("prices", [1, 2])
    assert drain() == 0
    clock.advance(5)
    assert drain() == 4
    assert sorted(map(str, seen)) == ["1", "2", "{'render': 1}", "{'render': 2}"]
    assert depth("prices") == depth("renders") == {}


def test_a_coroutine_drains_and_extends(clock: Clock) -> None:
    seen: list[Any] = []

    @listener("renders")
    async def render(message: Message) -> None:
        seen.append((message.body, await message.aextend()))

    async def test() -> int:
        await asend_message("renders", 1, priority=50)
        return await adrain("renders", limit=10)

    assert async_to_sync(test)() == 1
    assert seen == [(1, True)]


def test_drain_works_on_the_configured_redis_as_well() -> None:
    seen: list[Any] = []
    listener("renders", batch_size=10)(
        lambda messages: seen.append(sorted(message.body for message in messages))
    )
    send_messages("renders", [1, 2, 3], priority=50)
    with pytest.raises(ConfigurationError, match="drain\\(\\) would consume from a real Redis"):
        drain()
    assert drain(live=True) == 3
    assert sorted(body for batch in seen for body in batch) == [1, 2, 3]
    assert depth("renders") == {}


def test_drain_takes_one_topic_if_asked(clock: Clock) -> None:
    listener("renders")(lambda message: None)
    listener("few")(lambda message: None)
    send_message("renders", 1, priority=50)
    send_message("few", 1, priority=50)
    assert drain("few") == 1
    assert depth("renders") == {"store": 1}
    with pytest.raises(UnknownTopic):
        drain("fewer")
    with pytest.raises(ConfigurationError, match="has no listener"):
        drain("orders")


class Broken(Exception):
    pass


def test_what_a_listener_raises_is_raised_once_its_message_was_rolled_back(clock: Clock) -> None:
    def fail(message: Message) -> None:
        raise Broken(message.body)

    listener("orders")(fail)
    send_message("orders", 9, fixed_time=timezone.now() + timedelta(seconds=1))
    clock.advance(2)
    with pytest.raises(Broken, match="9"):
        drain()
    assert depth("orders") == {"retry": 1}
    clock.advance(61)
    assert drain(raise_errors=False) == 1
    assert depth("orders") == {"retry": 1}


def test_a_batch_that_raises_is_raised_too(clock: Clock) -> None:
    def fail(messages: list[Message]) -> None:
        raise Broken

    listener("few", batch_size=10)(fail)
    send_messages("few", [1, 2, 3], priority=50)
    with pytest.raises(Broken):
        drain()
    assert depth("few") == {"store": 3}


def test_without_errors_a_message_that_always_fails_ends_in_dead(clock: Clock) -> None:
    listener("few")(lambda message: False)
    send_message("few", 1, priority=50)
    assert drain(raise_errors=False) == 2
    assert depth("few") == {"dead": 1}


def test_an_exit_is_an_error_of_the_listener_and_ctrl_c_ends_the_drain(clock: Clock) -> None:
    raised: list[BaseException] = [SystemExit(1), SystemExit(1), KeyboardInterrupt()]

    @listener("orders")
    def exits(message: Message) -> None:
        raise raised.pop(0)

    send_message("orders", 9, fixed_time=timezone.now() + timedelta(seconds=1))
    clock.advance(2)
    assert drain(raise_errors=False) == 1
    clock.advance(61)
    with pytest.raises(SystemExit):
        drain()
    clock.advance(61)
    with pytest.raises(KeyboardInterrupt):
        drain(raise_errors=False)
    assert depth("orders") == {"retry": 1}
    assert raised == []


def test_retry_and_reject_are_decisions_and_no_errors(clock: Clock) -> None:
    def decide(message: Message) -> None:
        if message.body == "reject":
            raise Reject("never")
        if message.retries_left:
            raise Retry("later", delay=0)

    listener("few")(decide)
    send_messages("few", ["reject", "retry"], priority=50)
    assert drain() == 3
    assert depth("few") == {"dead": 1}


def test_a_body_that_cannot_be_decoded_is_an_error(clock: Clock) -> None:
    listener("few")(lambda message: None)
    direct(get_broker()).send_replace(get_config().topic("few"), 0, [50], [b"{not json"])
    with pytest.raises(InvalidMessage, match="cannot be decoded"):
        drain()


def test_listeners_that_feed_themselves_for_ever_are_stopped(clock: Clock) -> None:
    @listener("renders")
    def again(message: Message) -> None:
        send_message("renders", message.body + 1, priority=50)

    send_message("renders", 0, priority=50)
    with pytest.raises(RuntimeError, match="do listeners of renders send more messages"):
        drain(limit=20)
    assert depth("renders") == {"store": 1}


def test_a_mixin_whose_set_up_would_never_run_is_refused() -> None:
    with pytest.raises(TypeError, match="Late: RMQTestMixin must stand before TestCase"):
        type("Late", (TestCase, RMQTestMixin), {})


class InTestCases(RMQTestMixin, TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.seen: list[Any] = []
        listener("orders")(lambda message: self.seen.append(message.body))

    def test_a_message_is_sent_and_handled_in_its_time(self) -> None:
        with self.captureOnCommitCallbacks(execute=True):
            send_message("orders", 9, fixed_time=timezone.now() + timedelta(minutes=15))
        self.assertMessageSent("orders", 1, body=9)
        self.assertNoMessages("renders")
        assert self.drain() == 0
        self.advance("16m")  # the clock of the test began before the send
        assert self.drain("orders") == 1
        assert self.seen == [9]


@pytest.mark.slow
def test_the_fixtures_are_found_by_pytest_itself(tmp_path: Path) -> None:
    (tmp_path / "shop_settings.py").write_text(
        "INSTALLED_APPS = ['django_rmq']\n"
        "RMQ = {'BROKER': 'memory', 'TOPICS': {'orders': {'TYPE': 'range_merge', 'TIME_RANGE': 60}}}\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_shop.py").write_text(
        "from django_rmq import listener, send_message\n"
        "from django_rmq.worker.listener_registry import isolated\n"
        "from django_rmq.testing import assert_message_sent\n"
        "\n"
        "def test_time_is_given(rmq, rmq_captured, rmq_drain):\n"
        "    seen = []\n"
        "    with isolated():\n"
        "        listener('orders')(lambda message: seen.append(message.body))\n"
        "        assert send_message('orders', 1).status == 'stored'\n"
        "        assert rmq_drain() == 0\n"
        "        rmq.advance(61)\n"
        "        assert rmq.drain('orders') == 1\n"
        "    assert seen == [1]\n"
        "    assert [message.body for message in rmq_captured] == [1]\n"
        "\n"
        "def test_each_test_begins_with_nothing(rmq):\n"
        "    assert send_message('orders', 1).status == 'stored'\n"
        "\n"
        "def test_captured_alone_goes_nowhere(rmq_captured):\n"
        "    send_message('orders', 1)\n"
        "    assert_message_sent('orders', body=1)\n"
        "    assert rmq_captured[0].result.status == 'stored'\n"
        "\n"
        "def test_nothing_went_anywhere():\n"
        "    assert send_message('orders', 1).status == 'stored'\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "shop_settings"}
    answer = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert "4 passed" in answer.stdout, answer.stdout + answer.stderr


def test_a_script_that_sets_a_global_is_refused_in_memory_as_by_a_server() -> None:
    with memory_broker() as broker:
        with pytest.raises(redis.ResponseError):
            broker.client.eval("count = 1", 0)
        answer = broker.client.eval("return {KEYS[1], ARGV[1], tostring(count)}", 1, "a", "b")
        assert answer == [b"a", b"b", b"nil"]
