"""The requirements of a typed body: pydantic, a type and a function that exist, and options that fit the type.

The system checks and the start of workers report each ``TypedBodyProblem``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from django_rmq.core.model.topic import Topic
from django_rmq.typed_bodies.declared_body import DeclaredBody, Unusable


class TypedBodyProblem(NamedTuple):
    """A reason why a topic's bodies cannot have their type: an id of the system checks, a sentence and a hint."""

    id: str
    message: str
    hint: str = ""


def problems(topic: Topic) -> Iterator[TypedBodyProblem]:
    """Yield why the bodies of ``topic`` cannot have the type that BODY names, which is imported for it."""
    typed = topic.typed
    if not isinstance(typed, DeclaredBody):
        return
    place = f'RMQ["TOPICS"]["{topic.name}"]'
    try:
        typed.load()
    except Unusable as error:
        yield TypedBodyProblem(error.check, f"{place}: {error}.", error.hint)
        return
    unread = typed.unread_fields()
    if unread:
        yield TypedBodyProblem(
            "E104",
            f"{place}: its BODY does not read what it writes, so no body could be sent: {'; '.join(unread)}.",
            "Give each field one alias for reading and writing, and a default if it is not written.",
        )
    stored = typed.schema("serialization")
    if stored is not None:
        yield from _of_options(place, topic, stored)


def _of_options(place: str, topic: Topic, schema: Mapping[str, Any]) -> Iterator[TypedBodyProblem]:
    name = str(schema.get("$ref", "")).rpartition("/")[2]
    fields = schema.get("$defs", {}).get(name, schema).get("properties")
    if topic.slot_basis is not None and fields is not None and topic.slot_basis not in fields:
        yield TypedBodyProblem(
            "E104",
            f"{place} has SLOT_BASIS {topic.slot_basis!r}, and its BODY has no such field. It has: "
            f"{', '.join(sorted(fields))}.",
        )
    if _has(schema, "writeOnly"):
        yield TypedBodyProblem(
            "E104",
            f"{place}: its BODY contains a secret, which pydantic writes as asterisks: listeners would get these.",
            "Use str, or give the field a serializer. Everything in a body can be read in Redis.",
        )
    if not topic.keyed and _has(schema, "uniqueItems"):
        yield TypedBodyProblem(
            "E104",
            f'{place} has IDENTITY "body", and its BODY contains a set, whose order changes from process to process: '
            "equal bodies would be different messages.",
            'Use a list, or set IDENTITY "key".',
        )


def _has(schema: Any, keyword: str) -> bool:
    """Return whether ``keyword`` is true anywhere in a schema."""
    if isinstance(schema, Mapping):
        return schema.get(keyword) is True or any(_has(each, keyword) for each in schema.values())
    return isinstance(schema, list) and any(_has(each, keyword) for each in schema)


__all__ = ["TypedBodyProblem", "problems"]
