"""Attributes that the package reads by a name in a text, which neither mypy nor an import looks up."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable
from types import ModuleType

import pytest

from django_rmq.admin import charts
from django_rmq.api import deliveries
from django_rmq.conf.server_settings import RedisServer
from django_rmq.conf.topic_settings import TOPIC_KEYS
from django_rmq.core.model import redis_url
from django_rmq.core.model.changed_limits import LIMITS
from django_rmq.core.model.ledger import Ledger
from django_rmq.core.model.replies import Counts, DescribeReply
from django_rmq.core.model.schedule import EDITABLE, Schedule
from django_rmq.core.model.status import STATE_OF
from django_rmq.core.model.topic import Topic
from django_rmq.core.monitoring.history import Depth, HistoryTotals, Rates, SummedMinute
from django_rmq.core.producer.placement import OPTIONS, Send
from django_rmq.core.topic_registration import CONSUMER_OPTIONS
from django_rmq.management.commands import rmqpause, rmqresume
from django_rmq.metrics import collector
from django_rmq.operations import Deliveries, Operations, TopicStats, topic_audit, undeclared_topics
from django_rmq.spark.source_options import QUEUES


def has(kind: type, name: str) -> bool:
    """Return whether objects of a class have an attribute: one of the class, or a field of a dataclass."""
    return hasattr(kind, name) or name in getattr(kind, "__dataclass_fields__", {})


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (Ledger, topic_audit.DEPTHS),
        (Ledger, [f"{name}_drift" for name in topic_audit.DRIFTS]),
        (Topic, undeclared_topics.COMMON.values()),
        (Topic, LIMITS),
        (Topic, [field for field, _ in TOPIC_KEYS.values() if field not in ("typed", "upcast")]),
        (Topic, [option.lower() for option in CONSUMER_OPTIONS]),
        (Schedule, EDITABLE),
        (Send, OPTIONS),
        (Depth, collector.STATES.values()),
        (TopicStats, collector.STATES.values()),
        (HistoryTotals, [field for field, _ in collector.COUNTERS.values()]),
        (Counts, [queue for queue in QUEUES if queue != "claim"]),
        (DescribeReply, STATE_OF),
        (RedisServer, redis_url.LOGIN),
        (Operations, [rmqpause.Command.act, rmqresume.Command.act]),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_every_name_of_a_list_is_an_attribute(kind: type, names: Iterable[str]) -> None:
    assert [name for name in names if not has(kind, name)] == []
    assert list(names), "there is nothing to look up"


@pytest.mark.parametrize(
    ("module", "function", "place", "kind"),
    [
        (charts, "depths", 1, Depth),
        (charts, "rates", 1, Rates),
        (charts, "line", 3, SummedMinute),
        (collector, "_age", 1, TopicStats),
        (collector, "_age", 2, Depth),
        (deliveries, "settle", 2, Deliveries),
    ],
)
def test_every_name_in_a_call_is_an_attribute(
    module: ModuleType, function: str, place: int, kind: type
) -> None:
    calls = [each for each in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(each, ast.Call)]
    names = [
        given.value
        for call in calls
        if getattr(call.func, "id", getattr(call.func, "attr", "")) == function and len(call.args) > place
        if isinstance(given := call.args[place], ast.Constant) and isinstance(given.value, str)
    ]
    assert [name for name in names if not has(kind, name)] == []
    assert names, "there is nothing to look up"
