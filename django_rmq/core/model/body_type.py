"""The interface by which a topic with a typed body uses its type, so that the core need not know pydantic.

``typed_bodies`` has the implementation.
"""

from __future__ import annotations

from typing import Any, Protocol


class BodyType(Protocol):
    """The type that a topic's BODY names. Each method raises ``ConfigurationError`` if it cannot be used."""

    @property
    def path(self) -> str:
        """The path by which BODY names it."""

    def plain(self, body: object) -> Any:
        """Return an instance, or plain data, as the data to be stored as JSON. Raises ``InvalidBody``."""

    def read(self, raw: bytes) -> Any:
        """Return the instance from what is stored. Raises ``InvalidBody``."""

    def schema(self) -> dict[str, Any] | None:
        """Return the JSON schema of the bodies that may be sent, or None if no schema can describe them."""


__all__ = ["BodyType"]
