"""The work: nothing."""


def nothing(n: int) -> None:
    """Do nothing."""
