"""The registered definitions of topics, published in ZooKeeper for the time when Redis is unavailable."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kazoo import exceptions as kazoo

from django_rmq.core.coordination import Worker
from django_rmq.core.coordination.zookeeper import node_tree
from django_rmq.core.coordination.zookeeper.session import ZooKeeperSession
from django_rmq.exceptions import RmqError, ServerRefused

Definition = Mapping[str, Any]


class PublishedDefinitions:
    """The definitions of topics. ``registered`` asks Redis; while it raises, the published ones apply."""

    def __init__(
        self, registered: Callable[[], Mapping[str, Definition]], complain: Callable[..., None]
    ) -> None:
        self._registered, self._complain = registered, complain
        self._published: dict[str, bytes] | None = None
        """The published definitions of the session. None: not read yet."""

    def forget(self) -> None:
        """Begin a new session, in which the published definitions have to be read again."""
        self._published = None

    def known(self, session: ZooKeeperSession, crew: Iterable[Worker]) -> Mapping[str, Definition]:
        """Return the definitions, and publish them; while Redis is unavailable, return the published ones."""
        if self._published is None:
            (names,) = session.ask(session.client.get_children_async(session.ensemble.path("topics")))
            self._published = dict(node_tree.texts(session, "topics", names))
        try:
            registered = self._registered()
        except RmqError as error:
            self._complain("definitions", "Using the definitions published in ZooKeeper: %s", error)
            return {name: found for name, text in self._published.items() if (found := _definition(text))}
        try:
            self._published = _publish(session, self._published, _wanted(registered, crew))
        except ServerRefused as error:
            self._complain("publish", "Cannot publish definitions in ZooKeeper: %s", error)
        return registered


def _wanted(registered: Mapping[str, Definition], crew: Iterable[Worker]) -> dict[str, bytes]:
    said = {topic.name: topic for worker in crew for topic in worker.topics}
    return {
        name: json.dumps(
            registered.get(name) or {"slots": said[name].slots, "serial": said[name].serial}, sort_keys=True
        ).encode()
        for name in {*registered, *said}
    }


def _publish(
    session: ZooKeeperSession, published: Mapping[str, bytes], wanted: dict[str, bytes]
) -> dict[str, bytes] | None:
    """Publish what differs; return what is there then, or None if another worker was first."""
    client = session.client
    for name in sorted({*wanted, *published}):
        path, text = session.ensemble.path("topics", name), wanted.get(name)
        if text == published.get(name):
            continue
        try:
            if text is None:
                session.ask(client.delete_async(path))
            elif name in published:
                session.ask(client.set_async(path, text))
            else:
                session.ask(client.create_async(path, text))
        except (kazoo.NodeExistsError, kazoo.NoNodeError):
            return None
    return wanted


def _definition(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
