"""System checks: what is wrong in the settings and with the listeners, before anything runs.

Servers are contacted only with `check --deploy`.

=========  ====================================================================================
id         what it says
=========  ====================================================================================
rmq.E001   the setting RMQ is missing, or it or a part of it is not a dict
rmq.E002   an unknown key
rmq.E003   a value of the wrong type or outside its range
rmq.E004   a topic name that is not allowed, or that no topic has
rmq.E005   a topic without TYPE
rmq.E006   options of a topic that do not go together
rmq.E007   ZOOKEEPER is missing, or lacks what it needs
rmq.E008   a dotted path that cannot be imported, or that names another kind of object
rmq.E009   REDIS is missing or names no CACHES alias
rmq.E010   the CACHES alias is not one of django-redis
rmq.E011   the Redis database is also that of a cache, whose ``clear()`` is FLUSHDB
rmq.E012   a Redis URL that cannot be used
rmq.E013   RMQ["TESTING"] is True (with ``--deploy``)
rmq.E014   another project's package, which has the same import name, is installed
rmq.E020   a module of listeners cannot be imported
rmq.E021   two listeners for one topic
rmq.E022   a function that cannot be a listener
rmq.E023   a listener for a topic that is not declared
rmq.E024   a listener for a topic that says LISTENER: False
rmq.E030   ZooKeeper does not answer (with ``--deploy``, as E031 and E032)
rmq.E031   ZooKeeper refuses our credentials, or its nodes belong to others
rmq.E032   ZooKeeper holds something else at ROOT
rmq.E040   Redis does not answer (with ``--deploy``, as W041 to W044)
rmq.W041   Redis deletes messages when its memory is full (E041 with DURABILITY "strict", and so on)
rmq.W042   Redis keeps nothing on disk
rmq.W043   Redis is too old
rmq.W044   Redis refuses its user something that RMQ needs
rmq.W001   a topic without a listener
rmq.W002   no topic is declared
=========  ====================================================================================

``project.settings``, the only reader of settings, finds E001 to E012. Paths that are otherwise imported only when needed
(COORDINATOR, PERMISSION, FORMATTER) are imported here.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

from django.apps import AppConfig
from django.core import checks
from django.core.checks import CheckMessage, Error, register
from django.utils.module_loading import import_string

from django_rmq.exceptions import ConfigurationError, ServerRefused, ServerTrouble
from django_rmq.project import connections
from django_rmq.project.listening import registry
from django_rmq.project.settings import Config, did_you_mean, read_settings

NAMESAKE = "django-rmq"
"""Another project's package: a wrapper for RabbitMQ, which is also imported as ``django_rmq``."""


@register("rmq")
def check_settings(app_configs: Sequence[AppConfig] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """Check ``settings.RMQ`` and the CACHES alias it names."""
    config, problems = read_settings()
    if config is None:
        return [Error(message, hint=hint or None, id=id_) for id_, message, hint in problems]
    found = list(_paths(config))
    if not config.topics:
        found.append(
            checks.Warning(
                'RMQ["TOPICS"] is empty: there is nothing to send to.',
                hint='RMQ = {"TOPICS": {"orders": {"TYPE": "fixed_time"}}, ...}.',
                id="rmq.W002",
            )
        )
    return found


@register("rmq")
def check_package(app_configs: Sequence[AppConfig] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """Check that no other package has written into this package's folder."""
    try:
        foreign = distribution(NAMESAKE)
    except PackageNotFoundError:
        return []
    return [
        Error(
            f"The package {NAMESAKE} {foreign.version} is installed. It belongs to another project and has the same "
            "import name, so both are in one folder: whichever was installed last has overwritten files of the other.",
            hint=f"pip uninstall {NAMESAKE} django-redis-rmq, then: pip install django-redis-rmq",
            id="rmq.E014",
        )
    ]


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
            found.append(Error(f"{place} is {path!r}, which cannot be imported: {reason}.", id="rmq.E008"))
        else:
            if not callable(target):
                message = f"{place} is {path!r}, which is a {type(target).__name__}: it must be callable."
                found.append(Error(message, id="rmq.E008"))
    return found


@register("rmq", deploy=True)
def check_zookeeper(app_configs: Sequence[AppConfig] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """Ask ZooKeeper, if it is the coordinator, whether workers could join. Writes nothing."""
    config, _ = read_settings()
    if config is None or config.coordinator != "zookeeper" or config.broker == "memory":
        return []
    try:
        connections.check_coordinator()
    except ServerRefused as error:
        return [
            Error(f"{error}.", hint='RMQ["ZOOKEEPER"]["AUTH"] and ["TLS"] say who we are.', id="rmq.E031")
        ]
    except ServerTrouble as error:
        return [Error(f"{error}.", hint='RMQ["ZOOKEEPER"]["HOSTS"] says where it is.', id="rmq.E030")]
    except ConfigurationError as error:
        return [Error(f"{error}.", id="rmq.E032")]
    return []


_FLAWS = {
    "eviction": "rmq.W041",
    "persistence": "rmq.W042",
    "version": "rmq.W043",
    "rights": "rmq.W044",
}


@register("rmq", deploy=True)
def check_testing(app_configs: Sequence[AppConfig] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """Report settings that are meant for tests."""
    config, _ = read_settings()
    if config is None or not config.testing:
        return []
    message = 'RMQ["TESTING"] is True: messages stay in the memory of the process that sends them.'
    return [Error(message, hint="Set it in the settings of your tests only.", id="rmq.E013")]


@register("rmq", deploy=True)
def check_redis(app_configs: Sequence[AppConfig] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """Ask Redis whether it may lose messages or refuses something that RMQ needs."""
    config, _ = read_settings()
    if config is None or config.broker == "memory":
        return []
    kind, letter = (Error, "E") if config.durability == "strict" else (checks.Warning, "W")
    try:
        return [
            kind(flaw.message, hint=flaw.hint, id=_FLAWS[flaw.name].replace("W", letter))
            for flaw in connections.server_flaws(config.topics.values())
        ]
    except ServerTrouble as error:
        return [Error(f"{error}.", hint='RMQ["REDIS"] says where it is.', id="rmq.E040")]


@register("rmq")
def check_listeners(app_configs: Sequence[AppConfig] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """Import the listeners of every app and check that each topic has exactly one."""
    config, _ = read_settings()
    if config is None:
        return []  # check_settings reports why
    found: list[CheckMessage] = []
    failed = registry.discover()
    for one in failed:
        if isinstance(one.error, ConfigurationError):
            kind = "E021" if isinstance(one.error, registry.DuplicateListener) else "E022"
            found.append(Error(f"{one.module}: {one.error}.", id=f"rmq.{kind}"))
        else:
            message = f"The listeners in {one.module} cannot be imported: {one.reason}."
            found.append(Error(message, id="rmq.E020"))
    listeners = registry.listeners()
    for topic, listener in listeners.items():
        declared = config.topics.get(topic)
        if declared is None:
            meant = did_you_mean(topic, config.topics)
            message = f'{listener.name} ({listener.location}) listens to "{topic}", which is not in RMQ["TOPICS"]{meant}'
            found.append(Error(message, id="rmq.E023"))
        elif not declared.listener:
            message = (
                f'{listener.name} ({listener.location}) listens to "{topic}", which says LISTENER: False.'
            )
            found.append(Error(message, id="rmq.E024"))
    # The listeners that seem to be missing may be in what could not be loaded.
    if config.autodiscover is not None and not failed:
        for name, topic_ in config.topics.items():
            if topic_.listener and name not in listeners:
                found.append(
                    checks.Warning(
                        f'Topic "{name}" has no listener: its messages would wait for ever.',
                        hint=f'Write @listener("{name}") in the {config.autodiscover}.py of an installed app, '
                        'or say "LISTENER": False if REST or Spark consumes it.',
                        id="rmq.W001",
                    )
                )
    return found
