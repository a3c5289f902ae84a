"""``manage.py rmqaudit``: check the ledgers of a live system (see ``docs/state_machine.md``, the ledger)."""

from __future__ import annotations

from argparse import ArgumentParser
from dataclasses import asdict
from typing import Any

from django.core.management.base import CommandError

from django_rmq.core.model.keys import Definitions
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import RmqError, ServerTrouble
from django_rmq.management.rmq_command import Options, RmqCommand, UsageError, ago, one_line
from django_rmq.operations import Operations
from django_rmq.operations.topic_audit import DRIFTS, Audit, audit, check_is_settled, find_strays, overdue

UNDRAINED_SECONDS = 60.0
"""Seconds below which a slot with waiting messages is not listed."""

MANY_CONSUMERS = 500
"""From how many Spark consumers in one slot on the text names their number; JSON always does."""


_Row = dict[str, Any]
"""A row as the option --json prints it."""


class Command(RmqCommand):
    """Read every slot's ledger; with --adopt, record foreign messages."""

    help = (
        "Check that the ledger of every slot balances: messages in = messages out + messages held. Only "
        "reads. Exits with 1 on any drift: above zero, another program "
        "added messages; below zero, messages are lost; also if a topic cannot be read. Also reports how long "
        "the oldest message has been due. --strays also finds records without a message, and messages in the "
        "wrong slot."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("topics", nargs="*", metavar="topic", help="only these (default: all)")
        parser.add_argument("--json", action="store_true", help="print JSON")
        parser.add_argument(
            "--adopt",
            action="store_true",
            help="record messages that the ledger does not know (positive live drift) as foreign",
        )

        parser.add_argument(
            "--strays",
            action="store_true",
            help="check all records and all waiting messages; exits with 1 if any stray is left",
        )
        parser.add_argument(
            "--repair",
            action="store_true",
            help="with --strays: delete loose records, and send misplaced messages to their own slots",
        )
        parser.add_argument(
            "--dry-run", action="store_true", help="change nothing, whatever the other options are"
        )

    def handle(self, *args: object, **options: Any) -> None:
        if options["repair"] and not options["strays"]:
            raise UsageError("--repair requires --strays")
        if options["dry_run"]:
            options["adopt"] = options["repair"] = False
        operations = self.operations()
        registered = operations.broker.definitions()
        rows = [
            self._audited(operations, topic, registered, options) for topic in self.topics(options["topics"])
        ]
        if options["json"]:
            self.print_json(rows)
        else:
            self._print(rows)
        if drifting := [row for row in rows if row.get("drifting")]:
            slots = sum(len(row["drifting"]) for row in drifting)
            names = ", ".join(row["topic"] for row in drifting)
            raise CommandError(f"{slots} slots do not balance, in {names}", returncode=1)
        if unread := [row["topic"] for row in rows if row["problem"]]:
            raise CommandError(f"not all could be read, in {', '.join(unread)}", returncode=1)
        if strays := sum(row["strays"]["left"] for row in rows if "strays" in row):
            raise CommandError(f"{strays} strays are left; use --repair", returncode=1)

    def _audited(
        self, operations: Operations, topic: Topic, registered: Definitions, options: Options
    ) -> _Row:
        """Return the row of a topic. A key that another program has written hides no other topic."""
        broker = operations.broker
        try:
            definition = registered.of(topic.name) or {}
            if options["strays"]:
                check_is_settled(topic, definition)
            topic_audit = audit(broker, topic, definition, adopt=options["adopt"])
            row = _row(topic_audit) | asdict(overdue(broker, topic_audit.topic))
            if options["strays"]:
                *_, strays = find_strays(broker, topic_audit.topic, repair=options["repair"])
                row["strays"] = {
                    "loose": dict(strays.loose),
                    "misplaced": strays.misplaced,
                    "mended": strays.mended,
                    "left": strays.found - strays.mended + len(strays.problems),
                    "problems": strays.problems,
                }
            return row
        except RmqError as error:
            if isinstance(error, ServerTrouble):
                raise
            return {"topic": topic.name, "problem": str(error)}

    def _print(self, rows: list[_Row]) -> None:
        for row in rows:
            if row["problem"]:
                self.stdout.write(f"{row['topic']}: {self.style.ERROR(one_line(row['problem']))}")
                continue
            balance = self.style.ERROR("DRIFT") if row["drifting"] else self.style.SUCCESS("balanced")
            held = ", ".join(f"{name} {value}" for name, value in row["depths"].items() if value) or "empty"
            adopted = f", {row['adopted']} adopted as foreign" if row["adopted"] else ""
            moving = f", {row['moving']} between slots" if row["moving"] else ""
            self.stdout.write(
                f"{row['topic']}: {balance} over {row['slots']} slots ({held}{moving}{adopted})"
            )
            for drift in row["drifting"]:
                drifts = ", ".join(f"{name} {drift[name]:+d}" for name in DRIFTS if drift[name])
                self.stdout.write(f"  slot {drift['slot']}: {drifts}")
            if row["oldest_due_seconds"] is not None:
                self.stdout.write(
                    f"  overdue: the oldest for {ago(row['oldest_due_seconds'])}, in slot {row['oldest_due_slot']}"
                )
            if row["undrained_seconds"] is not None and row["undrained_seconds"] >= UNDRAINED_SECONDS:
                self.stdout.write(
                    f"  slot {row['undrained_slot']} has not been drained for {ago(row['undrained_seconds'])}"
                )
            if row["overdue_deliveries"]:
                self.stdout.write(
                    f"  overdue: {row['overdue_deliveries']} deliveries are past their time-out; no worker is running"
                )
            if row["consumers"] >= MANY_CONSUMERS:
                self.stdout.write(
                    f"  {row['consumers']} Spark consumers are remembered in one slot; above 1000 the oldest are forgotten. "
                    "Give queries that run again and again a checkpoint or a consumerId that stays"
                )
            self._print_strays(row.get("strays"))

    def _print_strays(self, strays: _Row | None) -> None:
        if strays is None:
            return
        loose = ", ".join(f"{kind} {count}" for kind, count in strays["loose"].items() if count)
        if loose:
            self.stdout.write(f"  stray: records that belong to no message ({loose})")
        if strays["misplaced"]:
            self.stdout.write(f"  stray: {strays['misplaced']} messages are in the wrong slot")
        if strays["mended"]:
            self.stdout.write(self.style.SUCCESS(f"  repaired: {strays['mended']}"))
        for problem in strays["problems"]:
            self.stdout.write(self.style.WARNING(f"  {one_line(problem)}"))


def _row(audit: Audit) -> _Row:
    return {
        "topic": audit.topic.name,
        "problem": "",
        "slots": audit.topic.slots,
        "counters": audit.counters,
        "depths": audit.depths,
        "drifting": audit.drifting,
        "moving": audit.moving,
        "adopted": audit.adopted,
    }
