"""Changes the slot count of a topic while it is in use: what moves where, and in which order.

The reasons are in ``docs/decisions/0009-reslotting.md``. Every step may be repeated, by the same process or another one: Redis
holds the re-slotting that was begun, and each slot records which re-slotting reached it and which messages are on their way.
Several processes may move families of slots at the same time. The package knows no Django.
"""

from .reshard_state import (
    Reslotting,
    begin,
    finish,
    obstacle,
    under_way,
)
from .slot_drain import DrainProgress
from .slot_move import AT_ONCE, move

__all__ = ["AT_ONCE", "DrainProgress", "Reslotting", "begin", "finish", "move", "obstacle", "under_way"]
