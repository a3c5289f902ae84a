"""The registered definitions of topics."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from django_rmq.core.model import keys
from django_rmq.core.model.keys import (
    Definitions,
    explicit_basis_key,
    history_keys,
    limits_key,
    times_key,
    topics_key,
)
from django_rmq.core.model.topic import Topic, redefined
from tests.oracle.keyspace import Memory


def definitions(memory: Memory) -> Definitions:
    key = topics_key(memory.prefix)
    with memory.hash(key) as found:
        return Definitions(key, found.items())


def define(memory: Memory, topic: Topic, *, replace: bool = False) -> dict[str, Any]:
    return redefine(
        memory, topic.name, lambda known: redefined(topic, known) if replace or not known else known
    )


def redefine(memory: Memory, name: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    key = topics_key(memory.prefix)
    with memory.hash(key) as found:
        known = keys.definition(key, name, found.get(name.encode(), b""))
        wanted = change(known)
        if wanted != known:
            found[name.encode()] = json.dumps(wanted, sort_keys=True).encode()
        return wanted


def undefine(memory: Memory, topic: Topic) -> None:
    prefix, name = memory.prefix, topic.name
    with memory.lock:
        for key in (*history_keys(prefix, name), times_key(prefix, name), limits_key(prefix, name)):
            memory.keyspace.pop(key, None)
        for key in (explicit_basis_key(prefix), topics_key(prefix)):
            with memory.hash(key) as found:
                found.pop(name.encode(), None)


def note_slot_basis(memory: Memory, topic: Topic) -> None:
    with memory.hash(explicit_basis_key(memory.prefix)) as noted:
        noted[topic.name.encode()] = b"1"


def has_slot_bases(memory: Memory, topic: Topic) -> bool:
    with memory.hash(explicit_basis_key(memory.prefix)) as noted:
        return topic.name.encode() in noted
