"""Requirements of ``once``: conditions of topic, database and settings under which effects happen exactly once.

The system checks report conditions that are not met, and a worker does not start then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from django.conf import settings
from django.db import DEFAULT_DB_ALIAS, router

from django_rmq.conf import Config, SettingsProblem
from django_rmq.core.model.topic import BackOff, Topic
from django_rmq.worker.listener_registry import Listener

MODEL = "processedmessage"


def problems(config: Config, listener: Listener) -> Iterator[SettingsProblem]:
    """Yield the conditions that the settings do not meet for ``listener``, which has ``once``. No database is asked."""
    who = f'{listener.name} ({listener.location}) listens to "{listener.topic}" with once='
    alias = listener.using
    assert alias is not None
    topic = config.topics.get(listener.topic)
    if topic is not None:
        yield from _of_topic(topic, who, config.once_retention)
    if alias not in settings.DATABASES:
        known = ", ".join(map(repr, settings.DATABASES))
        yield SettingsProblem(
            "django_rmq.E061", f"{who}{alias!r}, which is not in DATABASES.", f"Its aliases are {known}."
        )
        return
    if not settings.DATABASES[alias].get("AUTOCOMMIT", True):
        yield SettingsProblem(
            "django_rmq.E062",
            f"{who}{alias!r}, which has AUTOCOMMIT: False, so nothing would commit the listener's transaction.",
            "Remove AUTOCOMMIT from this database, or name another one.",
        )
    if not router.allow_migrate(alias, "django_rmq", model_name=MODEL):
        yield SettingsProblem(
            "django_rmq.E063",
            f"{who}{alias!r}, where DATABASE_ROUTERS allow no table of django_rmq.",
            f'Let allow_migrate({alias!r}, "django_rmq", model_name="{MODEL}") return True, or name another database.',
        )


def _of_topic(topic: Topic, who: str, retention: float) -> Iterator[SettingsProblem]:
    if not topic.origin:
        key = "" if topic.keyed else ' "IDENTITY": "key" and'
        yield SettingsProblem(
            "django_rmq.E060",
            f"{who}, but the topic does not give its messages an origin.",
            f'Set{key} "ORIGIN": True in RMQ["TOPICS"]["{topic.name}"].',
        )
    life = longest_life(topic)
    if life >= retention:
        yield SettingsProblem(
            "django_rmq.E064",
            f"{who}, but its messages can be tried for {life:,.0f} s after they were processed, and are remembered for "
            f"{retention:,.0f} s.",
            f'Set RMQ["ONCE_RETENTION"] to more than {life:.0f}, or lower MAX_RETRIES, MAX_RUNTIME, TIMEOUT or BACKOFF '
            f'of "{topic.name}".',
        )


def warnings(config: Config, listener: Listener) -> Iterator[SettingsProblem]:
    """Yield settings that may be a mistake for ``listener``, which has ``once``."""
    if config.uses_outbox and listener.using != DEFAULT_DB_ALIAS:
        yield SettingsProblem(
            "django_rmq.W066",
            f'{listener.name} ({listener.location}) listens to "{listener.topic}" with once={listener.using!r}, and '
            f"sends wait for a transaction of {DEFAULT_DB_ALIAS!r}: what it sends goes out even if its transaction is "
            "rolled back.",
            f"Give using={listener.using!r} with each send of this listener. If it does so, or sends nothing, silence "
            "this check.",
        )


def longest_life(topic: Topic) -> float:
    """Return the most seconds from a first delivery to the end of the last one, if none has to wait for a worker."""
    deliveries = topic.max_retries + 1
    rests = sum(_longest_rest(topic.backoff, failures) for failures in range(1, deliveries))
    return rests + deliveries * (topic.max_runtime + topic.timeout)


def _longest_rest(backoff: BackOff, failures: int) -> float:
    longest: float = min(backoff.cap_ms, backoff.base_ms * 2 ** (failures - 1)) / 1000
    if backoff.function is not None:
        # A time-out always uses the numbers, and so does a worker if the function fails.
        with suppress(Exception):
            return max(longest, float(backoff.function(failures)))
    return longest


def missing_table(alias: str) -> list[SettingsProblem]:
    """Return a problem if a database lacks the table of processed messages.

    Raises ``django.db.Error`` if it cannot be reached.
    """
    from django_rmq.worker.processed_messages import has_table

    if has_table(alias):
        return []
    which = "" if alias == "default" else f" --database={alias}"
    return [
        SettingsProblem(
            "django_rmq.W065",
            f"Database {alias!r} has no table for the messages that listeners with once= have processed.",
            f"Run: python manage.py migrate django_rmq{which}",
        )
    ]
