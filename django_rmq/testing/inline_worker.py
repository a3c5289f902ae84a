"""Runs the listeners of a test, immediately and in the thread of the test, and starts its schedules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, NamedTuple
from uuid import uuid4

from django_rmq.core.commands import ack, fetch, inspect
from django_rmq.core.commands.ack import BrokerDeliveryControl
from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.commands.schedules import read_schedules
from django_rmq.core.model.delivered_message import ListenerArgument, ListenerFunction, Message
from django_rmq.core.model.replies import Failure, Prepared
from django_rmq.core.model.topic import Topic
from django_rmq.core.schedules.stepper import next_run
from django_rmq.core.schedules.tick_times import next_tick
from django_rmq.exceptions import (
    Cancelled,
    ConfigurationError,
    InvalidMessage,
    Reject,
    Retry,
    UnknownSchedule,
)


def drain(
    topic: str | None = None, *, raise_errors: bool = True, limit: int = 10_000, live: bool = False
) -> int:
    """Run the listeners on all that is due now, and on what they send meanwhile; return the deliveries.

    Works on the broker of the settings or of ``memory_broker()``, in this thread, and commits and rolls back
    like a consumer. Ticks of schedules that ``start_schedules`` has started are sent. ``raise_errors``: an error of a
    listener (except ``Retry``, ``Reject``, and ``Cancelled`` if its message is cancelled), and ``InvalidBody``, is
    raised here after its message was rolled back. So is ``InvalidMessage`` for a message that cannot be decoded.
    ``KeyboardInterrupt`` always is. Messages that rest until a later time stay; so do those that still wait for a
    database commit. More than ``limit`` deliveries raise ``RuntimeError``, and so do more than 10,000 ticks of one schedule.

    On a real Redis it would take messages from running consumers, so that requires ``live=True``.
    """
    from django_rmq import connections, open_transactions
    from django_rmq.conf import get_config
    from django_rmq.worker import listener_registry

    config = get_config()
    listener_registry.autodiscover()
    listeners = listener_registry.listeners()
    if topic is not None:
        config.topic(topic)
        if topic not in listeners:
            raise ConfigurationError(f"topic {topic!r} has no listener")
        listeners = {topic: listeners[topic]}
    served = [(config.topics[name], listeners[name]) for name in listeners if name in config.topics]
    broker: Broker = connections.get_broker("worker")
    owner = uuid4().hex
    if not live and not broker.in_memory:
        raise ConfigurationError(
            "drain() would consume from a real Redis: use memory_broker(), RMQTestMixin (call super().setUp()), the fixture "
            'rmq or RMQ["TESTING"] = True. To do it anyway, call drain(live=True)'
        )
    # A test may have opened its connections before they were noted. In these, a transaction that a listener leaves open
    # would go unnoticed.
    open_transactions.record_opened_before()
    total = 0
    while True:
        handled = 0
        send_ticks(broker)
        for declared, listener in served:
            for slot in _due_slots(broker, declared):
                left = limit - total - handled
                handled += _drain_slot(broker, declared, slot, owner, listener, raise_errors, left)
        total += handled
        if not handled:
            return total


async def adrain(topic: str | None = None, **options: Any) -> int:
    """Do what ``drain`` does, from an asynchronous test, in the thread that has its database connections."""
    from asgiref.sync import sync_to_async

    return await sync_to_async(drain)(topic, **options)


def _due_slots(broker: Broker, topic: Topic) -> list[int]:
    now, due = broker.now_ms(), []
    for first in range(0, topic.slots, inspect.HEADS):
        slots = range(topic.slots)[first : first + inspect.HEADS]
        heads = broker.run(inspect.heads(topic, slots))
        due += [slot for slot, head in zip(slots, heads, strict=True) if head is not None and head <= now]
    return due


def _drain_slot(
    broker: Broker, topic: Topic, slot: int, owner: str, listener: Any, raise_errors: bool, limit: int
) -> int:
    """Deliver what is due in one slot; return the number of deliveries."""
    from django_rmq import open_transactions
    from django_rmq.core.consumer.batch_run import call_all
    from django_rmq.observability import announcements

    raised: list[BaseException] = []
    topic = replace(topic, slot_rate=None)  # a test does not wait for a pace
    function = _recorded(open_transactions.isolated(listener.name, listener.function), raised)
    recording = replace(listener, function=announcements.around(topic, function))
    handled, after = 0, None
    while True:
        prepared = broker.run(fetch.prepare(topic, slot, owner, None, listener.batch_size or 1, after=after))
        after = prepared.cursor
        if prepared.status == "more":
            continue
        if prepared.status != "ok":
            return handled
        handled += len(prepared.deliveries)
        # What was taken and is not delivered goes back, or it would stay in flight after the error.
        if handled > limit:
            broker.run(
                ack.release(topic, slot, prepared.receipt, [given.member for given in prepared.deliveries])
            )
            raise RuntimeError(
                f"drain stopped at its limit of deliveries: do listeners of {topic.name} send more messages?"
            )
        messages = _messages(broker, topic, slot, prepared)
        failed = _settle(broker, topic, slot, prepared.receipt, messages, call_all(recording, messages))
        if raise_errors:
            _raise_first(topic, raised, failed)
        for error in raised:
            # ``call_all`` makes a failure of every error, so Ctrl-C would end the listener and not the test.
            if isinstance(error, KeyboardInterrupt):
                raise error
        raised.clear()


def _recorded(function: ListenerFunction, raised: list[BaseException]) -> ListenerFunction:
    """Return a listener that keeps its errors in ``raised``, except for those by which it decides how it ends."""

    def recorded(argument: ListenerArgument) -> object:
        try:
            return function(argument)
        except (Retry, Reject):
            raise
        except Cancelled as error:
            messages = argument if isinstance(argument, list) else [argument]
            if not any(message.cancelled for message in messages):
                raised.append(error)
            raise
        except BaseException as error:
            raised.append(error)
            raise

    return recorded


def _messages(broker: Broker, topic: Topic, slot: int, prepared: Prepared) -> list[Message]:
    """Return what listeners are given."""
    holder = BrokerDeliveryControl(broker)
    return [Message(topic, slot, prepared.receipt, delivery, holder) for delivery in prepared.deliveries]


def _settle(
    broker: Broker,
    topic: Topic,
    slot: int,
    receipt: int,
    messages: Sequence[Message],
    outcomes: Sequence[Failure | None],
) -> list[tuple[Message, Failure]]:
    """Commit and roll back like a consumer; return the failed messages."""
    from django_rmq.observability import announcements

    # A strict fifo topic goes no further than its first failure.
    ended = list(zip(messages, outcomes, strict=False))
    done = [message for message, outcome in ended if outcome is None]
    failed = [(message, outcome) for message, outcome in ended if outcome is not None]
    if done:
        broker.run(ack.commit(topic, slot, receipt, [message.delivery.member for message in done]))
    if failed:
        words = broker.run(ack.rollback(topic, slot, receipt, [failure for _, failure in failed]))
        failed = [(message, each.answered(word)) for (message, each), word in zip(failed, words, strict=True)]
    if behind := [message.delivery.member for message in messages[len(outcomes) :]]:
        broker.run(ack.release(topic, slot, receipt, behind))
    announcements.ended(done, failed)
    return failed


def _raise_first(topic: Topic, raised: list[BaseException], failed: list[tuple[Message, Failure]]) -> None:
    for error in raised:
        raise error
    for message, failure in failed:
        if topic.typed is not None:
            message.body  # noqa: B018 - raises InvalidBody again, if its listener was not called
        if failure.kind == "undecodable":
            raise InvalidMessage(f"a message of topic {topic.name} cannot be decoded: {failure.error}")


class ScheduleState(NamedTuple):
    """What is known about a schedule."""

    next_run: datetime | None
    """When it is due next. None: it is paused, or never due again."""
    last_run: datetime | None
    """When it was due last. None: not yet."""
    is_paused: bool


def start_schedules() -> None:
    """Start the project's schedules in the broker of this test, as a worker does.

    From then on ``drain()`` sends the ticks that are due by the clock of the test, and runs their listeners.
    Raises ``ConfigurationError`` for a schedule that cannot run.
    """
    from django_rmq import schedules
    from django_rmq.worker import listener_registry

    listener_registry.autodiscover()
    schedules.declare()


def schedule_state(name: str) -> ScheduleState:
    """Return when a schedule was and is due. Raises ``UnknownSchedule`` if it was not started, or is not declared."""
    from django_rmq import connections

    broker = connections.get_broker("worker")
    now_ms = broker.now_ms()
    for record in broker.run(read_schedules()):
        if record.name == name:
            return ScheduleState(
                _instant(next_run(record, now_ms)), _instant(record.last_run(now_ms)), record.is_paused
            )
    raise UnknownSchedule(
        f"no schedule {name[:100]!r} is known: start_schedules() starts those of the project"
    )


TICKS = 10_000
"""The maximum number of ticks of one schedule that are sent between two deliveries of ``drain``."""


def send_ticks(broker: Broker) -> None:
    """Send the ticks that are due with a broker in memory. Those of a server are sent by its workers."""
    from django_rmq import schedules

    if not broker.in_memory:
        return
    stepper = schedules.stepper("worker")
    for _ in range(TICKS):
        if stepper.step() > 0:
            return
    now_ms, records = broker.now_ms(), broker.run(read_schedules())
    late = [
        f"{record.name} since {_instant(tick)}"
        for record in records
        if not record.is_paused
        and (tick := next_tick(record.schedule, record.at)) is not None
        and tick <= now_ms
    ]
    raise RuntimeError(
        f"drain stopped after {TICKS:,} ticks. Still due: {', '.join(late)}. Did the clock advance too far?"
    )


def _instant(ms: int | None) -> datetime | None:
    return None if ms is None else datetime.fromtimestamp(ms / 1000, UTC)
