"""What the walk remembers of a message, a worker, the network and the slot."""

from typing import NamedTuple

FRESH = 100  # Store score of a fresh copy: FRESH + "due in"; below it the score is a retry's, as on the wire
NOBODY, THE_DEAD = 3, 2  # in `Slot.owner` and `Slot.newest`, where 0 and 1 are the two workers
WAITING, PARTING, RUNNING, SUCCEEDED, FAILED, REJECTED = range(6)  # phases of a delivery in a worker's hands
REMOVED, BURIED, OUTLIVED = 1, 2, 3  # marks; outlived: buried, and a newer copy before it


class Record(NamedTuple):
    """What Prepare and the in-flight hash hold of one member. The original score follows from `left`."""

    left: int
    age: int
    mark: int
    covers: bool  # no send came since: what ends it ends the last send too
    jumped: bool  # Redis' clock jumped over more than half its time-out


class Member(NamedTuple):
    """One message: where its copies are, and what the properties have to remember of it."""

    store: int = 0
    retry: tuple[int, int] | None = None  # retries, due in
    record: Record | None = None
    dead: bool = False
    needed: bool = False  # the last send is neither done, dead nor removed
    mourned: bool = False  # it lies in Dead until a person takes it out
    early: int = 0  # the last stored send is due in so many ticks
    taken: int = 0  # deliveries of the last send
    unwanted: bool = False  # a person removed it, and nobody sent it since


class Item(NamedTuple):
    """A delivery in a worker's hands."""

    phase: int
    age: int  # ticks since its prepare or extend was asked for, by the worker's own clock
    current: bool  # its receipt is the one in Prepare
    covers: bool
    excused: bool  # it outlived its time-out by Redis' clock


class Worker(NamedTuple):
    """One worker process, which is one thread as far as this slot goes."""

    running: tuple[int, Item] | None = None  # a member and its delivery, until the listener returned
    hand: tuple[Item | None, ...] = ()
    lost: bool = False  # whether a reply to its prepare, or a push, did not come: it asks what it holds


class Late(NamedTuple):
    """A request that is still on its way while its sender has given it up. Or a push that its worker has not read."""

    kind: str
    worker: int
    member: int
    current: bool  # its receipt, or for prepare its epoch, is still good


class Slot(NamedTuple):
    """What is not one member's or one worker's: the control hash, the coordinator, the network, what is left to happen."""

    owner: int = NOBODY
    newest: int = 0  # who holds the highest epoch
    assigned: int = 0
    late: Late | None = None
    sends: int = 0
    foreign: int = 0
    lost: int = 0
    pushes: int = 0
    crashes: int = 0
    handovers: int = 0
    persons: int = 0
    rejects: int = 0
    releases: int = 0
    jumps: int = 0
