"""Changing the slot count of a topic while it is in use: what goes where, and in which order.

The reasons are in ``docs/decisions/0009-reslotting.md``. Every step may be repeated, by the same process or another
one: what was begun is registered in Redis, and each slot knows which re-slotting was there and what is on its way.
Knows no Django: families of slots may be moved by several processes at once.
"""

from .emptying import Progress
from .moving import AT_ONCE, move
from .registering import Reslotting, begin, finish, obstacle, under_way

__all__ = ["AT_ONCE", "Progress", "Reslotting", "begin", "finish", "move", "obstacle", "under_way"]
