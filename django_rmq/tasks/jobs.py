"""The ``Job``: one call of a task, as its message carries it, and the modules in which its task is found.

Anyone who may send to a topic of tasks chooses the path of a task, and any consumer the text of an error. So a path
that comes from Redis never leads to an import: it is looked up in the modules that the process has imported. Which
modules it imports follows from the project alone: the ``tasks`` modules of the installed apps, and
``OPTIONS["MODULES"]`` of the backends. The priority of its message is here, too.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from importlib import import_module
from typing import Any, NamedTuple

from django.apps import apps
from django.utils.module_loading import module_has_submodule

from django_rmq.conf import Config, get_config
from django_rmq.core.log import safe_logger
from django_rmq.exceptions import ConfigurationError, UnknownTask
from django_rmq.tasks import Framework

logger = safe_logger("django_rmq.tasks")

# Anyone who may send chooses the path, and the search builds a name for each dot in it.
LONGEST_PATH = 500
"""Maximum number of characters of a path that is looked up."""

# A module of tasks may use a result while it is imported, and so come here again in the same thread.
_importing = threading.RLock()
_imported: set[tuple[str, ...]] = set()
"""The modules of each project that this process has imported: tests have several."""


def imported(path: object) -> object:
    """Return the object at a dotted path if its module has been imported, or None. This imports nothing."""
    if not isinstance(path, str) or len(path) > LONGEST_PATH:
        return None
    parts = path.split(".")
    for end in range(len(parts) - 1, 0, -1):
        module = sys.modules.get(".".join(parts[:end]))
        if module is not None:
            return _member(module, parts[end:])
    return None


def _member(value: object, names: list[str]) -> object:
    for name in names:
        try:
            # ``getattr`` would call the ``__getattr__`` of a module, which may import the module that the path names.
            held = object.__getattribute__(value, "__dict__")
        except AttributeError:
            return None
        value = held.get(name) if isinstance(held, Mapping) else None
    return value


def import_tasks() -> None:
    """Import the modules of the project's tasks, once in this process.

    The ``tasks`` module of an app may need what this project does not have, such as another queue. If it cannot be
    imported, this is an error in the log, and its tasks are unknown. Raises ``ConfigurationError`` for a module of
    ``OPTIONS["MODULES"]`` that cannot be imported.
    """
    config = get_config()
    if not config.tasks:
        return
    with _importing:
        declared, of_packages = declared_modules(config), list(of_apps("tasks"))
        known = (*declared, *of_packages)
        if known in _imported:
            return
        for module, error in import_each(declared):
            raise ConfigurationError(
                f'OPTIONS["MODULES"] of TASKS names {module!r}, which cannot be imported: {error!r}'
            ) from error
        for module, error in import_each(of_packages):
            logger.error(
                "The tasks of %s are unknown, because the module cannot be imported: %r",
                module,
                error,
                exc_info=error,
                extra={"rmq_event": "tasks_not_imported"},
            )
        _imported.add(known)


def declared_modules(config: Config) -> list[str]:
    """Return the modules that ``OPTIONS["MODULES"]`` of the backends names."""
    return list(dict.fromkeys(name for backend in config.tasks.values() for name in backend.options.modules))


def of_apps(name: str) -> Iterator[str]:
    """Return the modules of this name that the installed apps have."""
    for app in apps.get_app_configs():
        if app.module is not None and module_has_submodule(app.module, name):
            yield f"{app.name}.{name}"


def import_each(names: Iterable[str]) -> list[tuple[str, Exception]]:
    """Import these modules; return those that cannot be imported, with the error of each."""
    failed = []
    for name in names:
        try:
            import_module(name)
        except Exception as error:  # noqa: BLE001 - whatever a module of the project raises
            failed.append((name, error))
    return failed


_LOWEST = 1_024
"""Larger than any score that a priority topic interprets as a retry."""

_LEVEL = 1 << 35
"""The number of places that a priority has."""

_STEP_MS = 20

_SINCE_MS = 1_767_225_600_000
"""2026-01-01. The places of a priority last until 2047; later tasks share the last place."""


def message_priority(priority: int, since: datetime) -> int:
    """Return the priority of the message of a task: higher ones of tasks first, then longer waits, in steps of 20 ms."""
    # Django's priorities reach from -100 to 100, so the largest result is below MAX_PRIORITY, which is 2 ** 43.
    steps = (round(since.timestamp() * 1000) - _SINCE_MS) // _STEP_MS
    return _LOWEST + (priority + 101) * _LEVEL - 1 - min(max(steps, 0), _LEVEL - 1)


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

    @property
    def message_priority(self) -> int:
        """The priority of the message in the topic of its queue."""
        return message_priority(self.priority, self.run_after or self.enqueued_at)

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
