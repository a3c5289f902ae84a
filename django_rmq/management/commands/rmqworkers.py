"""``manage.py rmqworkers``: the live workers and their assignments."""

from __future__ import annotations

import time
from argparse import ArgumentParser
from typing import Any

from django_rmq.management import RmqCommand, ago, one_line, table
from django_rmq.operations import WorkerStats


class Command(RmqCommand):
    """List the live workers."""

    help = "List the live worker processes: host, process id, threads, uptime, and how many slots of each topic they have."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true", help="print JSON")

    def handle(self, *args: Any, **options: Any) -> None:
        workers = self.operations().workers()
        if options["json"]:
            self.print_json([_row(one) for one in workers])
            return
        if not workers:
            self.stdout.write("no live worker")
            return
        rows = [("worker", "host", "pid", "threads", "up", "slots")]
        for one in workers:
            worker = one.member.worker
            slots = [f"{topic} {count}" for topic, count in sorted(one.slots.items())]
            slots += [f"{topic} shared" for topic in one.shared]
            rows.append(
                (
                    one_line(worker.id)[:8],
                    one_line(worker.host),
                    str(worker.pid),
                    str(worker.threads),
                    ago(max(0.0, time.time() - worker.started)),
                    (", ".join(map(one_line, slots)) or "none") + _full(one),
                )
            )
        for line in table(rows, right=(2, 3)):
            self.stdout.write(line)


def _full(one: WorkerStats) -> str:
    """Return a remark about topics for which a worker has no free thread."""
    topics = ", ".join(map(one_line, sorted(one.member.worker.full)))
    return f" (no free thread for {topics})" if topics else ""


def _row(one: WorkerStats) -> dict[str, Any]:
    worker = one.member.worker
    return {
        "worker": worker.id,
        "host": worker.host,
        "pid": worker.pid,
        "threads": worker.threads,
        "started": worker.started,
        "session_left": one.member.session_left,
        "topics": [topic.name for topic in worker.topics],
        "slots": one.slots,
        "shared": list(one.shared),
        "full": sorted(worker.full),
    }
