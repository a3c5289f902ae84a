"""What a person does at run time, as real worker processes take it."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from django_rmq.core.model.topic import Topic, TopicType
from tests.e2e.processes import Happened, Start, environment_of, manage, named
from tests.support.brokers import Broker
from tests.support.workers import eventually, send, total

WORK = Topic("work", TopicType.RANGE_MERGE, slots=4, time_range_ms=1)
SHARED = Topic("shared", TopicType.RANGE_MERGE, slots=4, time_range_ms=1, serial=False)


@pytest.fixture
def run(redis_url: str, prefix: str, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a command of manage.py as an operator does."""

    def run_command(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        return manage(environment_of(tmp_path, redis_url, prefix), *arguments, **options)

    return run_command


@pytest.mark.parametrize("topic", [WORK, SHARED], ids=["serial", "not serial"])
def test_a_pause_is_heeded_by_all_processes_and_a_resume_too(
    start: Start,
    broker: Broker,
    happened: Happened,
    run: Callable[..., subprocess.CompletedProcess[str]],
    topic: Topic,
) -> None:
    worker = start(topic.name, "--processes", "2", "--threads", "2")
    worker.ready()
    # Each thread runs one that waits for the test, and has more in hand.
    send(broker, topic, named(*range(200), do="wait"))
    happened.wait("begun", 4)
    answer = run("rmqpause", topic.name)
    paused_at = time.monotonic()
    assert answer.returncode == 0, answer.stderr
    running = len(happened.lines("begun"))
    eventually(
        lambda: sum(broker.count(topic, slot).prepare for slot in range(4)) <= running,
        "giving back what has not begun",
        25,
    )
    given_back = time.monotonic() - paused_at
    running = len(happened.lines("begun"))
    happened.go()
    happened.wait("done", running)
    eventually(
        lambda: not sum(broker.count(topic, slot).prepare for slot in range(4)), "the end of what ran", 10
    )
    assert len(happened.lines("begun")) == running < 20, "nothing began after the pause"
    answer = run("rmqresume", topic.name, "--json")
    assert json.loads(answer.stdout)[0]["outcomes"] == {"resumed": 4}
    resumed_at = time.monotonic()
    eventually(lambda: len(happened.lines("begun")) > running, "going on", 25)
    print(f"heeded within {given_back:.3f} s, went on within {time.monotonic() - resumed_at:.3f} s")
    happened.wait("done", 200)
    eventually(lambda: total(broker, topic, "committed") == 200, "all commits")
    assert total(broker, topic, "failed") == total(broker, topic, "expired") == 0
