"""The backend of tasks that PEER_TASKS names: tasks are enqueued by ``django_tasks``, by two workers, and results are kept."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import measuring

NAME = os.environ["PEER_TASKS"]
BULK = "no bulk call: enqueue in a loop"
SLOTS = 16
SETTINGS, GUARANTEE = {
    "rmq": (
        "1 worker of 2 processes, results kept for a day, all else as it comes",
        "at least once, with 16 retries: what a dead worker held runs again after its time-out (30 s)",
    ),
    "huey": (
        "2 consumers, 1 thread each, no periodic tasks, results kept",
        "at most once: popped before it runs; no retries",
    ),
    "db": (
        "2 workers, PostgreSQL with fsync=off, results kept",
        "a task whose worker dies stays *running*; no retries",
    ),
    "rq": (
        "2 SimpleWorkers (no fork), results kept for 500 s",
        "at most once: a task whose worker dies is marked failed; no retries",
    ),
}[NAME]
COMMAND = {
    "rmq": "runrmqconsumers --processes 2",
    "huey": "run_huey -w 1 -n -q",
    "db": "db_worker --interval 0.05 --no-startup-delay --verbosity 0",
    "rq": "rqworker default --worker-class rq.SimpleWorker --job-class django_tasks_rq.Job --verbosity 0",
}[NAME]
WORKERS = [[sys.executable, "-m", "django", *COMMAND.split()]] * (1 if NAME == "rmq" else 2)
LISTS = {"huey": ["huey.redis.bench"], "rq": ["rq:queue:default"]}
SETS = {
    "rq": ["rq:wip:default"],
    "rmq": [
        key for slot in range(SLOTS) for key in (f"tasks.default_{slot}", f"prepare_{{tasks.default_{slot}}}")
    ],
}


def bulk(count: int) -> None:
    import task_work

    task: Any = task_work.nothing
    for n in range(count):
        task.enqueue(n)


single = bulk


def left(client: Any) -> int:
    if NAME == "db":
        return int(_rows().filter(finished_at=None).count())
    pipeline = client.pipeline(transaction=False)
    for key in LISTS.get(NAME, ()):
        pipeline.llen(key)
    for key in SETS.get(NAME, ()):
        pipeline.zcard(key)
    return sum(pipeline.execute())


def _rows() -> Any:
    from django_tasks_db.models import DBTaskResult

    return DBTaskResult.objects


if NAME == "db":

    def clear() -> None:
        _rows().all().delete()


if __name__ == "__main__":
    os.environ["DJANGO_SETTINGS_MODULE"] = "task_settings"
    if NAME == "rmq":
        root = str(Path(__file__).parents[2])
        sys.path.insert(0, root)
        os.environ["PYTHONPATH"] = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    import django

    django.setup()
    if NAME == "db":
        from django.core.management import call_command

        call_command("migrate", verbosity=0)
    measuring.main(sys.modules[__name__])
