"""Arguments that are already in the form in which the server reads them."""

from __future__ import annotations


class Packed:
    """Members or scores and members, then envelopes, already encoded for the server; for pipelines to one server.

    Its length is that of the values it stands for; in its call it is one argument.
    """

    def __init__(self, count: int, width: int, *data: memoryview) -> None:
        self.count = count
        self.width = width
        """The number of texts for each message: its member, and perhaps a score and an envelope."""
        self.data = data

    def __len__(self) -> int:
        return self.count
