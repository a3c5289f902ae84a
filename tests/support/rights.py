"""What a user of Redis with few rights must be allowed; the page about security names the same."""

from __future__ import annotations

from django_rmq.core.model.server_checks import places

ALLOWED_COMMANDS = (
    *("exists", "expire", "hdel", "hexists", "hget", "hgetall", "hincrby", "hlen", "hmget", "hscan"),
    *("hset", "hsetnx", "pexpire", "rename", "time", "type", "unlink", "zadd", "zcard", "zcount", "zmscore"),
    *("zrange", "zrangebyscore", "zrangestore", "zrank", "zrem", "zremrangebyrank", "zrevrange"),
    *("zrevrank", "zscore"),
    *("auth", "client|setname", "config|get", "evalsha", "hello", "info", "ping", "publish"),
    *("pubsub|numsub", "script|load", "select", "subscribe", "unsubscribe"),
)
"""All commands that RMQ needs, in its scripts and beside them. ``replicas=`` also needs ``wait``, ``fsync=``
``waitaof``."""

CLUSTER_COMMANDS = ("asking", "cluster|slots")
"""Additional commands for a Redis Cluster."""


def rights(prefix: str, *, is_cluster: bool = False) -> list[str]:
    """Return the rules of an ACL that allow only what RMQ needs."""
    commands = (*ALLOWED_COMMANDS, *CLUSTER_COMMANDS) if is_cluster else ALLOWED_COMMANDS
    # Redis 6.2 accepts no channel pattern after the &* with which it begins.
    return ["resetkeys", "resetchannels", *places(prefix), "-@all", *(f"+{name}" for name in commands)]
