"""Fails a batch on purpose, from the function that ``foreachBatch`` calls."""

from __future__ import annotations

from collections.abc import Mapping

from django_rmq.core.calls import claims
from django_rmq.core.calls.walk import walk
from django_rmq.exceptions import ConfigurationError
from django_rmq.spark.connection import broker_of, topic_of
from django_rmq.spark.options import STREAM, Options
from django_rmq.spark.patience import Patience


def fail_batch(options: Mapping[str, str]) -> int:
    """Give back the batch that a query is working on, with a retry of each message used; return how many there are.

    ``options`` are those of the stream, with ``consumerId``, which says whose batch it is. Messages rest as
    after a time-out; those without retries left go to Dead. Call it in the function of ``foreachBatch`` and
    return: Spark records the batch, and the query goes on. Until then the batch reads as empty, so call it after
    the last use of the frame.

    Raises ``ConfigurationError`` without ``consumerId``, and ``ServerUnavailable`` after ``patience`` seconds.
    """
    given = Options(options, STREAM, "fail_batch")
    if given.text("consumerId") is None:
        raise ConfigurationError(
            "option consumerId is missing: fail_batch needs the one with which the stream was loaded"
        )
    consumer, name = given.consumer, given.topic()
    broker, patience = broker_of(given), Patience(given.patience, f"topic {name}")

    def give_back() -> int:
        topic = topic_of(name, broker.definitions().of(name))
        slots = range(topic.slots)
        reads = walk(broker, (claims.read_claim(topic, slot, consumer) for slot in slots))
        messages = 0
        for slot, read in zip(slots, reads, strict=True):
            # A claim that is lost already goes back by itself; this continues one whose answer was not received.
            if read.state not in ("sealed", "lost"):
                continue
            messages += read.size
            while broker.run(claims.return_claim(topic, slot, consumer, read.number, spent=True))[1]:
                pass
        return messages

    return patience(give_back)


__all__ = ["fail_batch"]
