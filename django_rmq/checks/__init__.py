"""System checks: they report mistakes in the settings and in the listeners before anything runs.

Servers are contacted only with ``check --deploy``. All checks have the tags ``django_rmq`` and ``rmq``.
``SILENCED_SYSTEM_CHECKS`` also accepts the ids of older versions, ``rmq.E001`` and so on.

=================  ==================================================================================
id                 what it says
=================  ==================================================================================
django_rmq.E001    the setting RMQ is missing, or it or a part of it is not a dict
django_rmq.E002    an unknown key
django_rmq.E003    a value of the wrong type or outside its range
django_rmq.E004    a topic name that is not allowed, or that no topic has
django_rmq.E005    a topic without TYPE has an option that only topics of one type have
django_rmq.E006    options of a topic that do not go together
django_rmq.E007    ZOOKEEPER is missing or incomplete
django_rmq.E008    a dotted path that cannot be imported, or that names another kind of object
django_rmq.E009    REDIS is missing or names no CACHES alias
django_rmq.E010    the CACHES alias is not one of django-redis
django_rmq.E011    the Redis database is also that of a cache, whose ``clear()`` is FLUSHDB
django_rmq.E012    a Redis URL that cannot be used
django_rmq.E013    RMQ["TESTING"] is True (with ``--deploy``)
django_rmq.E014    another project's package with the same import name is installed
django_rmq.W015    a broker in memory lacks fakeredis, on which it runs
django_rmq.E020    a module of listeners cannot be imported
django_rmq.E021    two listeners for one topic
django_rmq.E022    a function that cannot be a listener
django_rmq.E023    a listener for a topic that is not declared
django_rmq.E024    a listener for a topic that has LISTENER: False
django_rmq.E030    ZooKeeper does not answer (with ``--deploy``, like E031 and E032)
django_rmq.E031    ZooKeeper refuses the credentials, or its nodes belong to another user
django_rmq.E032    ZooKeeper holds something else at ROOT
django_rmq.E040    Redis does not answer (with ``--deploy``, like W041 to W046)
django_rmq.W041    Redis deletes messages when its memory is full. If DURABILITY is "strict", W041 to W044 are
                   errors, E041 to E044
django_rmq.W042    Redis keeps nothing on disk
django_rmq.W043    Redis is too old
django_rmq.W044    Redis refuses its user something that RMQ needs
django_rmq.E045    Redis refuses writes, because it is full, a replica, cannot store anything, or lacks replicas
django_rmq.W046    the memory of Redis is almost full, or its last snapshot failed
django_rmq.E060    a listener with once= for a topic without ORIGIN
django_rmq.E061    a listener with once= names a database that is not in DATABASES
django_rmq.E062    the database of a listener with once= has AUTOCOMMIT: False
django_rmq.E063    DATABASE_ROUTERS do not allow the table that once= needs
django_rmq.E064    messages of a listener with once= can be tried for longer than ONCE_RETENTION
django_rmq.W065    the migration that once= needs was not applied (with ``check --database``)
django_rmq.W066    sends of a listener with once= do not wait for its transaction
django_rmq.E070    a schedule of a topic that is not declared
django_rmq.E071    a schedule with a cron expression or a time zone that cannot be used
django_rmq.E072    options of a schedule that do not go together, or not with its topic
django_rmq.E073    a schedule with a cron expression, and cronsim is not installed
django_rmq.E074    two different schedules of one name
django_rmq.E085    a backend of TASKS, and neither Django nor an installed package has tasks
django_rmq.E086    a queue of TASKS that cannot be a topic, or whose topic is declared elsewhere
django_rmq.E087    the DATABASE of a backend of TASKS is not in DATABASES
django_rmq.E088    options of a queue that a backend of TASKS does not have
django_rmq.E089    a module in OPTIONS["MODULES"] of a backend of TASKS that cannot be imported
django_rmq.E095    HARD_TIMEOUT of a topic is not more than its MAX_RUNTIME
django_rmq.E100    BODY names a type, and pydantic is not installed
django_rmq.E101    BODY names a type that cannot be imported
django_rmq.E102    BODY names something that cannot be the type of a body
django_rmq.E103    UPCAST names a function that cannot be imported, or no function
django_rmq.E104    options of a topic that do not fit the type of its bodies
django_rmq.E105    a number of 1000 or more for TIME_RANGE or MAX_WAIT, which may be meant in milliseconds
django_rmq.E050    no database may have the outbox, because the routers forbid it
django_rmq.E051    the default database has no table for the outbox (with ``--deploy``)
django_rmq.W051    another database that may have the outbox has no table for it (with ``--deploy``)
django_rmq.I003    topics whose IDENTITY is "body", because it is not set (with ``--deploy``)
django_rmq.W001    a topic without a listener
django_rmq.W002    no topic is declared
=================  ==================================================================================

``conf``, the only reader of settings, finds E001 to E012, E095 and E105. Paths that are otherwise
imported only when needed (COORDINATOR, PERMISSION, FORMATTER) are imported here.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

from django.apps import AppConfig
from django.core.checks import CheckMessage, register
from django.db import DEFAULT_DB_ALIAS
from django.utils.module_loading import import_string

from django_rmq import connections
from django_rmq.checks.check_messages import (
    TAGS,
    AppError,
    AppInfo,
    AppWarning,
    read_project,
    sentence,
)
from django_rmq.checks.declaration_checks import (
    check_bodies,
    check_listeners,
    check_schedules,
    check_tables,
    check_tasks,
)
from django_rmq.conf import Config, read_settings, with_unwritten_identity
from django_rmq.core.redis.in_memory import INSTALL, is_installed
from django_rmq.core.server_checks import Flaw
from django_rmq.exceptions import ConfigurationError, ServerRefused, ServerTrouble
from django_rmq.outbox import contents, storage

NAMESAKE = "django-rmq"
"""Another project's package: a wrapper for RabbitMQ, which is also imported as ``django_rmq``."""


@register(*TAGS)
def check_settings(app_configs: Sequence[AppConfig] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """Check ``settings.RMQ`` and the CACHES alias it names."""
    read_project()
    config, problems = read_settings()
    if config is None:
        return [AppError(message, hint=hint or None, id=id_) for id_, message, hint in problems]
    return list(_paths(config))


@register(*TAGS)
def check_package(app_configs: Sequence[AppConfig] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """Check that no other package has the files of the module ``django_rmq``."""
    other = next(filter(_is_foreign, distributions(name=NAMESAKE)), None)
    if other is None:
        return []
    return [
        AppError(
            f"The package {NAMESAKE} {other.version} is installed. It belongs to another project and has the same "
            "import name: each of the two packages overwrites files of the other or hides it.",
            hint=f"pip uninstall {NAMESAKE} django-redis-rmq, then: pip install django-redis-rmq",
            id="django_rmq.E014",
        )
    ]


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


def _paths(config: Config) -> list[CheckMessage]:
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
    found: list[CheckMessage] = []
    for place, path in paths.items():
        try:
            target = import_string(path)
        except Exception as error:  # noqa: BLE001 - whatever a module of the project raises is reported
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            found.append(
                AppError(
                    sentence(f"{place} is {path!r}, which cannot be imported: {reason}"), id="django_rmq.E008"
                )
            )
        else:
            if not callable(target):
                message = f"{place} is {path!r}, which is a {type(target).__name__}: it must be callable."
                found.append(AppError(message, id="django_rmq.E008"))
    return found


@register(*TAGS, deploy=True)
def check_zookeeper(app_configs: Sequence[AppConfig] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """Ask ZooKeeper, if it is the coordinator, whether workers could join. Writes nothing."""
    config, _ = read_settings()
    if config is None or config.coordinator != "zookeeper" or config.broker == "memory":
        return []
    try:
        connections.check_coordinator()
    except ServerRefused as error:
        return [
            AppError(
                sentence(error), hint='Check RMQ["ZOOKEEPER"]["AUTH"] and ["TLS"].', id="django_rmq.E031"
            )
        ]
    except ServerTrouble as error:
        return [AppError(sentence(error), hint='Check RMQ["ZOOKEEPER"]["HOSTS"].', id="django_rmq.E030")]
    except ConfigurationError as error:
        return [AppError(sentence(error), id="django_rmq.E032")]
    return []


_FLAWS = {
    "eviction": "django_rmq.W041",
    "persistence": "django_rmq.W042",
    "version": "django_rmq.W043",
    "rights": "django_rmq.W044",
    "writes": "django_rmq.E045",
    "memory": "django_rmq.W046",
}


@register(*TAGS, deploy=True)
def check_identity(app_configs: Sequence[AppConfig] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """Say what topics cannot do whose settings leave IDENTITY out."""
    config, _ = read_settings()
    names = [] if config is None else with_unwritten_identity(config)
    if not names:
        return []
    message = (
        f'IDENTITY is "body", because it is not set, for {", ".join(names)}: equal bodies are one message. Sends take no '
        "key=, headers=, expires=, max_retries= and timeout=; ORIGIN, ACCUMULATE, once= and schedules are not possible."
    )
    hint = 'Write "IDENTITY": "body" where that is meant, and "key" elsewhere, before the first message: it changes only while '
    return [AppInfo(message, hint=f"{hint}the topic is empty.", id="django_rmq.I003")]


@register(*TAGS, deploy=True)
def check_testing(app_configs: Sequence[AppConfig] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """Report settings that are meant for tests."""
    config, _ = read_settings()
    if config is None or not config.testing:
        return []
    message = 'RMQ["TESTING"] is True: messages stay in the memory of the process that sends them.'
    return [AppError(message, hint="Set it only in the settings of your tests.", id="django_rmq.E013")]


@register(*TAGS)
def check_broker_in_memory(
    app_configs: Sequence[AppConfig] | None = None, **kwargs: Any
) -> list[CheckMessage]:
    """Report that a broker in memory lacks what it runs on."""
    config, _ = read_settings()
    if config is None or config.broker != "memory" or is_installed():
        return []
    message = 'RMQ["TESTING"] or RMQ["BROKER"] = "memory" needs fakeredis, which is not installed.'
    return [AppWarning(message, hint=f"Install it: {INSTALL}", id="django_rmq.W015")]


@register(*TAGS, deploy=True)
def check_redis(app_configs: Sequence[AppConfig] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """Ask Redis whether it may lose messages, takes writes, and refuses something that RMQ needs."""
    config = read_project()
    if config is None or config.broker == "memory":
        return []
    try:
        flaws = connections.server_flaws(config.topics.values())
    except ServerTrouble as error:
        return [AppError(sentence(error), hint='Check RMQ["REDIS"].', id="django_rmq.E040")]
    return [_flaw_message(flaw, is_strict=config.durability == "strict") for flaw in flaws]


def _flaw_message(flaw: Flaw, *, is_strict: bool) -> CheckMessage:
    id_ = _FLAWS[flaw.name]
    if is_strict and flaw.is_lasting:
        id_ = id_.replace("W", "E")
    kind = AppError if ".E" in id_ else AppWarning
    return kind(flaw.message, hint=flaw.hint, id=id_)


@register(*TAGS)
def check_outbox(app_configs: Sequence[AppConfig] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """Check that the outbox may be in some database."""
    config = read_project()
    if config is None or not config.uses_outbox or storage.aliases():
        return []
    message = 'RMQ["OUTBOX"] is on, and DATABASE_ROUTERS allow its migration to no database.'
    hint = "Allow the migration of django_rmq to the databases in whose transactions you send."
    return [AppError(message, hint=hint, id="django_rmq.E050")]


@register(*TAGS, deploy=True)
def check_outbox_tables(app_configs: Sequence[AppConfig] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """Ask the databases whether they have the table of the outbox."""
    config = read_project()
    if config is None or not config.uses_outbox:
        return []
    return [
        AppError(sentence(reason), hint=_MIGRATE, id="django_rmq.E051")
        if alias == DEFAULT_DB_ALIAS
        else AppWarning(sentence(reason), hint=f"{_MIGRATE} {_FORBID}", id="django_rmq.W051")
        for alias, reason in contents.missing()
    ]


_MIGRATE = "Until then, a send in a transaction of this database raises ConfigurationError."
_FORBID = "If nothing is sent there, forbid the migration in DATABASE_ROUTERS."


__all__ = [
    "check_bodies",
    "check_listeners",
    "check_outbox",
    "check_outbox_tables",
    "check_package",
    "check_redis",
    "check_schedules",
    "check_settings",
    "check_tables",
    "check_tasks",
    "check_testing",
    "check_zookeeper",
]
