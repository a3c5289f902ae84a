"""``manage.py rmqpause``: stop handing out messages of topics, at run time, in all workers."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import CommandError

from django_rmq.management.rmq_command import RmqCommand, UsageError, one_line, outcomes_text


class Command(RmqCommand):
    """Pause topics."""

    help = (
        "Stop delivering messages of topics until rmqresume. Sends continue. Running listeners finish; "
        "messages that have not begun are given back at once."
    )
    act = "pause"

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("topics", nargs="*", metavar="topic", help="these topics")
        parser.add_argument("--all", action="store_true", help="all topics")
        parser.add_argument("--json", action="store_true", help="print JSON")

    def handle(self, *args: object, **options: Any) -> None:
        if bool(options["topics"]) == options["all"]:
            raise UsageError("name topics, or use --all")
        operations = self.operations()
        topics = self.topics(options["topics"])
        problems = []
        with self.printing_rows(options) as rows:
            for topic in topics:
                run = getattr(operations, self.act)(topic.name)
                progress = self.follow(run, f"{self.act} {topic.name}", options)
                rows.append(
                    {
                        "topic": topic.name,
                        "slots": topic.slots,
                        "outcomes": progress.outcomes,
                        "complete": progress.is_complete,
                    }
                )
                problems += [f"{topic.name} {problem}" for problem in progress.problems]
                if not progress.is_complete:
                    problems.append(f"{topic.name}: stopped after {progress.done} of {topic.slots} slots")
                if not options["json"]:
                    self.stdout.write(f"{topic.name}: {outcomes_text(progress.outcomes)} (slots)")
                if self.ended_early:
                    break
        if self.ended_early:
            raise self.ended_early
        if problems:
            raise CommandError(one_line(f"not everything was done: {problems[0]}"), returncode=1)
