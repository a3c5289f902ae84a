"""The work: nothing."""

from jobs import ran


def nothing(n: int) -> None:
    """Do nothing."""
    ran()
