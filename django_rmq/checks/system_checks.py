"""The system checks: of the settings, of the package, of what a project declares, and of the servers that the settings name.

Each topic needs a listener, and listeners with ``once`` need a table. Servers are asked only with ``check --deploy``. The
package registers the checks. What some of them report is found elsewhere:

==================================================  =================================================
id                                                  where it is found
==================================================  =================================================
E001, E003: types and ranges of values              ``conf.topic_settings`` for topics, otherwise the
                                                    module of ``conf`` that reads the section; most
                                                    by ``conf.known_keys`` and ``conf.parsers``
E002: unknown keys                                  ``conf.known_keys``
E105: durations that may be in ms                   ``conf.parsers``
E004: names of topics                               ``conf.topic_settings``; ``system_checks`` for
                                                    ADMIN
E005, E006, E095: options that do not go together   ``conf.topic_settings``
E007: ZooKeeper                                     ``conf.server_settings``
E008: dotted paths                                  ``conf.topic_settings``; ``system_checks`` for
                                                    COORDINATOR, PERMISSION and FORMATTER
E009 to E012: addresses, caches on the same         ``conf.server_settings``; ``conf.settings_reader``
database                                            if REDIS is missing
W041 to W044, E041 to E045, W046: servers           ``core.model.server_checks``
E060 to E064, W065, W066: listeners with ``once``   ``worker.once``
E070 to E073: schedules                             ``schedules``
E086, E088: queues of tasks                         ``conf.task_settings``
E100 to E104: types of bodies                       ``typed_bodies``
==================================================  =================================================
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import Distribution, distributions
from pathlib import Path

from django.conf import settings
from django.core import checks
from django.core.checks import CheckMessage
from django.db import DEFAULT_DB_ALIAS
from django.utils.module_loading import import_string

from django_rmq import connections, schedules, typed_bodies
from django_rmq.conf import Config, SettingsProblem, did_you_mean, read_settings, with_unwritten_identity
from django_rmq.conf.task_settings import TaskBackend
from django_rmq.connections import coordinators
from django_rmq.core.model.bounds import abbreviated_error
from django_rmq.core.redis.in_memory import INSTALL, is_installed
from django_rmq.database_access import ask_each
from django_rmq.exceptions import ConfigurationError, ServerRefused, ServerTrouble
from django_rmq.outbox import row_lists
from django_rmq.outbox.rows import aliases
from django_rmq.tasks import is_installed as has_framework
from django_rmq.tasks.task_modules import declared_modules, import_each, import_tasks
from django_rmq.worker import listener_registry, once

NAMESAKE = "django-rmq"
"""Another project's package: a wrapper for RabbitMQ, which is also imported as ``django_rmq``."""


def check_settings() -> Iterator[CheckMessage]:
    """Check ``settings.RMQ`` and the CACHES alias it names."""
    read_project()
    config, problems = read_settings()
    if config is None:
        yield from map(_message_of, problems)
    else:
        yield from _topics_of_admin(config)
        yield from _paths(config)


def check_package() -> Iterator[CheckMessage]:
    """Check that no other package has the files of the module ``django_rmq``."""
    # There may be several of this name, such as metadata that were left behind.
    if (other := next(filter(_is_foreign, distributions(name=NAMESAKE)), None)) is not None:
        yield AppError(
            f"The package {NAMESAKE} {other.version} is installed. It belongs to another project and has the same "
            "import name: each of the two packages overwrites files of the other or hides it.",
            hint=f"pip uninstall {NAMESAKE} django-redis-rmq, then: pip install django-redis-rmq",
            id="django_rmq.E014",
        )


def _is_foreign(installed: Distribution) -> bool:
    """Return whether ``installed`` is the other project's package, and not only metadata that were left behind.

    This project was once installed from its source under the same name. It has always required django-redis.
    """
    if any(requirement.startswith("django-redis") for requirement in installed.requires or ()):
        return False
    files = installed.files
    return files is None or any(
        file.parts[0] == "django_rmq" and Path(str(file.locate())).exists() for file in files
    )


def _topics_of_admin(config: Config) -> Iterator[CheckMessage]:
    """Check that ADMIN names topics, which may be those of schedules that the project's modules declare."""
    for key, names in (("FORMATTER", config.admin.formatter), ("COLUMNS", config.admin.columns)):
        for name in names if isinstance(names, Mapping) else ():
            if name not in config.topics:
                hint = did_you_mean(name, config.topics)
                message = f'RMQ["ADMIN"]["{key}"] names {name!r}, which is not a declared topic{hint}'
                yield AppError(sentence(message), id="django_rmq.E004")


def _paths(config: Config) -> Iterator[CheckMessage]:
    """Check the dotted paths in the settings that are otherwise imported only when needed."""
    paths = {}
    if config.coordinator not in ("redis", "zookeeper"):
        paths['RMQ["COORDINATOR"]'] = config.coordinator
    if config.api.permission is not None:
        paths['RMQ["API"]["PERMISSION"]'] = config.api.permission
    formatter = config.admin.formatter
    if isinstance(formatter, str):
        paths['RMQ["ADMIN"]["FORMATTER"]'] = formatter
    elif formatter is not None:
        paths.update({f'RMQ["ADMIN"]["FORMATTER"]["{topic}"]': path for topic, path in formatter.items()})
    for place, path in paths.items():
        try:
            target = import_string(path)
        except Exception as error:  # noqa: BLE001 - whatever a module of the project raises is reported
            reason = abbreviated_error(error)
            message = sentence(f"{place} is {path!r}, which cannot be imported: {reason}")
            yield AppError(message, id="django_rmq.E008")
        else:
            if not callable(target):
                message = f"{place} is {path!r}, which is a {type(target).__name__}: it must be callable."
                yield AppError(message, id="django_rmq.E008")


def check_zookeeper() -> Iterator[CheckMessage]:
    """Ask ZooKeeper, if it is the coordinator, whether workers could join. Writes nothing."""
    config, _ = read_settings()
    if config is None or config.coordinator != "zookeeper" or config.broker == "memory":
        return
    try:
        coordinators.check_coordinator()
    except ServerRefused as error:
        hint = 'Check RMQ["ZOOKEEPER"]["AUTH"] and ["TLS"].'
        yield AppError(sentence(error), hint=hint, id="django_rmq.E031")
    except ServerTrouble as error:
        yield AppError(sentence(error), hint='Check RMQ["ZOOKEEPER"]["HOSTS"].', id="django_rmq.E030")
    except ConfigurationError as error:
        yield AppError(sentence(error), id="django_rmq.E032")


_FLAWS = {
    "eviction": "django_rmq.W041",
    "persistence": "django_rmq.W042",
    "version": "django_rmq.W043",
    "rights": "django_rmq.W044",
    "writes": "django_rmq.E045",
    "memory": "django_rmq.W046",
}


def check_identity() -> Iterator[CheckMessage]:
    """Say what topics cannot do whose settings leave IDENTITY out."""
    config, _ = read_settings()
    if config is None or not (names := with_unwritten_identity(config)):
        return
    message = (
        f'IDENTITY is "body", because it is not set, for {", ".join(names)}: equal bodies are one message. Sends take no '
        "key=, headers=, expires=, max_retries= and timeout=; ORIGIN, ACCUMULATE, once= and schedules are not possible."
    )
    hint = 'Write "IDENTITY": "body" where that is meant, and "key" elsewhere, before the first message: it changes only while '
    yield AppInfo(message, hint=f"{hint}the topic is empty.", id="django_rmq.I003")


def check_testing() -> Iterator[CheckMessage]:
    """Report settings that are meant for tests."""
    config, _ = read_settings()
    if config is not None and config.testing:
        message = 'RMQ["TESTING"] is True: messages stay in the memory of the process that sends them.'
        yield AppError(message, hint="Set it only in the settings of your tests.", id="django_rmq.E013")


def check_broker_in_memory() -> Iterator[CheckMessage]:
    """Report that a broker in memory lacks what it runs on."""
    config, _ = read_settings()
    if config is not None and config.broker == "memory" and not is_installed():
        message = 'RMQ["TESTING"] or RMQ["BROKER"] = "memory" needs fakeredis, which is not installed.'
        yield AppWarning(message, hint=f"Install it: {INSTALL}", id="django_rmq.W015")


def check_redis() -> Iterator[CheckMessage]:
    """Ask Redis whether it may lose messages, takes writes, and refuses something that RMQ needs."""
    config = read_project()
    if config is None or config.broker == "memory":
        return
    try:
        flaws = connections.server_flaws(config.topics.values())
    except (ServerTrouble, ConfigurationError) as error:
        yield AppError(sentence(error), hint='Check RMQ["REDIS"].', id="django_rmq.E040")
        return
    for flaw in flaws:
        id_ = _FLAWS[flaw.name]
        if config.durability == "strict" and flaw.is_lasting:
            id_ = id_.replace("W", "E")
        yield _message_of(SettingsProblem(id_, flaw.message, flaw.hint))


def check_outbox() -> Iterator[CheckMessage]:
    """Check that the outbox may be in some database."""
    config = read_project()
    if config is None or not config.uses_outbox or aliases():
        return
    message = 'RMQ["OUTBOX"] is on, and DATABASE_ROUTERS allow its migration to no database.'
    hint = "Allow the migration of django_rmq to the databases in whose transactions you send."
    yield AppError(message, hint=hint, id="django_rmq.E050")


def check_outbox_tables() -> Iterator[CheckMessage]:
    """Ask the databases whether they have the table of the outbox."""
    config = read_project()
    hint = "Until then, a send in a transaction of this database raises ConfigurationError."
    for alias, reason in row_lists.missing() if config is not None and config.uses_outbox else ():
        if alias == DEFAULT_DB_ALIAS:
            yield AppError(sentence(reason), hint=hint, id="django_rmq.E051")
        else:
            forbid = "If nothing is sent there, forbid the migration in DATABASE_ROUTERS."
            yield AppWarning(sentence(reason), hint=f"{hint} {forbid}", id="django_rmq.W051")


def check_bodies() -> Iterator[CheckMessage]:
    """Import the types of bodies, and check that their topics can have them."""
    config = read_project()
    for topic in config.topics.values() if config is not None else ():
        for problem in typed_bodies.problems(topic):
            yield AppError(problem.message, hint=problem.hint or None, id=f"django_rmq.{problem.id}")


def check_schedules() -> Iterator[CheckMessage]:
    """Import the listeners of every app and check the schedules of the settings and of ``@schedule``."""
    config = read_project()
    if config is None:
        return
    try:
        declared = schedules.declared_schedules()
    except ConfigurationError as error:
        yield AppError(sentence(error), id="django_rmq.E074")
        return
    for schedule in declared.values():
        yield from map(_message_of, schedules.problems(config, schedule))


def check_tasks() -> Iterator[CheckMessage]:
    """Check the backends of TASKS beyond what ``check_settings`` finds."""
    config = read_project()
    if config is None:
        return
    problems = [problem for backend in config.tasks.values() for problem in _of_backend(backend)]
    yield from problems
    # A module of tasks imports its framework, whose absence is one of the problems already.
    for module, error in import_each(declared_modules(config)) if not problems else ():
        message = f'OPTIONS["MODULES"] of TASKS names "{module}", which cannot be imported: {error!r}.'
        yield AppError(message, id="django_rmq.E089")


def _of_backend(backend: TaskBackend) -> Iterator[CheckMessage]:
    place = f'TASKS["{backend.alias}"]'
    if not has_framework(backend.package):
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


def check_listeners() -> Iterator[CheckMessage]:
    """Import the listeners of every app and check that there are topics, and that each has exactly one listener."""
    config = read_project()
    if config is None:
        return
    failed = listener_registry.discover()
    if not config.topics:
        hint = (
            'RMQ = {"TOPICS": {"orders": {}}, ...}. Tasks need no topic: '
            'TASKS = {"default": {"BACKEND": "django_rmq.tasks.RMQBackend"}}.'
        )
        yield AppWarning('RMQ["TOPICS"] is empty: no message can be sent.', hint=hint, id="django_rmq.W002")
    for one in failed:
        if isinstance(one.error, ConfigurationError):
            kind = "E021" if isinstance(one.error, listener_registry.DuplicateListener) else "E022"
            yield AppError(sentence(f"{one.module}: {one.error}"), id=f"django_rmq.{kind}")
        else:
            message = f"The listeners in {one.module} cannot be imported: {one.reason}"
            yield AppError(sentence(message), id="django_rmq.E020")
    for topic, listener in listener_registry.listeners().items():
        declared, message = (
            config.topics.get(topic),
            f'{listener.name} ({listener.location}) listens to "{topic}"',
        )
        if declared is None:
            hint = did_you_mean(topic, config.topics)
            yield AppError(f'{message}, which is not in RMQ["TOPICS"]{hint}', id="django_rmq.E023")
        elif not declared.listener:
            yield AppError(f"{message}, which has LISTENER: False.", id="django_rmq.E024")
        if listener.is_covered:
            covered = f"{message}, and workers call it without the decorators above @listener."
            yield AppWarning(covered, hint="Write @listener above all others.", id="django_rmq.W025")
        if listener.using is not None:
            yield from map(_message_of, once.problems(config, listener))
            yield from map(_message_of, once.warnings(config, listener))
    # The listeners that seem to be missing may be in what could not be loaded.
    if config.autodiscover is not None and not failed:
        yield from _missing(config)


def _missing(config: Config) -> Iterator[CheckMessage]:
    listeners = listener_registry.listeners()
    missing = [name for name, topic in config.topics.items() if topic.listener and name not in listeners]
    if len(missing) > NAMED:
        names = ", ".join(f'"{name}"' for name in missing[:NAMED])
        yield AppWarning(
            f"{len(missing)} topics have no listener: {names} and {len(missing) - NAMED} more. Their messages "
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


def check_tables(databases: Sequence[str] | None) -> Iterator[CheckMessage]:
    """Ask the databases of listeners with ``once`` whether they have the table that it needs.

    A warning, because ``migrate`` refuses to run after an error.
    """
    if read_project() is None or not databases:
        return
    aliases = {*listener_registry.once_databases().values()} & {*databases}
    # A database that does not answer is reported when something needs it.
    problems_of, _ = ask_each(sorted(aliases), once.missing_table)
    for answer in problems_of.values():
        yield from map(_message_of, answer)


def _message_of(problem: SettingsProblem) -> CheckMessage:
    kind = AppWarning if problem.id.startswith("django_rmq.W") else AppError
    return kind(problem.message, hint=problem.hint or None, id=problem.id)


class AppError(checks.Error):
    """An error of this app."""


class AppWarning(checks.Warning):
    """A warning of this app."""


class AppInfo(checks.Info):
    """A note of this app."""


def read_project() -> Config | None:
    """Return the settings with all that the project's modules bring along. None: they are wrong; check_settings says why.

    Django runs checks in any order. So each imports for itself what a worker imports: schedules declare topics, and modules
    of tasks may have listeners.
    """
    if read_settings()[0] is None:
        return None
    with suppress(ConfigurationError):  # which check_listeners and check_tasks report
        listener_registry.discover()
        import_tasks()
    return read_settings()[0]


def sentence(text: object) -> str:
    """Return the text of an error with a full stop, which texts of servers and drivers may have already."""
    return f"{str(text).rstrip('. ')}."
