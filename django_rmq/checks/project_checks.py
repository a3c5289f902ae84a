"""The checks of the settings, of the package, and (with ``check --deploy``) of the servers that the settings name."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path

from django.apps import AppConfig
from django.core.checks import CheckMessage
from django.db import DEFAULT_DB_ALIAS
from django.utils.module_loading import import_string

from django_rmq import connections
from django_rmq.checks.check_messages import AppError, AppInfo, AppWarning, read_project, sentence
from django_rmq.conf import Config, read_settings, with_unwritten_identity
from django_rmq.connections import coordinators
from django_rmq.core.redis.in_memory import INSTALL, is_installed
from django_rmq.core.server_checks import Flaw
from django_rmq.exceptions import ConfigurationError, ServerRefused, ServerTrouble
from django_rmq.outbox import contents, storage

NAMESAKE = "django-rmq"
"""Another project's package: a wrapper for RabbitMQ, which is also imported as ``django_rmq``."""


def check_settings(app_configs: Sequence[AppConfig] | None = None, **kwargs: object) -> list[CheckMessage]:
    """Check ``settings.RMQ`` and the CACHES alias it names."""
    read_project()
    config, problems = read_settings()
    if config is None:
        return [AppError(message, hint=hint or None, id=id_) for id_, message, hint in problems]
    return list(_paths(config))


def check_package(app_configs: Sequence[AppConfig] | None = None, **kwargs: object) -> list[CheckMessage]:
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


def check_zookeeper(app_configs: Sequence[AppConfig] | None = None, **kwargs: object) -> list[CheckMessage]:
    """Ask ZooKeeper, if it is the coordinator, whether workers could join. Writes nothing."""
    config, _ = read_settings()
    if config is None or config.coordinator != "zookeeper" or config.broker == "memory":
        return []
    try:
        coordinators.check_coordinator()
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


def check_identity(app_configs: Sequence[AppConfig] | None = None, **kwargs: object) -> list[CheckMessage]:
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


def check_testing(app_configs: Sequence[AppConfig] | None = None, **kwargs: object) -> list[CheckMessage]:
    """Report settings that are meant for tests."""
    config, _ = read_settings()
    if config is None or not config.testing:
        return []
    message = 'RMQ["TESTING"] is True: messages stay in the memory of the process that sends them.'
    return [AppError(message, hint="Set it only in the settings of your tests.", id="django_rmq.E013")]


def check_broker_in_memory(
    app_configs: Sequence[AppConfig] | None = None, **kwargs: object
) -> list[CheckMessage]:
    """Report that a broker in memory lacks what it runs on."""
    config, _ = read_settings()
    if config is None or config.broker != "memory" or is_installed():
        return []
    message = 'RMQ["TESTING"] or RMQ["BROKER"] = "memory" needs fakeredis, which is not installed.'
    return [AppWarning(message, hint=f"Install it: {INSTALL}", id="django_rmq.W015")]


def check_redis(app_configs: Sequence[AppConfig] | None = None, **kwargs: object) -> list[CheckMessage]:
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


def check_outbox(app_configs: Sequence[AppConfig] | None = None, **kwargs: object) -> list[CheckMessage]:
    """Check that the outbox may be in some database."""
    config = read_project()
    if config is None or not config.uses_outbox or storage.aliases():
        return []
    message = 'RMQ["OUTBOX"] is on, and DATABASE_ROUTERS allow its migration to no database.'
    hint = "Allow the migration of django_rmq to the databases in whose transactions you send."
    return [AppError(message, hint=hint, id="django_rmq.E050")]


def check_outbox_tables(
    app_configs: Sequence[AppConfig] | None = None, **kwargs: object
) -> list[CheckMessage]:
    """Ask the databases whether they have the table of the outbox."""
    config = read_project()
    if config is None or not config.uses_outbox:
        return []
    return [
        AppError(sentence(reason), hint=_UNTIL_MIGRATED, id="django_rmq.E051")
        if alias == DEFAULT_DB_ALIAS
        else AppWarning(sentence(reason), hint=f"{_UNTIL_MIGRATED} {_FORBID}", id="django_rmq.W051")
        for alias, reason in contents.missing()
    ]


_UNTIL_MIGRATED = "Until then, a send in a transaction of this database raises ConfigurationError."
_FORBID = "If nothing is sent there, forbid the migration in DATABASE_ROUTERS."
