"""Tasks of Django 6.0 and newer, or of the package django-tasks, with RMQ as their backend.

    TASKS = {"default": {"BACKEND": "django_rmq.tasks.RMQBackend"}}

Each backend takes the tasks of both. The objects and the signals of ``RMQBackend`` are Django's where Django has tasks;
those of ``PackageBackend`` are those of django-tasks on every version of Django. Importing this imports neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

NATIVE = "django.tasks"
PACKAGE = "django_tasks"


@dataclass(frozen=True, slots=True)
class Framework:
    """The objects that a backend needs of the package whose tasks it takes."""

    package: str
    base: Any
    """The module with ``Task``, ``TaskResult``, ``TaskError``, ``TaskContext`` and ``TaskResultStatus``."""
    backend: Any
    """The class of which backends are subclasses."""
    signals: Any
    exceptions: Any
    backends: Any
    """The backends of ``TASKS`` by alias."""


@cache
def framework(package: str = "") -> Framework:
    """Return a framework by its package; without one Django's own, or that of django-tasks where Django has none.

    Raises ``ImportError`` where neither is installed.
    """
    package = package or (NATIVE if is_native() else PACKAGE)
    try:
        root = import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            # The package is installed, and a module that it imports is missing: this error must not hide that one.
            raise
        raise ModuleNotFoundError(
            "tasks need Django 6.0 or newer, or the package django-tasks: pip install "
            '"django-redis-rmq[tasks]"',
            name=package,
        ) from error
    return Framework(
        package,
        import_module(f"{package}.base"),
        import_module(f"{package}.backends.base").BaseTaskBackend,
        import_module(f"{package}.signals"),
        import_module(f"{package}.exceptions"),
        root.task_backends,
    )


def is_native() -> bool:
    """Return whether Django itself has tasks."""
    return find_spec(NATIVE) is not None


def is_installed(package: str = "") -> bool:
    """Return whether ``framework`` would find one."""
    return (not package and is_native()) or find_spec(package or PACKAGE) is not None


RMQBackend: Any
PackageBackend: Any


def __getattr__(name: str) -> Any:
    # A class is made when it is asked for: every process imports this package, and none of the frameworks need be installed.
    if name not in ("RMQBackend", "PackageBackend"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from django_rmq.tasks.backend import backend_of

    # Two threads may make a class at the same time, and both use the one that was stored first: receivers of signals name it.
    backend = backend_of(name, framework(PACKAGE if name == "PackageBackend" else ""))
    return globals().setdefault(name, backend)


__all__ = ["RMQBackend"]
