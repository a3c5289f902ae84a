"""Tasks of Django 6.0 and newer, or of the package django-tasks, with RMQ as their backend.

    TASKS = {"default": {"BACKEND": "django_rmq.tasks.RMQBackend"}}

Each backend takes the tasks of both. The objects and the signals of ``RMQBackend`` are Django's where Django has tasks;
those of ``PackageBackend`` are those of django-tasks on every version of Django.
"""

from __future__ import annotations

from typing import Any

from django_rmq.tasks.frameworks import PACKAGE, framework

RMQBackend: Any
PackageBackend: Any


def __getattr__(name: str) -> Any:
    # A class is made when it is asked for: every process imports this package, and none of the frameworks need be installed.
    if name not in ("RMQBackend", "PackageBackend"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from django_rmq.tasks.backend import backend_of

    backend = globals()[name] = backend_of(framework(PACKAGE if name == "PackageBackend" else ""))
    return backend


__all__ = ["RMQBackend"]
