"""Where ZooKeeper is, and what is ours there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kazoo.security import CREATOR_ALL_ACL, OPEN_ACL_UNSAFE


@dataclass(frozen=True, slots=True)
class Ensemble:
    """Where ZooKeeper is, and what is ours there."""

    hosts: str
    """``host:port,host:port``"""
    root: str = "/rmq"
    session_seconds: float = 10.0
    auth: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """(scheme, credential) pairs."""
    is_closed: bool = False
    """Whether nodes are for those who log in as their creator did, instead of for everybody."""
    tls: Mapping[str, Any] | None = field(default=None, repr=False)
    """CA, CERT, KEY, KEY_PASSWORD, VERIFY; None: plain."""
    key_prefix: str = ""
    """Whose queues these are: workers of another prefix in Redis are not of the same crew."""

    def path(self, *parts: str) -> str:
        """Return the path of a node of ours."""
        return "/".join((self.root, *parts))

    @property
    def acl(self) -> list[Any]:
        """Who may do what with nodes of ours."""
        return list(CREATOR_ALL_ACL if self.is_closed else OPEN_ACL_UNSAFE)
