"""What a project calls."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from tests.newsletter.tasks import publish


def announce(issue: int, addresses: list[str], at: datetime) -> Any:
    """Publish an issue at a time; return the result of the task that does so."""
    return publish.using(run_after=at, priority=20).enqueue(issue, addresses=addresses)
