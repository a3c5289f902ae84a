"""Whether a worker has to end, and why."""

from __future__ import annotations

from django_rmq.exceptions import SlotMoved


class Ending:
    """Flags that any part of the worker may set and read."""

    def __init__(self) -> None:
        self.begun = False
        """Whether the worker has stopped taking messages."""
        self.exit_asked = False
        """Whether a listener raised SystemExit or KeyboardInterrupt."""
        self.forced = False
        """Whether the shutdown time-out cut a listener short, or something could not be settled."""
        self.moved: SlotMoved | None = None
        """The error to raise at the end, if a slot was given another slot count."""


__all__ = ["Ending"]
