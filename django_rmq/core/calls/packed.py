"""Arguments that are written already as the server reads them."""

from __future__ import annotations


class Packed:
    """Members, or scores and members, that are written already as the server reads them; for pipelines to one server.

    It has the length of what it stands for; in its call it is one argument.
    """

    def __init__(self, count: int, width: int, data: memoryview) -> None:
        self.count = count
        self.width = width
        """Texts for each: 1, or 2 with a score."""
        self.data = data

    def __len__(self) -> int:
        return self.count
