from __future__ import annotations

import sys
import time
from importlib.util import find_spec
from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from django_rmq.management import at_least
from example_project.selection.showing import Showing


class Command(BaseCommand):
    help = (
        "Watch the product sets: their members, and how many items have joined and left since the command "
        "started. On a terminal, and with rich installed, the table is updated in place. Ctrl-C ends it."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--interval",
            type=at_least(0.1, float),
            default=1.0,
            metavar="SECONDS",
            help="time between updates (default 1)",
        )
        parser.add_argument("--count", type=at_least(1), metavar="N", help="end after N updates")

    def handle(self, *args: Any, **options: Any) -> None:
        showing = Showing()
        try:
            if sys.stdout.isatty() and find_spec("rich"):
                from rich.live import Live

                with Live(auto_refresh=False) as live:
                    self._repeat(lambda: live.update(showing.rich_table(), refresh=True), options)
            else:
                self._repeat(lambda: self._print(showing), options)
        except KeyboardInterrupt:
            pass

    @staticmethod
    def _repeat(look: Any, options: dict[str, Any]) -> None:
        left = options["count"]
        while True:
            look()
            if left is not None:
                left -= 1
                if not left:
                    return
            time.sleep(options["interval"])

    def _print(self, showing: Showing) -> None:
        self.stdout.write("\n".join([*showing.lines(), showing.newest_batch()]).rstrip() + "\n")
        self.stdout.flush()
