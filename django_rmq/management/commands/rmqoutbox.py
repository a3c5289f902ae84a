"""``manage.py rmqoutbox``: what waits in the outbox, the relay that sends it, and the rows that were refused."""

from __future__ import annotations

import time
from argparse import ArgumentParser
from dataclasses import asdict
from queue import SimpleQueue
from typing import Any

from django.core.management.base import CommandError

from django_rmq.management.rmq_command import (
    Options,
    RmqCommand,
    UsageError,
    ago,
    at_least,
    ended_by_signals,
    one_line,
    outcomes_text,
    seconds_of,
)
from django_rmq.operations import OutboxRow

END_SECONDS = 10.0
"""Seconds for which --watch waits at its end for the step that each database is in."""


class Command(RmqCommand):
    """Look after the outbox."""

    help = (
        "Show how many messages wait in the outbox of each topic. --once sends what is due, says what is left and ends, --watch "
        "continues until SIGTERM or Ctrl-C; every worker does the same, so this is for projects without one. "
        "--list shows single rows, --retry and --delete take their ids."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("topics", nargs="*", metavar="topic", help="only these (default: all)")
        group = parser.add_mutually_exclusive_group()
        group.add_argument(
            "--once", action="store_true", help="send what is due in all topics, then say what is left"
        )
        group.add_argument("--watch", action="store_true", help="send what is due until SIGTERM or Ctrl-C")
        group.add_argument("--list", action="store_true", help="list rows, oldest first")
        group.add_argument("--retry", nargs="+", metavar="ID", help="have these rows sent at once")
        group.add_argument("--delete", nargs="+", metavar="ID", help="delete these rows; they are never sent")
        parser.add_argument("--refused", action="store_true", help="with --list: only rows that were refused")
        parser.add_argument(
            "--limit",
            type=at_least(1),
            default=100,
            metavar="N",
            help="with --list: at most N (default: 100)",
        )
        parser.add_argument("--json", action="store_true", help="print JSON")

    def handle(self, *args: object, **options: Any) -> None:
        for name in ("once", "watch", "retry", "delete"):
            if options["topics"] and options[name]:
                raise UsageError(
                    f"--{name} takes no topics: it is about all of them, or about rows by their ids"
                )
        if options["refused"] and not options["list"]:
            raise UsageError("--refused requires --list")
        if options["once"]:
            self._relay_once(options)
        elif options["watch"]:
            self._watch()
        elif options["list"]:
            self._list(options)
        elif options["retry"] or options["delete"]:
            self._act(options)
        else:
            self._show(options)

    def _relay_once(self, options: Options) -> None:
        operations, counts = self.operations(), dict.fromkeys(("sent", "failed", "waiting", "refused"), 0)
        steps, problems = operations.relay_outbox()
        for step in steps:
            counts["sent"] += step.sent
            counts["failed"] += step.failed
        topics, silent = operations.outbox_as_known()
        for one in topics:
            counts["waiting"] += one.messages
            counts["refused"] += one.refused
        sentence = "outbox: {sent} sent, {failed} failed; {waiting} rows still wait, {refused} are refused"
        self.print_answer(counts, sentence.format_map(counts), options)
        self._require_answers(problems or silent)
        if counts["failed"]:
            raise CommandError(
                f"{counts['failed']} messages could not be sent; see rmqoutbox --list", returncode=1
            )

    def _watch(self) -> None:
        # A signal may come while this thread begins to wait. An event's own lock would then be held, and its setting never end.
        signals: SimpleQueue[int] = SimpleQueue()
        threads = self.operations().relay_duties()
        for thread in threads:
            thread.start()
        with ended_by_signals(lambda number, _: signals.put(number)):
            signals.get()
        for thread in threads:
            thread.stop()
        # A database that does not answer may keep its thread, and none of the others.
        until = time.monotonic() + END_SECONDS
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _list(self, options: Options) -> None:
        rows, problems = self.operations().outbox_rows(
            options["topics"] or None, refused=options["refused"] or None, limit=options["limit"]
        )
        if options["json"]:
            self.print_json([_row(one) for one in rows])
        else:
            self._write_rows(rows)
        self._require_answers(problems)

    def _write_rows(self, outbox_rows: list[OutboxRow]) -> None:
        now = time.time()
        rows = [("id", "topic", "action", "sent", "attempts", "state", "error")]
        for one in outbox_rows:
            state = "refused" if one.is_refused else "waits"
            sent = f"{ago(max(0.0, now - one.sent_ms / 1000))} ago"
            rows.append(
                (one.id, one.topic, one.act, sent, str(one.attempts), state, one_line(one.error)[:100])
            )
        self.print_table(rows, right=(4,))

    def _require_answers(self, problems: list[str]) -> None:
        """Raise ``CommandError`` if a database did not answer; what the others said was printed."""
        if problems:
            raise CommandError(one_line("; ".join(problems)), returncode=3)

    def _act(self, options: Options) -> None:
        operations = self.operations()
        if options["retry"]:
            outcomes = operations.retry_outbox(options["retry"])
        else:
            outcomes = operations.delete_outbox(options["delete"])
        self.print_answer(outcomes, f"outbox: {outcomes_text(outcomes)}", options)

    def _show(self, options: Options) -> None:
        waiting, problems = self.operations().outbox_as_known(options["topics"] or None)
        if options["json"]:
            self.print_json([asdict(one) for one in waiting])
        elif waiting:
            rows = [("topic", "waiting", "oldest", "refused")]
            for one in waiting:
                oldest = ago(seconds_of(one.oldest_ms))
                rows.append((one.topic, str(one.messages), oldest, str(one.refused)))
            self.print_table(rows, right=(1, 2, 3))
        elif not problems:
            self.stdout.write("the outbox is empty")
        self._require_answers(problems)


def _row(one: OutboxRow) -> dict[str, object]:
    return {
        "id": one.id,
        "topic": one.topic,
        "action": one.act,
        "sent_ms": one.sent_ms,
        "due_ms": one.due_ms,
        "attempts": one.attempts,
        "refused": one.is_refused,
        "error": one.error,
        "failed_ms": one.failed_ms,
        "size": one.size,
    }
