"""What a topic with a typed body knows of its type; ``project/validating`` has the implementation."""

from __future__ import annotations

from typing import Any, Protocol


class BodyType(Protocol):
    """The type that a topic's BODY names."""

    def plain(self, body: object) -> Any:
        """Return an instance, or plain data, as the data to be stored as JSON. Raises ``InvalidBody``."""

    def read(self, raw: bytes) -> Any:
        """Return the instance from what is stored. Raises ``InvalidBody``."""


__all__ = ["BodyType"]
