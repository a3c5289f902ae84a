"""The modules in which tasks are found: which of them a process imports, and the object at a path among those imported.

Anyone who may send to a topic of tasks chooses the path of a task, and any consumer the text of an error. So a path
that comes from Redis never leads to an import: it is looked up in the modules that the process has imported. Which
modules it imports follows from the project alone: the ``tasks`` modules of the installed apps, and
``OPTIONS["MODULES"]`` of the backends.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module

from django.apps import apps
from django.utils.module_loading import module_has_submodule

from django_rmq.conf import Config, get_config
from django_rmq.core.log import safe_logger
from django_rmq.exceptions import ConfigurationError

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
        declared, of_packages = declared_modules(config), list(modules_of_apps("tasks"))
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


def modules_of_apps(name: str) -> Iterator[str]:
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
