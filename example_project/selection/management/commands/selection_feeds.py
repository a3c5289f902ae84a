from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandParser

from django_rmq.management import at_least
from example_project.selection.feeds import Feeds, FeedThread


class Command(BaseCommand):
    help = "Write the reports of the sources as files: every item once, then changes. Ctrl-C ends it."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--folder", type=Path, default=settings.SELECTION_FEEDS, help="the folder for the files"
        )
        parser.add_argument("--items", type=at_least(1), default=500, help="number of items (default 500)")
        parser.add_argument("--rate", type=at_least(1), default=100, help="changes per second (default 100)")
        parser.add_argument("--seconds", type=at_least(0, float), help="end after this time")

    def handle(self, *args: Any, **options: Any) -> None:
        feeds = Feeds(options["folder"], options["items"])
        feeds.report_all()
        thread = FeedThread(feeds, options["rate"])
        thread.start()
        began = time.monotonic()
        try:
            while thread.is_alive() and not (
                options["seconds"] is not None and time.monotonic() - began >= options["seconds"]
            ):
                thread.join(0.2)
        except KeyboardInterrupt:
            pass
        finally:
            thread.stop()
        if thread.error is not None:
            raise thread.error
        told = ", ".join(f"{name} {count}" for name, count in feeds.written.items())
        self.stdout.write(f"{feeds.written.total()} events: {told}")
