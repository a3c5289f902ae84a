"""``manage.py rmqworkers``: the live workers and their assignments, and requests to workers."""

from __future__ import annotations

import time
from argparse import ArgumentParser
from typing import Any, get_args

from django_rmq.core.model.stored_actions import ActionProgress
from django_rmq.core.model.worker_report import WorkerRequest
from django_rmq.management.rmq_command import (
    Options,
    RmqCommand,
    action_as_json,
    ago,
    one_line,
    outcomes_text,
)
from django_rmq.operations import Operations, WorkerStats


class Command(RmqCommand):
    """List the live workers, or ask some of them for something."""

    help = (
        "List the live worker processes: host, process id, threads, uptime, and how many slots of each topic they have. "
        "Or ask workers, named by the ids of that list, to be quiet, to resume or to stop: they obey within five seconds. "
        "Or list the actions that workers do in the background, or stop one."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true", help="print JSON")
        group = parser.add_mutually_exclusive_group()
        group.add_argument(
            "--quiet", nargs="+", metavar="WORKER", help="take no more messages, and continue those that run"
        )
        group.add_argument("--resume", nargs="+", metavar="WORKER", help="take messages again")
        group.add_argument(
            "--stop",
            nargs="+",
            metavar="WORKER",
            help="end the command with all its processes, as SIGTERM does: running listeners may finish",
        )

        group.add_argument("--actions", action="store_true", help="list the actions in the background")
        group.add_argument("--stop-action", metavar="ID", help="stop an action in the background")

    def handle(self, *args: object, **options: Any) -> None:
        operations = self.operations()
        if options["stop_action"] is not None:
            stopped, now_ms = operations.stop_action(options["stop_action"]), operations.broker.now_ms()
            self.print_answer(action_as_json(stopped, now_ms), _action(stopped, now_ms), options)
            return
        if options["actions"]:
            actions, now_ms = operations.background_actions(), operations.broker.now_ms()
            if options["json"]:
                self.print_json([action_as_json(action, now_ms) for action in actions])
            else:
                self.print_lines(_action(action, now_ms) for action in actions)
            return
        for request in get_args(WorkerRequest):
            if options[request] is not None:
                self._ask(operations, request, options)
                return
        overviews = operations.worker_overview().workers
        workers = [one.stats for one in overviews]
        states = {one.stats.member.worker.id: one.report.state for one in overviews if one.report}
        if options["json"]:
            self.print_json([{**_row(one), "state": states.get(one.member.worker.id)} for one in workers])
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
                    (", ".join(map(one_line, slots)) or "none")
                    + _full(one)
                    + (f" ({states[worker.id]})" if states.get(worker.id) in ("quiet", "stopping") else ""),
                )
            )
        self.print_table(rows, right=(2, 3))

    def _ask(self, operations: Operations, request: WorkerRequest, options: Options) -> None:
        with self.printing_rows(options) as rows:
            for name in options[request]:
                rows.append({"worker": operations.ask_worker(name, request), "asked": request})
                if not options["json"]:
                    self.stdout.write(f"{rows[-1]['worker']}: asked to {request}")


def _action(one: ActionProgress, now_ms: int) -> str:
    action, seconds = one.action, one.seconds_left(now_ms)
    counted = (
        f"{one.done} of {action.total}" if action.is_exact else f"{one.done} ({action.total} are searched)"
    )
    more = f", {ago(seconds)} left" if seconds is not None else ""
    return one_line(
        f"{action.id}: {action.kind} of {action.topic} ({action.described}) by {action.by}: "
        f"{one.state(now_ms)}, {counted}: {outcomes_text(one.outcomes)}{more}"
        + (f"; {one.problem}" if one.problem else "")
    )


def _full(one: WorkerStats) -> str:
    """Return a remark about topics for which a worker has no free thread."""
    topics = ", ".join(map(one_line, sorted(one.member.worker.full)))
    return f" (no free thread for {topics})" if topics else ""


def _row(one: WorkerStats) -> dict[str, object]:
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
