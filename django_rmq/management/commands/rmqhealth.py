"""``manage.py rmqhealth``: check the health of the queues, for monitoring and container probes."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import CommandError

from django_rmq.management import RmqCommand, at_least, duration, shown
from django_rmq.operations.health import Limits


class Command(RmqCommand):
    """Check the health of the queues."""

    help = (
        "Check that Redis answers, that slots are assigned to the workers, and that every topic has a "
        "live worker. With limits, also check how long messages have been due or in the outbox, and how many are dead. "
        "Exits with 0 if healthy, 1 if not (also while Redis is unavailable), 2 if usage or settings are "
        "wrong."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("topics", nargs="*", metavar="topic", help="only these (default: all)")
        parser.add_argument(
            "--max-age",
            type=duration,
            metavar="AGE",
            help="fail if a topic's oldest message has been due for longer, or a slot of a priority topic "
            "has not been empty for longer: 90, 15m, 2h or 7d",
        )
        parser.add_argument(
            "--max-dead", type=at_least(0), metavar="N", help="fail if more messages of a topic are dead"
        )
        parser.add_argument(
            "--max-outbox-age",
            type=duration,
            metavar="AGE",
            help="fail if a message has been in the outbox for longer: 90, 15m, 2h or 7d",
        )
        parser.add_argument(
            "--max-schedule-lateness",
            type=duration,
            metavar="AGE",
            help="fail if a schedule is late by more: 90, 15m, 2h or 7d",
        )
        parser.add_argument(
            "--no-workers",
            action="store_true",
            help="do not check for live workers, which run only sometimes",
        )
        parser.add_argument(
            "--patience",
            type=duration,
            default=6.0,
            metavar="TIME",
            help="how long slots may be without a worker while workers start and stop (default: 6 s)",
        )
        parser.add_argument("--json", action="store_true", help="print JSON")

    def handle(self, *args: Any, **options: Any) -> None:
        limits = Limits(
            options["max_age"],
            options["max_dead"],
            not options["no_workers"],
            options["max_outbox_age"],
            options["max_schedule_lateness"],
        )
        names = [topic.name for topic in self.topics(options["topics"])]
        health = self.operations().health(limits, names, patience=options["patience"])
        if options["json"]:
            self.print_json(
                {"ok": health.is_well, "findings": [finding.as_json() for finding in health.findings]}
            )
        else:
            for finding in health.findings:
                mark = self.style.SUCCESS("ok  ") if finding.is_well else self.style.ERROR("BAD ")
                about = f"{finding.topic}: " if finding.topic else ""
                self.stdout.write(f"{mark} {finding.name:<11}  {about}{shown(finding.text)}")
        if not health.is_well:
            first = health.troubles[0]
            about = f"{first.topic}: " if first.topic else ""
            raise CommandError(
                shown(f"{len(health.troubles)} of {len(health.findings)} checks failed; {about}{first.text}"),
                returncode=1,
            )
