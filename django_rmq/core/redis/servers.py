"""What Redis servers report about themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from redis.exceptions import RedisError

from django_rmq.core.calls.broker import Server
from django_rmq.core.redis.errors import translate


def _info(raw: bytes) -> dict[str, str]:
    lines = raw.decode(errors="replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


def servers(on_all: Callable[..., dict[str, Any]]) -> list[Server]:
    """Return what each server reports about itself. Raises ``ServerRefused`` if INFO is not permitted.

    ``on_all`` runs a command on each and returns the plain answers, or a ``RedisError``, by readable names.
    """
    answers = on_all("INFO")
    told = {name: raw for name, raw in answers.items() if not isinstance(raw, RedisError)}
    if not told:
        error = next(iter(answers.values()))
        raise translate(error) from error
    configs: dict[str, dict[str, str]] = {name: {} for name in told}
    for setting in ("maxmemory-policy", "save"):
        for name, reply in on_all("CONFIG", "GET", setting).items():
            if not isinstance(reply, RedisError) and len(reply) == 2 and name in configs:
                configs[name][setting] = reply[1].decode()
    return [Server(name, _info(raw), configs[name]) for name, raw in told.items()]
