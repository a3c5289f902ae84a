"""Trouble in the log: one line per kind and ten seconds, however often it comes."""

from __future__ import annotations

import logging
import time

from django_rmq.exceptions import ServerTrouble
from django_rmq.logs import safe_logger

SECONDS_BETWEEN = 10.0

logger = safe_logger("django_rmq.coordination")


class Complaints:
    """Logs what is wrong; what passes by itself (``ServerTrouble``) as a warning, all else as an error."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def __call__(self, about: str, text: str, error: Exception, *, exc_info: bool = False) -> None:
        """Log ``text`` with ``error`` in it, unless there was a line ``about`` the same just now."""
        now = time.monotonic()
        if now - self._last.get(about, float("-inf")) >= SECONDS_BETWEEN:
            self._last[about] = now
            level = logging.WARNING if isinstance(error, ServerTrouble) else logging.ERROR
            logger.log(level, text, error, exc_info=exc_info, extra={"rmq_event": "trouble"})


__all__ = ["Complaints"]
