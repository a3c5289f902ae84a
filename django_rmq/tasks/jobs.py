"""The ``Job``: one call of a task, as its message carries it.

``task_modules`` finds the task of a path, ``priority`` computes the priority of the message.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, NamedTuple

from django_rmq.exceptions import UnknownTask
from django_rmq.tasks import Framework
from django_rmq.tasks.task_modules import import_tasks, imported


class Job(NamedTuple):
    """One call of a task, as its message carries it."""

    path: str
    """``module.name`` of the task."""
    args: list[object]
    kwargs: dict[str, object]
    backend: str
    """The alias of the backend."""
    queue: str
    priority: int
    enqueued_at: datetime
    run_after: datetime | None
    in_loop: bool
    """Whether the function is a coroutine function."""

    @property
    def body(self) -> dict[str, object]:
        """The message's body."""
        body = {
            "task": self.path,
            "args": self.args,
            "kwargs": self.kwargs,
            "backend": self.backend,
            "queue": self.queue,
            "priority": self.priority,
            "enqueued_at": self.enqueued_at.isoformat(),
        }
        if self.run_after is not None:
            body["run_after"] = self.run_after.isoformat()
        if self.in_loop:
            body["async"] = True
        return body

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

    def task(self, framework: Framework) -> object:
        """Return the task, with the options of this call.

        Raises ``UnknownTask`` if no imported module has such an object, ``TypeError`` if it is something else, and the
        framework's ``InvalidTask`` if the backend does not take it any more.
        """
        task = imported(self.path)
        if task is None:
            # Web processes import the tasks of all apps only if a result needs them.
            import_tasks()
            task = imported(self.path)
        if task is None:
            raise UnknownTask(
                f"no module that is imported here has the task {self.path[:200]!r}. Tasks are found in the tasks modules "
                'of the installed apps. Name any other module in OPTIONS["MODULES"] of the backend, or import it in '
                "AppConfig.ready"
            )
        if not isinstance(task, framework.base.Task):
            raise TypeError(f"{self.path} is a {type(task).__name__}, and not a task")
        given = (self.priority, self.queue, self.backend, self.run_after)
        if given == (task.priority, task.queue_name, task.backend, task.run_after):
            return task
        return task.using(
            priority=self.priority, queue_name=self.queue, backend=self.backend, run_after=self.run_after
        )
