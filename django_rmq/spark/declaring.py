"""Declares a topic from a Spark program, for use without a Django project.

A project declares its topics in ``RMQ["TOPICS"]``: ``conf.topic_settings``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django_rmq.core.model.bounds import MAX_RETRIES_LIMIT, abbreviated, is_whole
from django_rmq.core.model.keys import check_slots
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.core.topic_registration import register_topics
from django_rmq.exceptions import ConfigurationError
from django_rmq.spark.broker_connection import broker_of
from django_rmq.spark.source_options import SourceOptions

TYPES = (TopicType.RANGE_MERGE, TopicType.PRIORITY, TopicType.FIXED_TIME)
WORDS = {"body": ("json", "text", "bytes"), "identity": ("body", "key")}
NUMBERS = {"timeout": (1, 604_800), "max_retries": (0, MAX_RETRIES_LIMIT)}
"""Setting -> the smallest and the largest whole number."""

SETTINGS = ("slots", *WORDS, *NUMBERS, "serial", "slot_basis")


def declare(options: Mapping[str, str], type: str, **settings: Any) -> Topic:  # noqa: A002 - the setting's name
    """Register the topic of these options of ``format("rmq")`` in Redis, if it is not registered yet.

    ``type``: ``range_merge``, ``priority`` or ``fixed_time``. ``settings`` are those of ``RMQ["TOPICS"]`` in lower
    case: ``slots``, ``body``, ``identity``, ``slot_basis``, ``serial``, ``timeout``, ``max_retries``. A topic that
    needs others is declared in a project.

    Raises ``ConfigurationError`` for an invalid setting, and ``TopicMismatch`` if Redis has another definition.
    """
    source_options = SourceOptions.of_connection(options, "declare")
    name = source_options.topic()
    if type not in TYPES:
        raise ConfigurationError(
            f"topic {name}: type must be one of {', '.join(TYPES)}, got {abbreviated(type)}"
        )
    for setting, value in settings.items():
        _check(name, setting, value)
    if settings.get("slot_basis") is not None and settings.get("body", "json") != "json":
        raise ConfigurationError(f'topic {name}: slot_basis is a field of the body, which needs body="json"')
    topic = Topic(name, TopicType(type), **settings)
    register_topics(broker_of(source_options), [topic])
    return topic


def _check(name: str, setting: str, value: object) -> None:
    if setting not in SETTINGS:
        raise ConfigurationError(
            f"topic {name}: {setting} is not among {', '.join(SETTINGS)}; declare it in a project's settings"
        )
    if setting == "slots":
        check_slots(value)
        return
    if setting in WORDS:
        is_fine, wanted = value in WORDS[setting], f"one of {', '.join(WORDS[setting])}"
    elif setting in NUMBERS:
        low, high = NUMBERS[setting]
        is_fine, wanted = is_whole(value) and low <= value <= high, f"a whole number from {low} to {high}"
    elif setting == "serial":
        is_fine, wanted = isinstance(value, bool), "True or False"
    else:
        is_fine = value is None or (isinstance(value, str) and bool(value))
        wanted = "the name of a field of the body"
    if not is_fine:
        raise ConfigurationError(f"topic {name}: {setting} must be {wanted}, got {abbreviated(value)}")


__all__ = ["declare"]
