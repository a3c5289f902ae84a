"""Tasks in real workers: what is declared nowhere runs, and no death of a worker loses a task or its result."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.test import override_settings
from django.utils import timezone

from django_rmq import connections, tasks
from tests.e2e.processes import Start, WorkerProcess
from tests.newsletter.issues import announce
from tests.newsletter.tasks import count
from tests.support import tasks as errands
from tests.support.workers import eventually

Status = tasks.framework().base.TaskResultStatus

OPTIONS = {
    "TOPIC": {"SLOTS": 4, "BACKOFF": 0, "TIMEOUT": 2},
    "QUEUES": {"brief": {"TIMEOUT": 1, "MAX_RETRIES": 1}},
}

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def project(redis_url: str, prefix: str) -> Iterator[None]:
    """This process sends with the settings of the worker's project."""
    backend = {
        "BACKEND": "django_rmq.tasks.RMQBackend",
        "QUEUES": ["default", "brief"],
        "OPTIONS": {**OPTIONS, "ON_COMMIT": False},
    }
    rmq = {"REDIS": redis_url, "KEY_PREFIX": prefix, "TOPICS": {}}
    with override_settings(RMQ=rmq, TASKS={"default": backend}):
        yield
        connections.close()


@pytest.fixture
def work(start: Start) -> Callable[..., WorkerProcess]:
    def run(*arguments: str) -> WorkerProcess:
        worker = start(*arguments, DJANGO_SETTINGS_MODULE="tests.e2e.task_project.settings")
        worker.ready()
        return worker

    return run


def finished(*given: Any, seconds: float = 30) -> list[Any]:
    """Return the results when all of them have ended."""

    def all_ended() -> bool:
        for result in given:
            if not result.is_finished:
                result.refresh()
        return all(result.is_finished for result in given)

    eventually(all_ended, "the end of the tasks", seconds)
    return list(given)


def test_a_worker_runs_tasks_with_no_topic_declared(work: Callable[..., WorkerProcess]) -> None:
    worker = work()
    for name in ("tasks.default", "tasks-async.default", "tasks.brief", "tasks-later"):
        assert f"{name} (4 slots)" in worker.output
    soon = timezone.now() + timedelta(milliseconds=500)
    each = [
        errands.returns.enqueue(1),
        errands.areturns.enqueue(2),
        errands.returns.using(queue_name="brief", priority=50).enqueue(3),
        errands.returns.using(run_after=soon).enqueue(4),
    ]
    assert [result.return_value for result in finished(*each)] == [1, 2, 3, 4]
    assert each[3].started_at >= soon
    (worker_id,) = set(each[0].worker_ids)
    assert len(worker_id) > 8
    assert {result.attempts for result in each} == {1}
    worker.end()


def test_a_task_whose_worker_is_killed_runs_again_and_its_result_counts_both_attempts(
    work: Callable[..., WorkerProcess], tmp_path: Path
) -> None:
    work()
    result = errands.dies.enqueue(str(tmp_path / "ran"), 1)
    let_die(result, tmp_path, 1)
    (found,) = finished(result)
    assert (found.status, found.return_value, found.attempts) == (Status.SUCCESSFUL, 2, 2)
    assert len(set(found.worker_ids)) == 2
    assert len((tmp_path / "ran").read_text().split()) == 2
    assert found.started_at < found.last_attempted_at < found.finished_at


def let_die(result: Any, folder: Path, attempt: int) -> None:
    """Let an attempt of `dies` kill its worker, once the result says that it has begun."""
    eventually(lambda: _status(result) == Status.RUNNING and result.attempts == attempt, f"attempt {attempt}")
    (folder / f"ran-{attempt}").touch()


def _status(result: Any) -> Any:
    result.refresh()
    return result.status


def test_a_task_whose_whole_machine_dies_runs_again_after_its_time_out(
    work: Callable[..., WorkerProcess], tmp_path: Path
) -> None:
    worker = work()
    result = errands.dies.using(queue_name="brief").enqueue(str(tmp_path / "ran"), 0)
    finished(result)
    other = errands.sleeps.using(queue_name="brief").enqueue(str(tmp_path / "go"))
    eventually(lambda: _status(other) == Status.RUNNING, "running")
    worker.kill()
    (tmp_path / "go").touch()
    assert _status(other) in (Status.RUNNING, Status.READY)
    work()
    (found,) = finished(other)
    assert (found.status, found.attempts) == (Status.SUCCESSFUL, 2)


def test_a_task_that_kills_every_worker_has_failed_in_the_end(
    work: Callable[..., WorkerProcess], tmp_path: Path
) -> None:
    work()
    result = errands.dies.using(queue_name="brief").enqueue(str(tmp_path / "ran"), 100)
    for attempt in (1, 2):
        let_die(result, tmp_path, attempt)
    (found,) = finished(result)
    assert found.status == Status.FAILED
    assert found.attempts == 2
    assert found.errors[-1].exception_class is TimeoutError
    assert len((tmp_path / "ran").read_text().split()) == 2


def test_no_result_is_lost_while_workers_are_killed(work: Callable[..., WorkerProcess]) -> None:
    each = [task.enqueue(n) for n in range(600) for task in (errands.takes_a_moment, errands.atakes_a_moment)]
    worker, draw = work("--processes", "2"), random.Random(7)
    for _ in range(5):
        eventually(lambda: len(worker.children) == 2, "both workers")
        time.sleep(draw.uniform(0.2, 0.5))
        os.kill(draw.choice(worker.children), signal.SIGKILL)
    assert any(_status(result) in (Status.READY, Status.RUNNING) for result in reversed(each))
    finished(*each, seconds=60)
    assert {result.status for result in each} == {Status.SUCCESSFUL}
    assert [result.return_value for result in each] == [n for n in range(600) for _ in range(2)]
    assert all(result.attempts == len(result.worker_ids) >= 1 for result in each)


def test_an_app_that_knows_nothing_of_rmq_works_unchanged(
    work: Callable[..., WorkerProcess], tmp_path: Path
) -> None:
    sources = [path.read_text() for path in Path("tests/newsletter").glob("*.py")]
    assert len(sources) == 3
    assert not any("django_rmq" in source for source in sources)
    work()
    addresses = [f"reader{n}@example.com" for n in range(10)]
    (published,) = finished(announce(7, addresses, timezone.now() + timedelta(milliseconds=200)))
    assert len(published.return_value) == 10
    sent = [count.get_backend().get_result(each) for each in published.return_value]
    finished(*sent)
    (counted,) = finished(count.enqueue(published.return_value))
    assert counted.return_value == {"sent": 10, "of": 10}
    mails = "".join(path.read_text() for path in (tmp_path / "mails").iterdir())
    assert all(f"To: {address}" in mails for address in addresses)
