"""The interface of a broker, which runs calls: on a Redis server, on a Redis Cluster, or in the memory of this process.

It is the door between the commands and the drivers. Its errors are those of this package; exceptions of redis-py stop behind it.
``run_all``, ``walk`` and ``attempt`` run many calls in few round trips, for which ``batched`` makes lists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Protocol, Self, TypeAlias, TypeGuard, TypeVar

from django_rmq.core.commands.script_call import Answer, Answers, Call
from django_rmq.core.model.keys import Definitions
from django_rmq.core.model.replies import Pushed
from django_rmq.core.model.send_results import Confirmed, Durability
from django_rmq.core.model.server_checks import ServerInfo, SlowCommand
from django_rmq.core.model.topic import Definition, Topic
from django_rmq.exceptions import NodeUnavailable, RmqError, ServerRefused, ServerTrouble

T = TypeVar("T")
Heard_co = TypeVar("Heard_co", covariant=True)


class Subscription(Protocol[Heard_co]):
    """A subscription to channels that is active until ``close``."""

    def fileno(self) -> int:
        """Return the socket's descriptor, for ``select``. Raises ``OSError`` if there is none."""

    def get(self, timeout: float = 0.0) -> Sequence[Heard_co]:
        """Return what was published; wait at most ``timeout`` seconds for the first item."""

    def close(self) -> None:
        """End the subscription."""


Woken: TypeAlias = tuple[str, int] | Pushed
"""A wake-up: a topic and a number that ``keys.read_wakeup`` reads; or what a send has pushed."""


class WakeupSubscription(Subscription[Woken], Protocol):
    """A subscription to wake-ups, and perhaps to an inbox."""

    def check(self) -> None:
        """Ask the server for an answer, which ``get`` reads. Raises ``RmqError`` if nothing has come since the last question."""

    def stop_pushes(self) -> None:
        """Refuse pushes from now on. ``get`` returns those that were made before."""

    @property
    def has_pushes(self) -> bool:
        """Whether ``get`` may still return what a send has pushed."""


class BrokerPipeline(Protocol):
    """Collects calls for one round trip.

    ``send`` and ``receive`` are the halves of ``execute``: between them, Redis and the caller work at the same time. A failed
    connection fails every call of the pipeline, because it is unknown which of them ran.
    """

    confirmed: Confirmed | None
    """The durability that ``confirm`` has reached; available after ``receive``."""

    def add(self, call: Call[T]) -> Answer[T]:
        """Collect a call; return an object that holds its answer after the pipeline has run."""

    def confirm(self, wanted: Durability) -> None:
        """Wait, after the collected calls, until they are as durable as ``wanted``.

        Waits at most two fifths of the socket time-out for each kind of confirmation.
        """

    def keep_order(self) -> None:
        """Run everything after a call again if that call has to be repeated. All calls must be safe to run twice."""

    def __len__(self) -> int: ...

    def send(self) -> Self:
        """Send the collected calls. Raises ``ServerTrouble``; ``receive`` must not be called then."""

    def receive(self) -> Answers:
        """Return the answer of each call, or an ``RmqError``, in order."""

    def execute(self) -> Answers:
        """Run the collected calls; return the answer of each, or an ``RmqError``, in order."""


class Broker(Protocol):
    """Runs calls. It repeats none that may have run, because only the caller knows whether that is safe."""

    @property
    def prefix(self) -> str:
        """The text in front of every key."""

    @property
    def in_memory(self) -> bool:
        """Whether everything is in the memory of this process, so that no other process can use it."""

    def run(self, call: Call[T]) -> T:
        """Run a call and return its answer. Raises ``RmqError``."""

    def pipeline(self) -> BrokerPipeline:
        """Return a pipeline, which collects calls; ``execute`` runs all of them in one round trip."""

    def load_scripts(self) -> None:
        """Load every script into the server, so that no pipeline finds one missing."""

    def close(self) -> None:
        """Close all connections; a later call opens new ones."""

    def definitions(self) -> Definitions:
        """Return the registered definition of every topic.

        Raises ``WrongType`` if the key of the definitions holds another type.
        """

    def define(self, topic: Topic, *, replace: bool = False) -> Definition:
        """Register ``topic`` unless it is registered already; return the definition that is registered afterwards.

        ``replace`` overwrites the definition but keeps what it records about re-slottings.
        """

    def redefine(self, name: str, change: Callable[[Definition], Definition]) -> Definition:
        """Replace a definition by the result of ``change``, and return it; an unregistered topic has an empty definition.

        The change is atomic: if another process changes the definition meanwhile, ``change`` is called again.
        Raises ``WrongType`` if the key holds another type.
        """

    def undefine(self, topic: Topic) -> None:
        """Delete the definition of a topic, its counters and its history. Not atomic, but it can be repeated."""

    def note_slot_basis(self, topic: Topic) -> None:
        """Record that ``topic`` has messages whose slot cannot be computed from their stored form."""

    def has_slot_bases(self, topic: Topic) -> bool:
        """Return whether ``note_slot_basis`` was ever called for ``topic``."""

    def ping(self) -> None:
        """Raise ``ServerTrouble`` unless the server answers and is ready."""

    def now_ms(self) -> int:
        """Return the server's clock in ms."""

    def servers(self) -> list[ServerInfo]:
        """Return the report of the server about itself; on a cluster, the report of each primary.

        Raises ``ServerRefused`` if INFO is not permitted.
        """

    def slow_commands(self) -> list[SlowCommand]:
        """Return the commands in the slow logs of the servers, the slowest first. Raises ``ServerRefused`` if not permitted."""

    def refused(self, topics: Iterable[Topic]) -> list[str]:
        """Return which of the required commands the server refuses. Each is tried in a way that changes nothing."""

    def inbox(self, owner: str) -> bytes:
        """Return the channel to which sends may push messages for a worker. Empty: this kind of server has none."""

    def wakeups(self, topics: Iterable[Topic], inbox: bytes = b"") -> WakeupSubscription:
        """Subscribe to the wake-ups of ``topics``: pairs of a topic's name and a number that ``keys.read_wakeup`` reads.

        With an ``inbox`` also to what sends push there.
        """

    def worker_changes(self) -> WakeupSubscription:
        """Subscribe to changes of membership and assignment: pairs of an empty text and a number."""

    def publish_events(self, payload: bytes) -> int:
        """Publish events; return how many subscribers received them (on a cluster: those of one node)."""

    def events(self) -> Subscription[bytes]:
        """Subscribe to the events of messages."""


def concerns_all(error: RmqError) -> TypeGuard[ServerTrouble]:
    """Return whether an error concerns the whole server, rather than a slot or a node."""
    return isinstance(error, ServerTrouble) and not isinstance(error, (ServerRefused, NodeUnavailable))


def batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield lists of up to ``size`` items."""
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch


def run_all(broker: Broker, calls: Iterable[Call[T]]) -> list[T | RmqError]:
    """Run calls in one round trip; return the answer of each, or its error, in order."""
    pipeline = broker.pipeline()
    answers = [pipeline.add(call) for call in calls]
    pipeline.execute()
    return [answer.result() for answer in answers]


CALLS_PER_TRIP = 1_000
"""The default number of calls in one round trip."""


def attempt(
    broker: Broker, calls: Iterable[Call[T]], at_once: int = CALLS_PER_TRIP
) -> Iterator[T | RmqError]:
    """Run calls, ``at_once`` per round trip, and yield the answer of each, or its error, in order."""
    for some in batched(calls, at_once):
        yield from run_all(broker, some)


def walk(broker: Broker, calls: Iterable[Call[T]], at_once: int = CALLS_PER_TRIP) -> Iterator[T]:
    """Run calls, ``at_once`` per round trip, and yield their answers in order. Raises the first error among them."""
    for answer in attempt(broker, calls, at_once):
        if isinstance(answer, RmqError):
            raise answer
        yield answer
