"""What runs calls: a Redis server, a Redis Cluster, or this process' memory. Callers know brokers by this alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self, TypeVar

from django_rmq.core.calls.call import Answer, Call
from django_rmq.core.words.results import Confirmed, Durability
from django_rmq.core.words.stored import Definitions
from django_rmq.core.words.topics import Topic
from django_rmq.exceptions import RmqError

T = TypeVar("T")
Heard_co = TypeVar("Heard_co", covariant=True)


class Server(NamedTuple):
    """What a Redis server says of itself."""

    name: str
    info: Mapping[str, str]
    """What INFO answers."""
    config: Mapping[str, str]
    """``maxmemory-policy`` and ``save``, as far as we may see them."""


class Subscription(Protocol[Heard_co]):
    """Something that is listened to from now until ``close``."""

    def fileno(self) -> int:
        """Return the socket's descriptor, for ``select``. Raises ``OSError`` where there is none."""

    def get(self, timeout: float = 0.0) -> Sequence[Heard_co]:
        """Return what was published, waiting at most ``timeout`` seconds for the first."""

    def close(self) -> None:
        """End the subscription."""


class Pipeline(Protocol):
    """Collects calls for one round trip.

    ``send`` and ``receive`` are the halves of ``execute``: between them Redis works, and so can we.
    A connection that fails fails every call of the pipeline, for nobody knows what ran.
    """

    confirmed: Confirmed | None
    """After ``receive``: what ``confirm`` has come to."""

    def add(self, call: Call[T]) -> Answer[T]:
        """Collect a call; return what will hold its answer once the pipeline has run."""

    def confirm(self, wanted: Durability) -> None:
        """Wait, behind what is collected, until it is as safe as ``wanted``, or for two fifths of the socket time-out each."""

    def keep_order(self) -> None:
        """Run again whatever stands behind a call that has to be repeated; all calls must be of a kind that may run twice."""

    def __len__(self) -> int: ...

    def send(self) -> Self:
        """Send what was collected. Raises ``ServerTrouble``; then nothing more is to be received."""

    def receive(self) -> list[Any]:
        """Return the answer of each call, or an ``RmqError``, in order."""

    def execute(self) -> list[Any]:
        """Run what was collected; return the answer of each call, or an ``RmqError``, in order."""


class Broker(Protocol):
    """Runs calls. It repeats none by itself: whether that is safe is for the caller to know."""

    @property
    def prefix(self) -> str:
        """What stands before every key."""

    def run(self, call: Call[T]) -> T:
        """Run a call and return its answer. Raises ``RmqError``."""

    def pipeline(self) -> Pipeline:
        """Return a pipeline: it collects calls, and ``execute`` runs all in one round trip."""

    def load_scripts(self) -> None:
        """Give the server every script once, so that no pipeline meets a missing one."""

    def close(self) -> None:
        """Close all connections; a later call opens new ones."""

    def definitions(self) -> Definitions:
        """Return the registered definition of every topic.

        Raises ``WrongType`` where there is something else in the place of all of them.
        """

    def define(self, topic: Topic, *, replace: bool = False) -> dict[str, Any]:
        """Register ``topic`` unless it is registered already; return what is registered then.

        ``replace`` keeps what is noted of the topic's re-slottings.
        """

    def redefine(self, name: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
        """Replace a definition by what ``change`` makes of it (nothing is known: of an empty one); return that.

        Nobody else changes it between: then ``change`` is asked once more. Raises ``WrongType`` where there is something else.
        """

    def undefine(self, topic: Topic) -> None:
        """Forget the definition of a topic, what it counted and its history."""

    def note_slot_basis(self, topic: Topic) -> None:
        """Note that ``topic`` has messages whose slot nobody can compute again from what is stored."""

    def has_slot_bases(self, topic: Topic) -> bool:
        """Return whether ``note_slot_basis`` was ever told of ``topic``."""

    def ping(self) -> None:
        """Raise ``ServerTrouble`` unless the server answers and is ready."""

    def now_ms(self) -> int:
        """Return the server's clock in ms."""

    def servers(self) -> list[Server]:
        """Return what the server says of itself; on a cluster, each primary. Raises ``ServerRefused`` without INFO."""

    def refused(self, topics: Iterable[Topic]) -> list[str]:
        """Return what the server refuses us of what we need, by trying all of it in ways that change nothing."""

    def wakeups(self, topics: Iterable[Topic]) -> Subscription[tuple[str, int]]:
        """Subscribe to the wake-ups of ``topics``: pairs of a topic's name and a slot, ``-1 - slot`` if it was paused."""

    def worker_changes(self) -> Subscription[tuple[str, int]]:
        """Subscribe to changes of membership and assignment: pairs of an empty text and a number."""

    def publish_events(self, payload: bytes) -> int:
        """Publish what happened to messages; return how many subscribers heard it (on a cluster: of one node)."""

    def events(self) -> Subscription[bytes]:
        """Subscribe to what is published of messages."""


def run_all(broker: Broker, calls: Iterable[Call[T]]) -> list[T | RmqError]:
    """Run calls in one round trip; return the answer of each, or its error, in order."""
    pipeline = broker.pipeline()
    answers = [pipeline.add(call) for call in calls]
    pipeline.execute()
    return [answer.result() for answer in answers]
