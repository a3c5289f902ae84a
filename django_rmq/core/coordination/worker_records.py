"""The records by which workers know each other: a token and compact JSON, as each coordinator stores them.

Where they are stored is the subject of the coordinators. What a worker reports about its work is in ``model.worker_report``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache

from django_rmq.core.coordination import Member, Worker
from django_rmq.core.coordination.assignment import TopicSlots
from django_rmq.core.model.bounds import OTHER_FORM
from django_rmq.core.model.replies import Roster


def write_record(token: str, worker: Worker) -> str:
    """Return a record for ``read_record``. It begins with the token, which separates workers with the same id."""
    fields = {
        "host": worker.host,
        "pid": worker.pid,
        "started": worker.started,
        "threads": worker.threads,
        **({"full": sorted(worker.full)} if worker.full else {}),
        "topics": {topic.name: [topic.slots, int(topic.serial)] for topic in worker.topics},
    }
    return f"{token} {json.dumps(fields, separators=(',', ':'))}"


def read_record(worker: str, record: bytes) -> Worker:
    """Return the worker of this record. Raises ``ValueError`` for anything else."""
    head, _, topics = record.partition(b" ")[2].partition(_TOPICS)
    try:
        fields = json.loads(head + b"}")
        return Worker(
            worker,
            str(fields["host"]),
            int(fields["pid"]),
            float(fields["started"]),
            max(1, int(fields["threads"])),
            _read_topics(topics),
            frozenset(map(str, fields.get("full", ()))),
        )
    except OTHER_FORM as error:
        raise ValueError(f"unreadable record of worker {worker}: {record[:100]!r}") from error


_TOPICS = b',"topics":'
"""The text before the topics in a record. They are its last part, and most of it. No text in JSON contains these quotes."""


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


def read_workers(
    records: Mapping[str, bytes], complain: Callable[[str, str, Exception], None]
) -> dict[str, Worker]:
    """Return the workers whose records can be read, in the order of their ids."""
    live_workers = {}
    for worker, record in sorted(records.items()):
        try:
            live_workers[worker] = read_record(worker, record)
        except ValueError as error:
            # A foreign program or another version wrote the record. The other workers still get their slots.
            complain(
                f"worker/{worker}", "A worker's record cannot be read, so the worker gets no slots: %s", error
            )
    return live_workers


def members_of_roster(roster: Roster) -> list[Member]:
    """Return the workers of a roster whose sessions are active, by id."""
    members = []
    for worker, ends_ms, record in roster.sessions:
        try:
            members.append(Member(read_record(worker, record), (ends_ms - roster.now_ms) / 1000))
        except ValueError:
            # A foreign program wrote the record; the other workers are still listed.
            continue
    return sorted((one for one in members if one.session_left > 0), key=lambda one: one.worker.id)
