"""Helpers for the tests of projects: captured messages, listeners that run immediately, and a clock.

    class CheckoutTests(RMQTestMixin, TestCase):
        def test_an_order_is_closed_when_its_time_is_up(self):
            with self.captureOnCommitCallbacks(execute=True):
                order = checkout(...)
            self.assertMessageSent("order-timeouts", body={"order": order.pk})
            self.advance("15m")
            self.drain()

Messages wait for the database commit, which never comes inside ``TestCase``: run those callbacks as above
(pytest: ``django_capture_on_commit_callbacks(execute=True)``). Importing this module loads no Django.
"""

from django_rmq.core.redis.in_memory import InMemoryBroker
from django_rmq.testing.captured_messages import (
    CapturedMessage,
    CapturedMessages,
    assert_message_sent,
    assert_no_messages,
    captured_messages,
)
from django_rmq.testing.cases import Clock, RMQTestMixin, clock_from_now, memory_broker
from django_rmq.testing.inline_worker import ScheduleState, adrain, drain, schedule_state, start_schedules

__all__ = [
    "CapturedMessage",
    "CapturedMessages",
    "Clock",
    "InMemoryBroker",
    "RMQTestMixin",
    "ScheduleState",
    "adrain",
    "assert_message_sent",
    "assert_no_messages",
    "captured_messages",
    "clock_from_now",
    "drain",
    "memory_broker",
    "schedule_state",
    "start_schedules",
]
