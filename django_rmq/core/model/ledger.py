"""The ledger of a slot, and the equations that it must satisfy: no message is lost or counted twice.

The scripts count, as by ``count('dropped')`` in ``core/lua/slot``. This module only compares. The equations are those of
``docs/state_machine.md``, whose section on the ledger says what the names mean that are not those of transitions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ledger:
    """All counters of one slot and the depths read at the same instant."""

    counters: dict[str, int]
    store: int
    prepare: int
    retry: int
    dead: int
    claimed: int = 0

    def __post_init__(self) -> None:
        # No script counts sends, which would cost each of them a command: a send stores a message, or meets one.
        self.counters["sent"] = self._sum("stored", "merged", "replaced")

    def __getitem__(self, name: str) -> int:
        return self.counters.get(name, 0)

    def _sum(self, *names: str) -> int:
        return sum(map(self.__getitem__, names))

    @property
    def live_drift(self) -> int:
        """The number of messages present minus the number accounted for: above 0 after foreign ZADDs, below 0 after a loss."""
        came = self._sum("stored", "foreign", "revived", "moved_in", "restored")
        went = self._sum(
            "committed", "cancelled", "acked", "removed", "purged", "lapsed", "dropped", "died", "moved_out"
        )
        return went + self.store + self.prepare + self.retry + self.claimed - came

    @property
    def dead_drift(self) -> int:
        """The number of messages in Dead minus the number that died and have not left it."""
        came = self._sum("died", "lapsed", "moved_dead_in", "restored_dead")
        went = self._sum(
            "dead_merged", "revived", "replay_merged", "removed_dead", "purged_dead", "moved_dead_out"
        )
        return went + self.dead - came

    @property
    def delivery_drift(self) -> int:
        """The number of deliveries that have ended or are in flight minus the number that began."""
        ended = self._sum(
            "committed", "cancelled", "failed", "expired", "released", "rejected", "ended_marked"
        )
        return ended + self.prepare - self["prepared"]

    @property
    def claim_drift(self) -> int:
        """The number of messages that have left a claim or are in one minus the number that were claimed."""
        return self._sum("acked", "claim_returned") + self.claimed - self["claimed"]

    @property
    def balanced(self) -> bool:
        """Whether all four equations hold."""
        return not (self.live_drift or self.dead_drift or self.delivery_drift or self.claim_drift)

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return iter(self.counters.items())
