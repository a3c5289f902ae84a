"""What a project would write to keep numbers of cards out of the admin."""

from __future__ import annotations

from typing import Any


def hide_numbers(topic: str, body: Any) -> Any:
    """Return the body with everything but the last four digits of its card hidden."""
    if isinstance(body, dict) and "card" in body:
        return {**body, "card": f"**** {str(body['card'])[-4:]}"}
    return body
