"""Names and values of OpenTelemetry's semantic conventions for messaging, version 1.44.0 (in development)."""

from __future__ import annotations

from urllib.parse import unquote

from django_rmq.conf import Config, get_config
from django_rmq.core.model import redis_url
from django_rmq.core.producer.placement import SendOptions

SCHEMA_URL = "https://opentelemetry.io/schemas/1.44.0"

SYSTEM = "messaging.system"
TOPIC = "messaging.destination.name"
SLOT = "messaging.destination.partition.id"
OPERATION = "messaging.operation.name"
OPERATION_TYPE = "messaging.operation.type"
COUNT = "messaging.batch.message_count"
MESSAGE_ID = "messaging.message.id"
ERROR_TYPE = "error.type"
SERVER = "server.address"
PORT = "server.port"

OUTCOME = "messaging.rmq.message.outcome"
"""Outcome of a send, such as stored or merged."""
RETRIES_LEFT = "messaging.rmq.message.retries_left"
FAILED = "messaging.rmq.batch.failed_message_count"
"""The number of messages of a batch that the listener failed."""

SENT_MESSAGES = "messaging.client.sent.messages"
CONSUMED_MESSAGES = "messaging.client.consumed.messages"
OPERATION_DURATION = "messaging.client.operation.duration"
PROCESS_DURATION = "messaging.process.duration"
PROCESSED_BEFORE = "messaging.rmq.processed_before.messages"

TYPES = {"commit": "settle", "rollback": "settle"}
"""Operations whose type has another name."""

_server: tuple[Config, dict[str, str | int]] | None = None


def attributes(topic: str | None, operation: str) -> dict[str, str | int]:
    """Return the attributes of all spans and metrics of an operation; ``topic`` is None if it concerns several topics."""
    destination: SendOptions = {} if topic is None else {TOPIC: topic}
    kind = TYPES.get(operation, operation)
    return {SYSTEM: "rmq", OPERATION: operation, OPERATION_TYPE: kind, **destination, **_server_attributes()}


def error_type(error: BaseException) -> str:
    """Return the class of an error: ``ValueError``, ``shop.errors.NoSuchOrder``."""
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _server_attributes() -> dict[str, str | int]:
    """Return the address of Redis in the settings. Behind Sentinels it has none, because the primary may change."""
    global _server  # noqa: PLW0603 - read once per configuration
    config = get_config()
    if _server is None or _server[0] is not config:
        _server = config, _read_server(config)
    return _server[1]


def _read_server(config: Config) -> dict[str, str | int]:
    server = config.redis
    if config.broker == "memory" or server is None or server.sentinels:
        return {}
    parts = redis_url.parse(server.cluster[0] if server.cluster else server.url)
    if parts.scheme == "unix":
        return {SERVER: unquote(parts.path)}
    return {SERVER: parts.hostname or "localhost", PORT: parts.port or 6379}
