"""What a listener can say about the delivery that it holds."""

from __future__ import annotations

from django_rmq.core.calls import ending
from django_rmq.core.calls.broker import Broker
from django_rmq.core.words.messages import Message


class BrokerHolder:
    """Extends deliveries and reports their progress, by calls of their own."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def extend(self, message: Message) -> bool:
        """Restart the time-out, and note on the message if it was cancelled. False: the delivery has ended."""
        member = message.delivery.member
        [word] = self._broker.run(ending.extend(message.topic, message.slot, message.receipt, [member]))
        if word == "cancelled":
            message.stopped = "cancelled"
        return word != "stale"

    def report(self, message: Message, thousandths: int, text: bytes) -> bool:
        """Note the progress. False: the delivery has ended."""
        member = message.delivery.member
        call = ending.progress(message.topic, message.slot, message.receipt, member, thousandths, text)
        return self._broker.run(call) == "ok"
