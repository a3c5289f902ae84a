"""Checks of what a project declares: its listeners, the types of bodies, schedules, and backends of tasks.

Each topic needs a listener. Listeners with ``once`` need the table and the database that it promises.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from django.apps import AppConfig
from django.conf import settings
from django.core.checks import CheckMessage

from django_rmq import schedules, typed_bodies
from django_rmq.checks.check_messages import AppError, AppWarning, read_project, sentence
from django_rmq.conf import Config, did_you_mean
from django_rmq.conf.task_settings import TaskBackend
from django_rmq.exceptions import ConfigurationError
from django_rmq.outbox.database_access import ask_each
from django_rmq.tasks import task_modules
from django_rmq.tasks.frameworks import is_installed
from django_rmq.worker import listener_registry, once_requirements


def check_bodies(app_configs: Sequence[AppConfig] | None = None, **kwargs: object) -> list[CheckMessage]:
    """Import the types of bodies, and check that their topics can have them."""
    config = read_project()
    if config is None:
        return []
    return [
        AppError(problem.message, hint=problem.hint or None, id=f"django_rmq.{problem.id}")
        for topic in config.topics.values()
        for problem in typed_bodies.problems(topic)
    ]


def check_schedules(app_configs: Sequence[AppConfig] | None = None, **kwargs: object) -> list[CheckMessage]:
    """Import the listeners of every app and check the schedules of the settings and of ``@schedule``."""
    config = read_project()
    if config is None:
        return []
    try:
        declared = schedules.declared_schedules()
    except ConfigurationError as error:
        return [AppError(sentence(error), id="django_rmq.E074")]
    return [
        AppError(problem.message, hint=problem.hint or None, id=f"django_rmq.{problem.id}")
        for schedule in declared.values()
        for problem in schedules.problems(config, schedule)
    ]


def check_tasks(app_configs: Sequence[AppConfig] | None = None, **kwargs: object) -> list[CheckMessage]:
    """Check the backends of TASKS beyond what ``check_settings`` finds."""
    config = read_project()
    if config is None:
        return []
    found: list[CheckMessage] = [problem for backend in config.tasks.values() for problem in _of(backend)]
    if not found:
        found = [
            AppError(
                f'OPTIONS["MODULES"] of TASKS names "{module}", which cannot be imported: {error!r}.',
                id="django_rmq.E089",
            )
            for module, error in task_modules.import_each(task_modules.declared_modules(config))
        ]
    return found


def _of(backend: TaskBackend) -> Iterator[CheckMessage]:
    place = f'TASKS["{backend.alias}"]'
    if not is_installed(backend.package):
        has_none = "this version of Django has no tasks" if not backend.package else "it takes their tasks"
        yield AppError(
            f"{place} needs the package django-tasks, which is not installed: {has_none}.",
            hint='pip install "django-redis-rmq[tasks]".',
            id="django_rmq.E085",
        )
    alias = backend.options.database
    if alias is not None and alias not in settings.DATABASES:
        yield AppError(
            f'{place}["OPTIONS"]["DATABASE"] is {alias!r}, which is not in DATABASES.',
            hint=f"Its aliases are {', '.join(map(repr, settings.DATABASES))}.",
            id="django_rmq.E087",
        )


NAMED = 10
"""The number of topics without a listener that are named; of more there is one warning for all."""


def check_listeners(app_configs: Sequence[AppConfig] | None = None, **kwargs: object) -> list[CheckMessage]:
    """Import the listeners of every app and check that there are topics, and that each has exactly one listener."""
    config = read_project()
    if config is None:
        return []
    found: list[CheckMessage] = []
    failed = listener_registry.discover()
    if not config.topics:
        found.append(
            AppWarning(
                'RMQ["TOPICS"] is empty: no message can be sent.',
                hint='RMQ = {"TOPICS": {"orders": {"TYPE": "fixed_time"}}, ...}.',
                id="django_rmq.W002",
            )
        )
    for one in failed:
        if isinstance(one.error, ConfigurationError):
            kind = "E021" if isinstance(one.error, listener_registry.DuplicateListener) else "E022"
            found.append(AppError(sentence(f"{one.module}: {one.error}"), id=f"django_rmq.{kind}"))
        else:
            message = f"The listeners in {one.module} cannot be imported: {one.reason}"
            found.append(AppError(sentence(message), id="django_rmq.E020"))
    for topic, listener in listener_registry.listeners().items():
        declared = config.topics.get(topic)
        if declared is None:
            meant = did_you_mean(topic, config.topics)
            message = f'{listener.name} ({listener.location}) listens to "{topic}", which is not in RMQ["TOPICS"]{meant}'
            found.append(AppError(message, id="django_rmq.E023"))
        elif not declared.listener:
            message = (
                f'{listener.name} ({listener.location}) listens to "{topic}", which has LISTENER: False.'
            )
            found.append(AppError(message, id="django_rmq.E024"))
        if listener.using is not None:
            found += map(_of_once, once_requirements.problems(config, listener))
            found += map(_of_once, once_requirements.warnings(config, listener))
    # The listeners that seem to be missing may be in what could not be loaded.
    if config.autodiscover is not None and not failed:
        found += _missing(config)
    return found


def _missing(config: Config) -> Iterator[CheckMessage]:
    listeners = listener_registry.listeners()
    missing = [name for name, topic in config.topics.items() if topic.listener and name not in listeners]
    if len(missing) > NAMED:
        named = ", ".join(f'"{name}"' for name in missing[:NAMED])
        yield AppWarning(
            f"{len(missing)} topics have no listener: {named} and {len(missing) - NAMED} more. Their messages "
            "are never delivered.",
            hint=f"Write a @listener for each in the {config.autodiscover}.py of an installed app, "
            'or set "LISTENER": False for those that REST or Spark consumes.',
            id="django_rmq.W001",
        )
        return
    for name in missing:
        yield AppWarning(
            f'Topic "{name}" has no listener: its messages are never delivered.',
            hint=f'Write @listener("{name}") in the {config.autodiscover}.py of an installed app, '
            'or set "LISTENER": False if REST or Spark consumes it.',
            id="django_rmq.W001",
        )


def check_tables(
    app_configs: Sequence[AppConfig] | None = None, databases: Sequence[str] | None = None, **kwargs: object
) -> list[CheckMessage]:
    """Ask the databases of listeners with ``once`` whether they have the table that it needs.

    A warning, because ``migrate`` refuses to run after an error.
    """
    config = read_project()
    if config is None or not databases:
        return []
    wanted = {*listener_registry.once_databases().values()} & {*databases}
    # A database that does not answer is reported when something needs it.
    given, _ = ask_each(sorted(wanted), once_requirements.missing_table)
    return [_of_once(problem) for answer in given.values() for problem in answer]


def _of_once(problem: once_requirements.OnceProblem) -> CheckMessage:
    kind = AppWarning if problem.id.startswith("W") else AppError
    return kind(problem.message, hint=problem.hint, id=f"django_rmq.{problem.id}")
