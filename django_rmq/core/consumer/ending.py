"""Whether a worker is to end, and why."""

from __future__ import annotations

from django_rmq.exceptions import SlotMoved


class Ending:
    """Written by whoever wants the end, read by all."""

    def __init__(self) -> None:
        self.begun = False
        """Nothing more is taken."""
        self.exit_asked = False
        """A listener raised SystemExit or KeyboardInterrupt."""
        self.forced = False
        """The shutdown time-out ended a listener's chance to finish, or something could not be settled."""
        self.moved: SlotMoved | None = None
        """Raised at the end: a slot was given another slot count."""


__all__ = ["Ending"]
