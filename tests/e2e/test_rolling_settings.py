"""Old and new settings of one project at once, as in a rolling deployment and its rollback."""

from __future__ import annotations

import json

import pytest

from django_rmq.core.model.topic import Topic, TopicType
from tests.e2e.processes import Happened, Start, environment_of, manage
from tests.support.brokers import Broker
from tests.support.workers import audit, eventually, total

BRIEF = Topic("brief", TopicType.RANGE_MERGE, slots=1, time_range_ms=1)


@pytest.mark.slow
def test_a_time_out_is_changed_while_old_and_new_processes_send_and_consume(
    start: Start, broker: Broker, happened: Happened, redis_url: str, prefix: str
) -> None:
    old, new = {"WORKER_TIMEOUT": "30"}, {"WORKER_TIMEOUT": "60"}
    names: list[str] = []

    def send(settings: dict[str, str]) -> str:
        """Send one message from a process that has just started; return what it has logged."""
        names.append(f"m{len(names)}")
        environment = environment_of(happened.data, redis_url, prefix, **settings)
        sent = manage(environment, "rmqsend", "brief", json.dumps({"name": names[-1], "do": ""}))
        assert sent.returncode == 0, sent.stderr
        happened.wait("done", len(names))
        return sent.stderr

    worker = start("brief", **old)
    worker.ready()
    assert "follows Redis" not in send(old)
    assert "TIMEOUT is 60 here and 30 in Redis" in send(new), (
        "the new version sends before anything is applied"
    )
    refused = start("brief", **new)
    assert refused.wait() == 2
    assert "TIMEOUT is 60 here and 30 in Redis" in refused.output
    applied = manage(environment_of(happened.data, redis_url, prefix, **new), "rmqtopics", "brief", "--apply")
    assert applied.returncode == 0, applied.stderr
    newer = start("brief", **new)
    newer.ready()
    assert "follows Redis" not in send(new)
    assert "TIMEOUT is 30 here and 60 in Redis" in send(old), "an old process starts once more, or comes back"
    worker.end()
    send(old)
    send(new)
    eventually(lambda: total(broker, BRIEF, "committed") == len(names), "all commits")
    assert sorted(happened.lines("done")) == sorted(names)
    audit(broker, BRIEF)
