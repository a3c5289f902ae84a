"""What Redis servers report about themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from redis.exceptions import RedisError

from django_rmq.core.model.server_info import SETTINGS, ServerInfo
from django_rmq.core.redis.error_translation import translate

COMMANDS: list[tuple[str, ...]] = [("INFO",), *(("CONFIG", "GET", name) for name in SETTINGS)]
"""What each server is asked. Redis 6 takes one setting per command."""


def parse_servers(replies: Mapping[str, Sequence[Any]]) -> list[ServerInfo]:
    """Return what each server reports about itself. Raises ``ServerRefused`` if INFO is not permitted.

    ``replies`` are the plain answers of each server to ``COMMANDS``, or a ``RedisError``, by the addresses of
    nodes. Servers that did not answer are left out, unless none did.
    """
    found = []
    for node, (info, *configs) in replies.items():
        if not isinstance(info, RedisError):
            name = f"the node {node}" if node else "Redis"
            found.append(ServerInfo(name, _parse_info(info), _parse_settings(configs), node))
    if not found:
        error = next(info for info, *_ in replies.values())
        raise translate(error) from error
    return found


def _parse_info(raw: bytes) -> dict[str, str]:
    lines = raw.decode(errors="replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


def _parse_settings(replies: Sequence[Any]) -> dict[str, str]:
    """Return the settings, without those that the user may not read or the server does not have."""
    return {
        name: reply[1].decode()
        for name, reply in zip(SETTINGS, replies, strict=True)
        if not isinstance(reply, RedisError) and len(reply) == 2
    }
