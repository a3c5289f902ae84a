"""A worker's record for the other workers, as a token and compact JSON, and the topics that a crew shares out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from django_rmq.core.coordination import TopicSlots, Worker
from django_rmq.core.model.topic import slot_counts


def write_record(token: str, worker: Worker) -> str:
    """Return a record for ``read_record``. It begins with the token, which separates workers with the same id."""
    said = {
        "host": worker.host,
        "pid": worker.pid,
        "started": worker.started,
        "threads": worker.threads,
        **({"full": sorted(worker.full)} if worker.full else {}),
        "topics": {topic.name: [topic.slots, int(topic.serial)] for topic in worker.topics},
    }
    return f"{token} {json.dumps(said, separators=(',', ':'))}"


def read_record(worker: str, record: bytes) -> Worker:
    """Return the worker of this record. Raises ``ValueError`` for anything else."""
    said, _, topics = record.partition(b" ")[2].rpartition(_TOPICS)
    try:
        found = json.loads(said + b"}")
        return Worker(
            worker,
            str(found["host"]),
            int(found["pid"]),
            float(found["started"]),
            max(1, int(found["threads"])),
            _read_topics(topics),
            frozenset(map(str, found.get("full", ()))),
        )
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"unreadable record of worker {worker}: {record[:100]!r}") from error


_TOPICS = b',"topics":'
"""The text before the topics in a record. They are its last part, and most of it."""


@lru_cache(maxsize=64)
def _read_topics(text: bytes) -> tuple[TopicSlots, ...]:
    """Return the topics at the end of a record. Workers with the same text share one object."""
    return tuple(
        sorted(
            TopicSlots(name, max(1, int(slots)), bool(serial))
            for name, (slots, serial) in json.loads(text.removesuffix(b"}")).items()
        )
    )


def whose(record: bytes) -> str:
    """Return host and pid of a worker, as far as its record shows them."""
    try:
        worker = read_record("", record)
    except ValueError:
        return "process unknown"
    return f"process {worker.pid} on {worker.host}"


def served_topics(
    crew: Mapping[str, Worker], registered: Mapping[str, Mapping[str, Any]]
) -> list[TopicSlots]:
    """Return the topics that a crew (by id) serves, as registered, otherwise as the first worker has them."""
    said: dict[str, TopicSlots] = {}
    for _, worker in sorted(crew.items()):
        for topic in worker.topics:
            said.setdefault(topic.name, topic)
    for name, topic in said.items():
        found = registered.get(name, {})
        # While it is being re-slotted, workers serve both old and new slots.
        counts: tuple[Any, ...] = slot_counts({"slots": topic.slots, **found})
        if all(isinstance(slots, int) and slots > 0 for slots in counts):
            said[name] = TopicSlots(name, max(counts), bool(found.get("serial", topic.serial)))
    return list(said.values())


def read_crew(
    records: Mapping[str, bytes], complain: Callable[[str, str, Exception], None]
) -> dict[str, Worker]:
    """Return the workers whose records can be read."""
    crew = {}
    for worker, record in records.items():
        try:
            crew[worker] = read_record(worker, record)
        except ValueError as error:
            complain(
                f"worker/{worker}", "A worker's record cannot be read, so the worker gets no slots: %s", error
            )
    return crew


__all__ = ["read_record", "served_topics", "whose", "write_record"]
