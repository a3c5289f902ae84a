"""The calls by which a listener extends its delivery and reports progress, as the ``DeliveryControl`` of its messages."""

from __future__ import annotations

from django_rmq.core.commands import ack
from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.model.message import Message


class BrokerDeliveryControl:
    """Extends deliveries and reports their progress, by calls of their own."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def extend(self, message: Message) -> bool:
        """Restart the time-out, and note on the message if it was cancelled; return False if the delivery has ended."""
        member = message.delivery.member
        [word] = self._broker.run(ack.extend(message.topic, message.slot, message.receipt, [member]))
        if word == "cancelled":
            message.stopped = "cancelled"
        return word != "stale"

    def report(self, message: Message, thousandths: int, text: bytes) -> bool:
        """Note the progress; return False if the delivery has ended."""
        member = message.delivery.member
        call = ack.progress(message.topic, message.slot, message.receipt, member, thousandths, text)
        return self._broker.run(call) == "ok"
