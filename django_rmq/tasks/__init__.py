"""Tasks of Django 6.0 and newer, or of the package django-tasks, with RMQ as their backend.

    TASKS = {"default": {"BACKEND": "django_rmq.tasks.RMQBackend"}}

Each backend takes the tasks of both. The objects and the signals of ``RMQBackend`` are Django's where Django has tasks;
those of ``PackageBackend`` are those of django-tasks on every version of Django.
"""

from __future__ import annotations

from typing import Any

from django_rmq.tasks.backend import backend_of
from django_rmq.tasks.frameworks import PACKAGE, framework

RMQBackend: Any = backend_of(framework())


def __getattr__(name: str) -> Any:
    # The import is deferred, because the package django-tasks need not be installed.
    if name == "PackageBackend":
        found = globals()[name] = backend_of(framework(PACKAGE))
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["RMQBackend"]
