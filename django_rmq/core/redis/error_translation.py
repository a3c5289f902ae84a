"""Translates the driver's errors into those of this package."""

from __future__ import annotations

import re
from typing import Any

import redis
from redis.exceptions import NoScriptError, RedisError

from django_rmq.core.commands.script_call import Call, RedisCommand
from django_rmq.exceptions import RmqError, ServerFull, ServerRefused, ServerUnavailable, WrongType

_WRAPPED = re.compile(r"@user_script: ?\d+: -([A-Z]+) ")
"""How Redis 6 shows the code of an error that a command got inside a script."""

_UNAVAILABLE = ("READONLY", "LOADING", "BUSY", "MASTERDOWN", "NOREPLICAS", "CLUSTERDOWN", "TRYAGAIN")
_UNWRITABLE = ("READONLY", "NOREPLICAS")
_UNAVAILABLE_ERRORS = (
    redis.exceptions.ReadOnlyError,
    redis.exceptions.ClusterDownError,  # includes MASTERDOWN
    redis.exceptions.TryAgainError,
    NoScriptError,  # it was loaded just before, so the server has just lost it
)


def translate(error: RedisError) -> RmqError:
    """Return the package's error for one of the driver's.

    The driver removes the code from some answers and uses a class instead; Redis 6 wraps the code if a script
    got the error.
    """
    text = str(error).removesuffix(".")  # more text may follow, and some of the driver's texts are sentences
    if isinstance(error, (redis.ConnectionError, redis.TimeoutError)):
        if isinstance(error, (redis.AuthenticationError, redis.exceptions.AuthorizationError)):
            return ServerRefused(f"Redis denies access: {text}")
        return ServerUnavailable(f"Redis does not answer: {text}")
    wrapped = _WRAPPED.search(text)
    word = wrapped[1] if wrapped else text.split(" ", 1)[0]
    if word == "WRONGTYPE":
        return WrongType(text)
    if word in ("OOM", "MISCONF") or isinstance(error, redis.exceptions.OutOfMemoryError):
        if word == "MISCONF":
            return ServerFull(f"Redis refuses writes: {text}")
        return ServerFull("Redis is full: its used memory is above 'maxmemory'. Consuming still works")
    if word in ("NOPERM", "NOAUTH", "WRONGPASS") or isinstance(error, redis.exceptions.NoPermissionError):
        return ServerRefused(f"Redis denies access: {text}")
    if word in _UNAVAILABLE or isinstance(error, _UNAVAILABLE_ERRORS):
        unavailable = ServerUnavailable(f"Redis cannot answer now: {text}")
        unavailable.refuses_writes = word in _UNWRITABLE or isinstance(error, redis.exceptions.ReadOnlyError)
        return unavailable
    return ServerRefused(f"Redis answered: {text}")


def named(key: bytes, error: RmqError) -> RmqError:
    """Return ``error``; if a plain command found a foreign value, with the name of the key.

    Scripts name the key themselves.
    """
    if not isinstance(error, WrongType):
        return error
    return WrongType(
        f"the key {key.decode(errors='backslashreplace')!r} holds data that RMQ did not write: {error}"
    )


def explain(call: Call[Any], prefix: str, error: RmqError) -> RmqError:
    """Return the error of a call, with the key that it is about if there is one."""
    if not isinstance(call, RedisCommand) or not isinstance(error, WrongType):
        return error
    return named(call.keys(prefix)[0], error)
