"""The addresses and credentials of ZooKeeper, and the paths that belong to this application."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kazoo.security import CREATOR_ALL_ACL, OPEN_ACL_UNSAFE


@dataclass(frozen=True, slots=True)
class Ensemble:
    """The addresses and credentials of ZooKeeper, and the paths that belong to this application."""

    hosts: str
    """``host:port,host:port``"""
    root: str = "/rmq"
    session_seconds: float = 10.0
    auth: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """(scheme, credential) pairs."""
    is_closed: bool = False
    """Whether only clients with the creator's login may use the nodes, instead of everyone."""
    tls: Mapping[str, Any] | None = field(default=None, repr=False)
    """CA, CERT, KEY, KEY_PASSWORD, VERIFY. None: no TLS."""
    key_prefix: str = ""
    """The prefix of the keys in Redis. Workers with another prefix do not belong to the same crew."""

    def path(self, *parts: str) -> str:
        """Return the path of one of this application's nodes."""
        return "/".join((self.root, *parts))

    @property
    def acl(self) -> list[Any]:
        """The permissions of this application's nodes."""
        return list(CREATOR_ALL_ACL if self.is_closed else OPEN_ACL_UNSAFE)
