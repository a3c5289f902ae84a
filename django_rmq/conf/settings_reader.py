"""The only reader of settings: ``settings.RMQ`` (and the CACHES alias it names) as a frozen, validated ``Config``.

All problems are found at once; ``checks`` reports them as system checks, ``get_config`` as one error. Nothing
is read at import, and nothing is connected here. ``docs/reference/settings.md`` describes every key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from django.conf import settings
from django.core.signals import setting_changed

from django_rmq.conf.config import Config
from django_rmq.conf.problems import Problems, SettingsProblem, did_you_mean, shown
from django_rmq.conf.redis_settings import read_redis
from django_rmq.conf.schedule_settings import read_schedules, with_schedule_topics
from django_rmq.conf.task_settings import read_tasks, with_task_topics
from django_rmq.conf.topic_settings import read_topics
from django_rmq.conf.values import Keys, keys_of
from django_rmq.conf.zookeeper_settings import read_coordinator, read_zookeeper
from django_rmq.exceptions import ConfigurationError

PLAIN_KEYS: Keys = keys_of(Config)
SECTIONS: Mapping[str, tuple[str, type, Keys]] = {
    one.name.upper(): (one.name, one.metadata["section"], keys_of(one.metadata["section"]))
    for one in fields(Config)
    if "section" in one.metadata
}
RMQ_KEYS = (
    *PLAIN_KEYS,
    *SECTIONS,
    "REDIS",
    "TOPICS",
    "TOPIC_DEFAULTS",
    "SCHEDULES",
    "COORDINATOR",
    "ZOOKEEPER",
)

_config: Config | None = None

_of_schedules: frozenset[str] = frozenset()
"""The topics that schedules of ``@schedule`` have in their own names. The settings need not declare them."""


def read_settings() -> tuple[Config | None, list[SettingsProblem]]:
    """Read the settings; return the configuration, or None and all problems."""
    problems = Problems()
    return _read(problems), problems


def _read(problems: Problems) -> Config | None:
    """Return the configuration, or None if there is any problem."""
    given = getattr(settings, "RMQ", None)
    if given is None:
        problems.report(
            "E001",
            "The setting RMQ is missing.",
            'For example: RMQ = {"REDIS": "redis://localhost:6379/1", "TOPICS": {"orders": {"TYPE": "fixed_time"}}}.',
        )
        return None
    root = problems.section("RMQ", given, RMQ_KEYS)
    values = problems.values("RMQ", {key: root[key] for key in root if key in PLAIN_KEYS}, PLAIN_KEYS)
    for key, (name, kind, keys) in SECTIONS.items():
        if key == "OUTBOX" and not isinstance(root.get(key, {}), Mapping):
            if not isinstance(root[key], bool):
                message = f'RMQ["OUTBOX"] is {shown(root[key])}: it must be True, False or a dict.'
                problems.report("E003", message)
        elif key in root:
            values[name] = kind(**problems.values(f'RMQ["{key}"]', root[key], keys))
    values["topics"] = read_topics(problems, root)
    values["tasks"] = read_tasks(problems, root, getattr(settings, "TASKS", {}))
    values["topics"] = with_task_topics(problems, values["topics"], values["tasks"].values())
    values["time_zone"] = settings.TIME_ZONE or "UTC"
    values["schedules"] = read_schedules(problems, root, values["time_zone"])
    own = {one.topic for one in values["schedules"].values() if one.topic == one.name}
    values["topics"] = with_schedule_topics(problems, root, values["topics"], own | _of_schedules)
    values["zookeeper"] = read_zookeeper(problems, root)
    values["coordinator"] = read_coordinator(problems, root)
    if values.get("testing"):
        values["broker"] = "memory"
    elif "REDIS" in root:
        values["redis"] = read_redis(problems, root["REDIS"])
    elif root.get("BROKER") != "memory":
        problems.report(
            "E009",
            'RMQ["REDIS"] is missing.',
            'Give a URL, or name a CACHES alias of django-redis: RMQ = {"REDIS": "redis://localhost:6379/1", ...}.',
        )
    _check_formatters(problems, values)
    return None if problems else Config(**values)


def _check_formatters(problems: Problems, values: Mapping[str, Any]) -> None:
    formatter = values["admin"].formatter if "admin" in values else None
    if isinstance(formatter, Mapping):
        for name in formatter:
            if name not in values["topics"]:
                meant = did_you_mean(name, values["topics"])
                problems.report(
                    "E004", f'RMQ["ADMIN"]["FORMATTER"] names {name!r}, which is not a declared topic{meant}'
                )


def get_config() -> Config:
    """Return the configuration, read once. Raises ``ConfigurationError`` with all problems."""
    global _config  # noqa: PLW0603 - one per process, like the settings it comes from
    # Another thread may reset ``_config`` between the check and the return, but not this variable.
    config = _config
    if config is None:
        config, problems = read_settings()
        if config is None:
            raise ConfigurationError(
                "the setting RMQ is not valid:\n"
                + "\n".join(f"  {problem.id}: {problem.message}" for problem in problems)
            )
        _config = config
    return config


def with_unwritten_identity(config: Config) -> list[str]:
    """Return the topics whose IDENTITY is "body" because the settings say nothing about it."""
    root: Mapping[str, Any] = settings.RMQ
    if "IDENTITY" in root.get("TOPIC_DEFAULTS", {}):
        return []
    written = root.get("TOPICS", {})
    return [
        name
        for name, topic in config.topics.items()
        if not topic.keyed and name in written and "IDENTITY" not in written[name]
    ]


def set_schedule_topics(names: Iterable[str]) -> None:
    """Set the schedules that have a topic in their own name, in place of those of the last call."""
    global _of_schedules, _config  # noqa: PLW0603
    before, _of_schedules = _of_schedules, frozenset(names)
    # A topic is no longer wanted, as after a reload, so the settings are read again at the next use.
    if before - _of_schedules:
        _config = None
    elif _config is not None and _of_schedules - _config.topics.keys():
        # The object stays the same, because a broker in memory, and its messages, last as long as the configuration.
        topics = with_schedule_topics(Problems(), settings.RMQ, _config.topics, _of_schedules)
        object.__setattr__(_config, "topics", topics)


def is_debug() -> bool:
    """Return the project's DEBUG."""
    return bool(settings.DEBUG)


def _forget(*, setting: str, **_: object) -> None:
    global _config  # noqa: PLW0603
    if setting in ("RMQ", "TASKS", "TIME_ZONE", "CACHES", "SESSION_CACHE_ALIAS", "CACHE_MIDDLEWARE_ALIAS"):
        _config = None


setting_changed.connect(_forget, dispatch_uid="django_rmq.conf.settings_reader")
