"""``manage.py rmqtopics``: compare topics of the settings with those in Redis, apply changes, retire topics."""

from __future__ import annotations

import json
import time
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import CommandError

from django_rmq.core.model.changed_limits import LIMITS, ChangedLimits
from django_rmq.management.rmq_command import (
    Options,
    RmqCommand,
    UsageError,
    duration,
    one_line,
    refuse_beside,
)
from django_rmq.operations import Operations, UndeclaredTopic
from django_rmq.operations import topics as topic_definitions
from django_rmq.operations.topics import Defined

LOOK_SECONDS = 0.5
"""Seconds between two checks of a topic that workers are still emptying."""


NONE = "none"
"""The word for no limit."""


_Row = dict[str, Any]
"""A row as the option --json prints it."""


class Command(RmqCommand):
    """Compare, and with --apply change, the registered definitions; with --retire, end topics that are not declared."""

    help = (
        "Show how the topics in the settings differ from those registered in Redis, and which limits were changed at run "
        "time. Exits with 1 if a difference was not applied, or if a topic that is not in the settings holds messages. "
        "Or change the limits of topics at run time: workers apply them within five seconds."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("topics", nargs="*", metavar="topic", help="only these (default: all)")
        parser.add_argument(
            "--apply",
            action="store_true",
            help="register new topics, and apply the changes that are possible",
        )
        parser.add_argument(
            "--force", action="store_true", help="apply even if running workers would keep the old values"
        )
        parser.add_argument(
            "--retire",
            action="store_true",
            help="remove the named topics, which are not in the settings, from Redis",
        )
        _add_limits(parser)
        parser.add_argument("--move-to", metavar="TOPIC", help="send their waiting messages to this topic")
        parser.add_argument("--delete", action="store_true", help="delete all their messages")
        parser.add_argument(
            "--dead",
            choices=("move", "delete"),
            default="",
            help="with --move-to: move or delete the dead messages",
        )
        parser.add_argument(
            "--wait",
            type=duration,
            default=0.0,
            metavar="TIME",
            help="wait this long for workers to empty the topics (without --move-to or --delete), or to "
            "finish running messages",
        )
        parser.add_argument(
            "--no-input", "--noinput", action="store_false", dest="interactive", help="skip the confirmation"
        )
        parser.add_argument("--json", action="store_true", help="print JSON")

    def handle(self, *args: object, **options: Any) -> None:
        if options["retire"]:
            refuse_beside("--retire", options, "apply", "force", "reset_limits", *LIMITS)
            self._retire(options)
            return
        if options["move_to"] is not None or options["delete"] or options["dead"] or options["wait"]:
            raise UsageError("--move-to, --delete, --dead and --wait require --retire")
        if options["apply"]:
            refuse_beside("--apply", options, "reset_limits", *LIMITS)
        elif options["force"]:
            raise UsageError("--force requires --apply")
        operations, topics = self.operations(), self.topics(options["topics"])
        if self._change_limits(operations, options):
            return
        changed = topic_definitions.changed_limits(operations.broker)
        registered = operations.broker.definitions()
        comparisons = [topic_definitions.compare(topic, registered) for topic in topics]
        if options["apply"]:
            comparisons = [
                topic_definitions.apply(operations.broker, one, force=options["force"]) for one in comparisons
            ]
        stranded = [] if options["topics"] else operations.stranded()
        rows = [_row(one, changed.get(one.topic.name)) for one in comparisons] + [
            _left_row(one, registered[one.topic.name]) for one in stranded
        ]
        if options["json"]:
            self.print_json(rows)
        else:
            self._print(rows)
        problems = []
        if open_ := [one.topic.name for one in comparisons if one.state in ("new", "differs", "unreadable")]:
            advice = "" if options["apply"] else "; use --apply"
            problems.append(f"the settings differ from Redis: {', '.join(open_)}{advice}")
        if holding := [f"{one.topic.name} ({one})" for one in stranded if one.held]:
            problems.append(
                f"topics that are not in the settings hold messages: {'; '.join(holding)}. Declare them again, or use "
                "--retire"
            )
        problems += [f"topic {one.topic.name}: {problem}" for one in stranded for problem in one.problems]
        if problems:
            raise CommandError(one_line(". ".join(problems)), returncode=1)

    def _change_limits(self, operations: Operations, options: Options) -> bool:
        """Change or reset limits of the named topics, and return whether that was asked for."""
        values = {name: options[name] for name in LIMITS if options[name] is not None}
        if not values and not options["reset_limits"]:
            return False
        if not options["topics"] or (values and options["reset_limits"]):
            raise UsageError("name the topics whose limits change, and give new limits or --reset-limits")
        with self.printing_rows(options) as rows:
            for name in options["topics"]:
                if values:
                    changes = {limit: None if value == NONE else value for limit, value in values.items()}
                    limits = operations.change_limits(name, changes)
                else:
                    limits = operations.reset_limits(name)
                text = ", ".join(f"{limit} {_limit(getattr(limits.topic, limit))}" for limit in LIMITS)
                rows.append({"topic": name, **{limit: getattr(limits.topic, limit) for limit in LIMITS}})
                if not options["json"]:
                    self.stdout.write(f"{name}: {text}; workers apply this within five seconds")
        return True

    def _retire(self, options: Options) -> None:
        operations, until = self.operations(), time.monotonic() + options["wait"]
        if not options["topics"]:
            raise UsageError("name the topics to retire")
        for name in options["topics"]:
            stranded = self._waited_for(name, until, is_drained=not (options["move_to"] or options["delete"]))
            # It refuses what cannot be done before anybody is asked.
            run = operations.retire(
                name, to=options["move_to"], delete=options["delete"], dead=options["dead"]
            )
            if options["delete"] and stranded.held:
                question = f"{stranded.held} messages of {name} ({stranded}) will be deleted permanently."
                self.confirm(question, name, options)
            elif options["dead"] == "delete" and stranded.dead:
                question = f"{stranded.dead} dead messages of {name} will be deleted permanently."
                self.confirm(question, name, options)
            progress = self.follow(run, f"retire {name}", options)
            self.print_outcomes(name, progress, options)
            if not progress.is_complete:
                raise CommandError(
                    f"{name} still holds messages that {options['move_to']} refused: see the counts above",
                    returncode=1,
                )

    def _waited_for(self, name: str, until: float, *, is_drained: bool) -> UndeclaredTopic:
        """Return the contents of a topic as soon as nothing is in flight (``is_drained``: nothing at all) or the time is up."""
        operations = self.operations()
        while True:
            stranded = operations.find_stranded(name)
            if not (stranded.held if is_drained else stranded.in_flight) or time.monotonic() >= until:
                return stranded
            time.sleep(LOOK_SECONDS)

    def _print(self, rows: list[_Row]) -> None:
        width = max((len(row["topic"]) for row in rows), default=0)
        for row in rows:
            definition = row["declared"] or row["registered"]
            kind = definition.get("type", "unknown type")
            holds = f", {row['holds']} messages" if "holds" in row else ""
            self.stdout.write(
                f"{row['topic']:<{width}}  {row['state']:<10}  {kind}, {definition['slots']} slots{holds}"
            )
            for difference in row["differences"]:
                self.stdout.write(
                    f"  {difference['setting']}: {json.dumps(difference['declared'])} in the settings, "
                    f"{json.dumps(difference['registered'])} in Redis"
                )
            if row["changed_limits"]:
                limits_text = ", ".join(
                    f"{name} {_limit(value)}" for name, value in row["changed_limits"].items()
                )
                self.stdout.write(f"  changed at run time: {limits_text}")
            for obstacle in row["obstacles"]:
                self.stdout.write(self.style.WARNING(f"  not applied: {obstacle}"))


def _add_limits(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--max-rate",
        type=limit,
        metavar="RATE",
        help="change the messages per second of the named topics at run time; none: no limit",
    )
    parser.add_argument(
        "--max-in-flight",
        type=limit,
        metavar="N",
        help="change the number of messages in flight of the named topics at run time; none: no limit",
    )
    parser.add_argument(
        "--reset-limits", action="store_true", help="return the named topics to the limits of their settings"
    )


def limit(text: str) -> float | int | str:
    """Return a limit of the command line, or ``NONE``. Whether it is within its bounds, the operation decides."""
    if text == NONE:
        return text
    return int(text) if text.isdecimal() else float(text)


def _limit(value: float | None) -> str:
    return NONE if value is None else f"{value:.9g}"


def _row(defined: Defined, changed: ChangedLimits | None) -> _Row:
    return {
        "topic": defined.topic.name,
        "state": defined.state,
        "declared": defined.topic.definition(),
        "registered": defined.registered,
        "differences": [difference._asdict() for difference in defined.differences],
        "changed_limits": dict(changed.values) if changed is not None else None,
        "obstacles": defined.obstacles,
    }


def _left_row(undeclared: UndeclaredTopic, registered: dict[str, object]) -> _Row:
    row = _row(Defined(undeclared.topic, "undeclared", registered), None)
    return {**row, "declared": None, "holds": undeclared.held, "problems": list(undeclared.problems)}
