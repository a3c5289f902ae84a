"""Subscriptions to wake-ups and events."""

from __future__ import annotations

from typing import Any

from redis.exceptions import RedisError

from django_rmq.core.redis.error_translation import translate


class _Subscription:
    """A subscription to channels."""

    def __init__(self, client: Any, channels: dict[bytes, str]) -> None:
        self._topics = channels
        self._pubsub = client.pubsub(ignore_subscribe_messages=True)
        try:
            self._pubsub.subscribe(*channels)
            # SUBSCRIBE is answered once per channel; only after all answers is nothing missed.
            for _ in channels:
                self._pubsub.parse_response(block=True)
        except RedisError as error:
            self.close()
            raise translate(error) from error

    def fileno(self) -> int:
        """Return the socket's descriptor, for ``select``."""
        return int(self._pubsub.connection._sock.fileno())  # noqa: SLF001 - redis-py shows its socket nowhere else

    def close(self) -> None:
        """End the subscription."""
        try:
            self._pubsub.close()
        except (RedisError, OSError):
            pass


class Wakeups(_Subscription):
    """A subscription to wake-ups: slots that can be taken from earlier than announced."""

    def get(self, timeout: float = 0.0) -> list[tuple[str, int]]:
        """Return the (topic, slot) pairs woken; wait at most ``timeout`` seconds for the first.

        ``-1 - slot``: the slot was paused.
        """
        woken: list[tuple[str, int]] = []
        try:
            while message := self._pubsub.get_message(timeout=0.0 if woken else timeout):
                woken.append((self._topics[message["channel"]], int(message["data"])))
        except RedisError as error:
            raise translate(error) from error
        except (ValueError, KeyError):
            pass
        return woken


class Events(_Subscription):
    """A subscription to the events of messages."""

    def get(self, timeout: float = 0.0) -> list[bytes]:
        """Return what was published (up to 100 at a time); wait at most ``timeout`` seconds for the first."""
        found: list[bytes] = []
        try:
            while len(found) < 100 and (
                message := self._pubsub.get_message(timeout=0.0 if found else timeout)
            ):
                found.append(message["data"])
        except RedisError as error:
            raise translate(error) from error
        return found
