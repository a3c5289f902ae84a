"""``manage.py rmqtopics``: what the settings declare of each topic, what Redis has registered, and applying it."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import CommandError

from django_rmq import definitions
from django_rmq.conf import get_config
from django_rmq.connections import get_broker
from django_rmq.management import RmqCommand
from django_rmq.operations.figures import serving


class Command(RmqCommand):
    """Compare, and with --apply change, the registered definitions."""

    help = (
        "Show how the topics in the settings differ from those registered in Redis. "
        "Exits with 1 if something differs and was not applied."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("topics", nargs="*", metavar="topic", help="only these (default: all)")
        parser.add_argument(
            "--apply", action="store_true", help="register what is new and change what may be changed"
        )
        parser.add_argument(
            "--force",
            action="store_true",
            help="apply even if workers that run would go on with the old values",
        )
        parser.add_argument("--json", action="store_true", help="print JSON")

    def handle(self, *args: Any, **options: Any) -> None:
        config, broker = get_config(), get_broker("worker")
        names = options["topics"] or list(config.topics)
        topics = [config.topic(name) for name in names]
        registered = broker.definitions()
        rows = []
        for topic in topics:
            known = registered.get(topic.name)
            different = [] if known is None else definitions.differences(topic, known)
            obstacles = [registered.problem(topic.name)] if topic.name in registered.unreadable else []
            state = (
                "unreadable" if obstacles else "new" if known is None else "differs" if different else "same"
            )
            if options["apply"] and state == "new":
                broker.define(topic)
                state = "registered"
            elif options["apply"] and state == "differs":
                running = [] if options["force"] else serving(broker, topic.name)
                obstacles = definitions.obstacles(broker, topic, different, running)
                if not obstacles:
                    definitions.apply(broker, topic)
                    state = "applied"
            rows.append(
                {
                    "topic": topic.name,
                    "state": state,
                    "declared": topic.definition(),
                    "registered": known,
                    "differences": [difference._asdict() for difference in different],
                    "obstacles": obstacles,
                }
            )
        if not options["topics"]:
            rows += [
                {
                    "topic": name,
                    "state": "undeclared",
                    "declared": None,
                    "registered": registered[name],
                    "differences": [],
                    "obstacles": [],
                }
                for name in sorted(set(registered) - set(config.topics))
            ]
        if options["json"]:
            self.stdout.write(json.dumps(rows, indent=2))
        else:
            self._print(rows)
        open_ = [str(row["topic"]) for row in rows if row["state"] in ("new", "differs", "unreadable")]
        if open_:
            advice = "" if options["apply"] else "; --apply changes what may be changed"
            raise CommandError(f"not as registered: {', '.join(open_)}{advice}", returncode=1)

    def _print(self, rows: list[dict[str, Any]]) -> None:
        width = max((len(row["topic"]) for row in rows), default=0)
        for row in rows:
            known = row["declared"] or row["registered"]
            kind = known.get("type", "unknown type")
            self.stdout.write(f"{row['topic']:<{width}}  {row['state']:<10}  {kind}, {known['slots']} slots")
            for difference in row["differences"]:
                self.stdout.write(
                    f"  {difference['setting']}: {_shown(difference['declared'])} in the settings, "
                    f"{_shown(difference['registered'])} in Redis"
                )
            for obstacle in row["obstacles"]:
                self.stdout.write(self.style.WARNING(f"  not applied: {obstacle}"))


def _shown(value: object) -> str:
    return json.dumps(value)
