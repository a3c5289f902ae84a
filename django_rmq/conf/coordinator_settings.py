"""`RMQ["ZOOKEEPER"]` and `RMQ["COORDINATOR"]`: the coordinator that distributes the slots to the workers.

``connections.coordinators`` makes it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from django_rmq.conf.parsers import (
    InvalidSetting,
    dotted_path,
    keys_of,
    matching,
    one_of,
    optional,
    seconds,
    secret,
    setting,
)
from django_rmq.conf.problems import Problems, did_you_mean, printable
from django_rmq.conf.section_reader import read_values


def _hosts(value: object) -> str:
    if isinstance(value, (list, tuple)):
        value = ",".join(str(host) for host in value)
    if not isinstance(value, str) or not all(
        re.fullmatch(r"\s*(\[[0-9a-fA-F:]+\]|[\w.-]+)(:\d{1,5})?\s*", host) for host in value.split(",")
    ):
        raise InvalidSetting("'host:port,host:port' or a list of 'host:port'")
    return ",".join(host.strip() for host in value.split(","))


_root = matching(
    r"(/[A-Za-z0-9_-][A-Za-z0-9._-]*)+", "a ZooKeeper path such as '/rmq', with no slash at its end"
)


def _auth(value: object) -> tuple[tuple[str, str], ...]:
    pairs = [value] if isinstance(value, (list, tuple)) and value and isinstance(value[0], str) else value
    if not isinstance(pairs, (list, tuple)) or not all(
        isinstance(pair, (list, tuple)) and len(pair) == 2 and all(isinstance(part, str) for part in pair)
        for pair in pairs
    ):
        raise InvalidSetting("('digest', 'user:password') or a list of such pairs")
    for scheme, credential in pairs:
        if scheme == "sasl" or (scheme == "digest" and ":" not in credential):
            raise InvalidSetting("('digest', 'user:password') or a list of such pairs, none of them 'sasl'")
    return tuple((str(scheme), str(credential)) for scheme, credential in pairs)


def _tls(value: object) -> Mapping[str, object]:
    allowed = ("CA", "CERT", "KEY", "KEY_PASSWORD", "VERIFY")
    if not isinstance(value, Mapping) or not set(value) <= set(allowed):
        raise InvalidSetting(f"a dict with the keys {', '.join(allowed)}")
    return MappingProxyType(dict(value))


@dataclass(frozen=True, slots=True)
class ZooKeeper:
    """``RMQ["ZOOKEEPER"]``."""

    hosts: str = field(metadata={"parse": secret(_hosts)})
    root: str = setting(_root, "/rmq")
    session_timeout: float = setting(seconds(1.0), 10.0)
    auth: tuple[tuple[str, str], ...] = setting(_auth, (), is_secret=True)
    """(scheme, credential) pairs."""
    acl: str = setting(secret(one_of("open", "creator")), "open")
    """``open``, or ``creator``: only clients that logged in with the same AUTH (the default if AUTH is set)."""
    tls: Mapping[str, object] | None = setting(optional(_tls), None, is_secret=True)
    """CA, CERT, KEY, KEY_PASSWORD and VERIFY, or None without TLS."""
    when_away: str = setting(one_of("continue", "stop"), "continue")
    """What workers do with their slots while ZooKeeper is unavailable: ``continue``, or ``stop``."""


def read_zookeeper(problems: Problems, root: Mapping[str, object]) -> ZooKeeper | None:
    """Return the settings of ZooKeeper, or None if it is not used, or they have a problem."""
    if root.get("ZOOKEEPER") is None:
        return None
    before = len(problems)
    place = 'RMQ["ZOOKEEPER"]'
    values = read_values(problems, place, root["ZOOKEEPER"], keys_of(ZooKeeper))
    # HOSTS that are given and wrong have been reported already.
    if "hosts" not in values and len(problems) == before:
        problems.report("E007", f"{place} has no \"HOSTS\": it must be 'host:port,host:port'.")
    # A client with a certificate is logged in by it.
    logs_in = bool(values.get("auth") or (values.get("tls") or {}).get("CERT"))
    if values.get("acl") == "creator" and not logs_in:
        problems.report(
            "E007", f'{place} has ACL "creator" but no AUTH: no client could read the created nodes.'
        )
    values.setdefault("acl", "creator" if values.get("auth") else "open")
    return None if len(problems) > before else ZooKeeper(**values)


def read_coordinator(problems: Problems, root: Mapping[str, object]) -> str:
    """Return the chosen coordinator: ``redis``, ``zookeeper``, or a dotted path."""
    has_zookeeper = root.get("ZOOKEEPER") is not None
    name = root.get("COORDINATOR")
    if name is None:
        return "zookeeper" if has_zookeeper else "redis"
    if name == "zookeeper" and not has_zookeeper:
        problems.report(
            "E007",
            'RMQ["COORDINATOR"] is "zookeeper" and RMQ["ZOOKEEPER"] is missing.',
            'RMQ = {"ZOOKEEPER": {"HOSTS": "zk1:2181,zk2:2181"}, ...}.',
        )
    if name in ("redis", "zookeeper"):
        return str(name)
    try:
        return dotted_path(name)
    except InvalidSetting as wanted:
        hint = did_you_mean(name, ("redis", "zookeeper"))
        problems.report(
            "E003",
            f"RMQ[\"COORDINATOR\"] is {printable(name)}: it must be 'redis', 'zookeeper' or {wanted}{hint}",
        )
    return "redis"
