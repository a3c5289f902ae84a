"""Jobs: what a message says of its task, and its place in its queue."""

from __future__ import annotations

from datetime import datetime
from typing import Any, NamedTuple

from django_rmq.exceptions import UnknownTask
from django_rmq.tasks import task_modules
from django_rmq.tasks.frameworks import Framework

_LOWEST = 1_024
"""Above all that priority topics may read as a retry."""

_LEVEL = 1 << 35
"""How many places a priority has."""

_STEP_MS = 20
_SINCE_MS = 1_767_225_600_000
"""2026-01-01. The places of a priority last until 2047; tasks of later days have the last one."""


def place(priority: int, since: datetime) -> int:
    """Return a topic's priority for a task's: first the higher one, then what has waited longer, in steps of 20 ms."""
    steps = (round(since.timestamp() * 1000) - _SINCE_MS) // _STEP_MS
    return _LOWEST + (priority + 101) * _LEVEL - 1 - min(max(steps, 0), _LEVEL - 1)


class Job(NamedTuple):
    """One call of a task, as its message carries it."""

    path: str
    """``module.name`` of the task."""
    args: list[Any]
    kwargs: dict[str, Any]
    backend: str
    """The alias of the backend."""
    queue: str
    priority: int
    enqueued_at: datetime
    run_after: datetime | None
    in_loop: bool
    """Whether the function is a coroutine function."""

    @property
    def body(self) -> dict[str, Any]:
        """The message's body."""
        found = {
            "task": self.path,
            "args": self.args,
            "kwargs": self.kwargs,
            "backend": self.backend,
            "queue": self.queue,
            "priority": self.priority,
            "enqueued_at": self.enqueued_at.isoformat(),
        }
        if self.run_after is not None:
            found["run_after"] = self.run_after.isoformat()
        if self.in_loop:
            found["async"] = True
        return found

    @property
    def place(self) -> int:
        """Its priority in the topic of its queue."""
        return place(self.priority, self.run_after or self.enqueued_at)

    @classmethod
    def of(cls, body: Any) -> Job:
        """Return the job in a message's body. Raises ``ValueError`` for any other body."""
        try:
            after = body.get("run_after")
            if not isinstance(body["task"], str):
                raise TypeError(f"the task is {type(body['task']).__name__}, and not a path")
            return cls(
                body["task"],
                body["args"],
                body["kwargs"],
                body["backend"],
                body["queue"],
                body["priority"],
                datetime.fromisoformat(body["enqueued_at"]),
                None if after is None else datetime.fromisoformat(after),
                body.get("async", False),
            )
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"the body is not that of a task: {error!r}") from None

    def task(self, framework: Framework) -> Any:
        """Return the task, with the options of this call.

        Raises ``UnknownTask`` if no imported module has such an object, ``TypeError`` if it is something else, and the
        framework's ``InvalidTask`` if the backend does not take it any more.
        """
        found = task_modules.imported(self.path)
        if found is None:
            # Web processes import the tasks of all apps only if they have to.
            task_modules.import_tasks()
            found = task_modules.imported(self.path)
        if found is None:
            raise UnknownTask(
                f"no module that is imported here has the task {self.path[:200]!r}. Tasks are found in the tasks modules "
                'of the installed apps. Name any other module in OPTIONS["MODULES"] of the backend, or import it in '
                "AppConfig.ready"
            )
        if not isinstance(found, framework.base.Task):
            raise TypeError(f"{self.path} is a {type(found).__name__}, and not a task")
        given = (self.priority, self.queue, self.backend, self.run_after)
        if given == (found.priority, found.queue_name, found.backend, found.run_after):
            return found
        return found.using(
            priority=self.priority, queue_name=self.queue, backend=self.backend, run_after=self.run_after
        )


__all__ = ["Job", "place"]
