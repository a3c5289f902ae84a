# pyright: strict
"""Calls and what will hold their answers, as type checkers see them: an answer of a pipeline is not there before its execution.

A comment names what mypy and pyright must find in its line, as in ``user.py``.
"""

from typing import assert_type

from django_rmq.core.commands.ack import commit
from django_rmq.core.commands.fetch import prepare
from django_rmq.core.model.replies import Prepared
from django_rmq.core.model.topic import Topic
from django_rmq.core.redis.broker import RedisBroker


def use(broker: RedisBroker, topic: Topic) -> None:
    settled = commit(topic, 0, 1, [b"a"])
    assert_type(broker.run(settled), list[str])
    pipeline = broker.pipeline()
    later: list[str] = pipeline.add(settled)  # mypy: assignment; pyright: reportAssignmentType
    answer = pipeline.add(prepare(topic, 0, "owner", None, 1))
    [*_words] = answer  # mypy: misc; pyright: reportGeneralTypeIssues
    assert_type(answer.get(), Prepared)
    counted: int = answer.get()  # mypy: assignment; pyright: reportAssignmentType
    print(later, counted)
