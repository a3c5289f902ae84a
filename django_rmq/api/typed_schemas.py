"""The schemas of typed bodies in a project's OpenAPI description: a component for each topic whose BODY is a type.

A type's schema is JSON Schema, which OpenAPI 3.1 takes as it is. For OpenAPI 3.0, what it does not have is
rewritten or left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from django_rmq.core.model.topic import Topic
from django_rmq.operations.sends import body_schema

_Schema = dict[str, Any]

_DATA = ("const", "default", "enum", "examples")
"""Keywords whose values are no schemas."""
_LATER = ("$schema", "contentEncoding", "contentMediaType", "patternProperties", "propertyNames")
"""Keywords that OpenAPI 3.0 does not have."""


def components(topics: Mapping[str, Topic], *, is_3_0: bool) -> dict[str, _Schema]:
    """Return name → schema: for each topic with a type `Body_` and its name, and what that refers to."""
    found: dict[str, _Schema] = {}
    for name, topic in topics.items():
        schema = body_schema(topic)
        if schema is None:
            continue
        key = f"Body_{name}"
        parts = {f"{key}_{part}": each for part, each in schema.pop("$defs", {}).items()}
        for part, each in {key: schema, **parts}.items():
            before = _walked(each, _before_3_1) if is_3_0 else each
            found[part] = _walked(before, lambda one, key=key: _moved(one, key))  # type: ignore[misc]
    return found


def one_of_them(names: list[str]) -> _Schema:
    """Return the schema of a field that is a body of any topic, ``names`` being the components of typed ones."""
    refs: list[_Schema] = [{"$ref": f"#/components/schemas/{name}"} for name in names]
    other = {"description": "The body of another topic"}
    return {"anyOf": [*refs, other], "description": "Of a topic whose BODY is a type: Body_ and its name"}


def _walked(schema: Any, change: Callable[[_Schema], _Schema]) -> Any:
    """Return ``schema`` with ``change`` applied to all schemas in it, from within, and to itself."""
    if isinstance(schema, list):
        return [_walked(each, change) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found: _Schema = {}
    for name, value in schema.items():
        if name == "properties":
            found[name] = {field: _walked(each, change) for field, each in value.items()}
        else:
            found[name] = value if name in _DATA else _walked(value, change)
    return change(found)


def _moved(schema: _Schema, key: str) -> _Schema:
    """Return a schema that refers to components instead of the definitions that came with it."""
    place = f"#/components/schemas/{key}_"
    if "$ref" in schema:
        schema["$ref"] = schema["$ref"].replace("#/$defs/", place)
    if "mapping" in schema and "propertyName" in schema:
        schema["mapping"] = {tag: ref.replace("#/$defs/", place) for tag, ref in schema["mapping"].items()}
    return schema


def _before_3_1(schema: _Schema) -> _Schema:
    found = {name: value for name, value in schema.items() if name not in _LATER}
    if "const" in found:
        found["enum"] = [found.pop("const")]
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if exclusive in found:
            found[bound], found[exclusive] = found[exclusive], True
    if "prefixItems" in found:
        found["items"] = {"anyOf": found.pop("prefixItems")}
    if "examples" in found:
        found["example"] = found.pop("examples")[0]
    if found.get("type") == "null":
        del found["type"]
        found["nullable"] = True
    return _nullable(found) if "anyOf" in found else found


def _nullable(found: _Schema) -> _Schema:
    """Return a choice without null; it may be null if that was one."""
    others = [each for each in found["anyOf"] if each != {"nullable": True}]
    if len(others) < len(found["anyOf"]):
        found |= {"nullable": True, "anyOf": others}
        if len(others) == 1 and "$ref" not in others[0]:
            del found["anyOf"]
            found = {**others[0], **found}
    return found


__all__ = ["components", "one_of_them"]
