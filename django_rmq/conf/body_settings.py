"""BODY and UPCAST: a form of bodies, or the type that they have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django_rmq.conf.problems import Problems
from django_rmq.conf.values import InvalidSetting, dotted_path
from django_rmq.typed_bodies.declared_body import DeclaredBody


def body(value: object) -> str:
    """Return BODY: json, text, bytes, or the dotted path of a type."""
    if isinstance(value, str) and value in ("json", "text", "bytes"):
        return value
    try:
        return dotted_path(value)
    except InvalidSetting:
        raise InvalidSetting(
            "'json', 'text', 'bytes' or the dotted path of a type such as 'shop.events.PriceChanged'"
        ) from None


def typed(problems: Problems, place: str, values: dict[str, Any], own: Mapping[str, Any]) -> None:
    """Turn the path of a type, and that of its UPCAST, into what the topic has."""
    upcast, path = values.pop("upcast", None), values.get("body", "json")
    if "." in path:
        values["typed"] = DeclaredBody(path, upcast)
        values["body"] = "json"
    elif own.get("upcast"):
        problems.report(
            "E006",
            f'{place} has UPCAST and BODY "{path}": only bodies that have a type are upcast.',
            "Set BODY to the dotted path of a dataclass, a TypedDict or a pydantic model.",
        )


__all__ = ["body", "typed"]
