"""``manage.py rmqhealth``: check the health of the queues, for monitoring and container probes."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any

from django.core.management.base import CommandError

from django_rmq.management.rmq_command import RmqCommand, ago, at_least, duration, one_line
from django_rmq.operations.health import (
    DEFAULT_THRESHOLDS,
    USUAL_LIMITS,
    USUAL_UNDRAINED,
    Finding,
    Health,
    Severity,
)

SHOWN = 10
"""How many findings of one check and severity are printed; the others are counted."""

_MARKS = {Severity.BAD: "BAD ", Severity.NOTE: "note", Severity.OK: "ok  "}


class Command(RmqCommand):
    """Check the health of the queues."""

    purpose = "web"

    help = (
        "Check that Redis answers and takes writes, that slots are assigned, that every topic has a live "
        "worker, and that nothing is late. Prints what is wrong first, then notes, which do not change the exit "
        "code; a limit that you give makes what exceeds it a failure. Exits with 0 if healthy, 1 if not (also "
        "while Redis is unavailable), 2 if usage or settings are wrong. An AGE is 90, 15m, 2h or 7d."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("topics", nargs="*", metavar="topic", help="only these (default: all)")
        parser.add_argument(
            "--max-age",
            type=duration,
            metavar="AGE",
            help="fail if a topic's oldest message has been due for longer, or a slot of a priority topic "
            f"has not been empty for longer (default: {_short(USUAL_LIMITS.max_age)}, for slots "
            f"of priority topics {_short(USUAL_UNDRAINED)}; what is paused is a note)",
        )
        parser.add_argument(
            "--max-dead",
            type=at_least(0),
            metavar="N",
            help="fail if more messages of a topic are dead (default: dead messages are a note)",
        )
        parser.add_argument(
            "--max-outbox-age",
            type=duration,
            metavar="AGE",
            help="fail if a message has been in the outbox for longer "
            f"(default: {_short(USUAL_LIMITS.max_outbox_age)})",
        )
        parser.add_argument(
            "--max-schedule-lateness",
            type=duration,
            metavar="AGE",
            help="fail if a schedule is late by more "
            f"(default: {_short(USUAL_LIMITS.max_schedule_lateness)})",
        )
        parser.add_argument(
            "--max-running",
            type=duration,
            metavar="AGE",
            help="fail if a delivery has run for longer, because its listener may hang "
            f"(default: above {_short(USUAL_LIMITS.max_running)} it is a note)",
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
            help="how long slots may be without a worker while workers start and stop (default: 6s)",
        )
        parser.add_argument("--json", action="store_true", help="print all findings as JSON")

    def handle(self, *args: object, **options: Any) -> None:
        given = {name: value for name, value in options.items() if name.startswith("max_")}
        limits = replace(DEFAULT_THRESHOLDS, needs_workers=not options["no_workers"], **given)
        names = [topic.name for topic in self.topics(options["topics"])] if options["topics"] else None
        health = self.operations().health(limits, names, patience=options["patience"])
        if options["json"]:
            self.print_json(
                {"ok": health.is_well, "findings": [finding.as_json() for finding in health.findings]}
            )
        else:
            self.print_lines(self._lines(health, everything=options["verbosity"] > 1))
        if not health.is_well:
            first = health.troubles[0]
            about = f"{first.topic}: " if first.topic else ""
            raise CommandError(
                one_line(
                    f"{len(health.troubles)} of {len(health.findings)} checks failed; {about}{first.text}"
                ),
                returncode=1,
            )

    def _lines(self, health: Health, *, everything: bool) -> Iterator[str]:
        """Yield the findings as lines: the worst ones of each check, what to do, and in one line the topics that are well."""
        documented = set[str]()
        reported = [one for one in health.findings if everything or one.severity or not one.topic]
        for (severity, name), group in groupby(reported, lambda one: (one.severity, one.name)):
            findings = list(group)
            count = len(findings) if everything else SHOWN
            for finding in findings[:count]:
                yield self._line(severity, name, _text(finding))
            if findings[count:]:
                yield self._line(severity, name, f"and {len(findings) - count} more (all: --json or -v 2)")
            for docs in dict.fromkeys(finding.docs for finding in findings if severity):
                if docs not in documented:
                    documented.add(docs)
                    yield f"     {'see':<11}  docs/{docs}"
        topics = {one.topic for one in health.findings if one.topic}
        well = topics - {one.topic for one in health.findings if one.severity}
        if well and not everything:
            yield self._line(
                Severity.OK, "topics", "1 topic is well" if len(well) == 1 else f"{len(well)} topics are well"
            )

    def _line(self, severity: Severity, name: str, text: str) -> str:
        style = {Severity.BAD: self.style.ERROR, Severity.NOTE: self.style.WARNING}
        return f"{style.get(severity, self.style.SUCCESS)(_MARKS[severity])} {name:<11}  {text}"


def _text(finding: Finding) -> str:
    return one_line(f"{finding.topic}: {finding.text}" if finding.topic else finding.text)


def _short(seconds: float | None) -> str:
    """Return a duration as options take it."""
    return ago(seconds).replace(" ", "")
