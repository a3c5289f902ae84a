"""Counters of messages that have passed through topics; the difference of two readings gives rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

from django_rmq.core.commands import inspect
from django_rmq.core.commands.broker_interface import Broker, run_all
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import RmqError, ServerTrouble
from django_rmq.operations.topic_stats import slots_to_look_at


@dataclass(frozen=True, slots=True)
class TopicCounters:
    """Counters of messages that have passed through topics until an instant; two of them give rates."""

    RATES: ClassVar[tuple[str, ...]] = ("sent", "done", "failed")
    """sent: taken from senders, including merged ones. done: committed and acknowledged. failed: failed or
    timed out."""

    now_ms: int
    counted: dict[str, dict[str, int]]
    """Topic → name in ``RATES`` → total number."""
    problems: tuple[str, ...] = ()
    """Slots whose counters cannot be read, and the reasons; they are not in the sums."""

    def since(self, before: TopicCounters) -> dict[str, dict[str, float]]:
        """Return topic → name → number per second since the earlier reading."""
        seconds = max(self.now_ms - before.now_ms, 1) / 1000
        return {
            topic: {
                name: max(0, count - before.counted[topic][name]) / seconds for name, count in now.items()
            }
            for topic, now in self.counted.items()
            if topic in before.counted
        }


_COUNTERS = {
    "sent": ("sent",),
    "done": ("committed", "acked"),
    "failed": ("failed", "expired", "rejected"),
}


def flow(broker: Broker, topics: Sequence[Topic]) -> TopicCounters:
    """Return the counters of ``topics``; those with very many slots are left out."""
    looked_at = slots_to_look_at(topics)
    small = [topic for topic in topics if len(looked_at[topic.name]) == topic.slots]
    now_ms = broker.now_ms()
    calls = [inspect.audit(topic, slot) for topic in small for slot in looked_at[topic.name]]
    answers = iter(run_all(broker, calls))
    counted, problems = {}, []
    for topic in small:
        totals = counted[topic.name] = dict.fromkeys(TopicCounters.RATES, 0)
        for slot, answer in enumerate(islice(answers, topic.slots)):
            if isinstance(answer, ServerTrouble):
                raise answer
            if isinstance(answer, RmqError):
                problems.append(f"topic {topic.name}, slot {slot}: {answer}")
            else:
                for name, counters in _COUNTERS.items():
                    totals[name] += sum(answer[counter] for counter in counters)
    return TopicCounters(now_ms, counted, tuple(problems))


__all__ = ["TopicCounters", "flow"]
