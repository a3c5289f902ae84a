"""The whole shop in one command: Redis, consumers, web server, traffic, and what happens, line by line.

`python -m example_project.demo` runs until Ctrl-C. With `--seconds` it runs for about that long, and ends with 0 only if
everything that was sent is accounted for.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from example_project.demo.stage import (
    Child,
    DemoFailed,
    Lines,
    Signals,
    Stopped,
    WebServer,
    print_summary,
    run,
    set_up_django,
    start_redis,
    verdict,
)

if TYPE_CHECKING:
    from example_project.demo.accounts import Accounts
    from example_project.demo.traffic import Traffic

LOGIN = PASSWORD = "admin"

START_SECONDS = 60.0
TRAFFIC_PART = 3 / 4
"""The part of `--seconds` in which there is traffic: the consumers finish in the rest."""
STALL_SECONDS = 60.0
"""How long nothing may happen before we stop waiting for the consumers to finish."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m example_project.demo", description=__doc__)
    parser.add_argument(
        "--seconds",
        type=float,
        help="run for about this long, and say whether all is accounted for (default: until Ctrl-C)",
    )
    parser.add_argument("--port", type=int, help="the web server's port (default 8000, or a free one)")
    parser.add_argument("--products", type=int, default=2000, help="size of the catalogue (default 2000)")
    parser.add_argument("--rate", type=float, default=100, help="price changes per second (default 100)")
    options = parser.parse_args(argv)
    if options.seconds is not None and options.seconds <= 0:
        parser.error("--seconds must be more than 0")
    if options.products < 10:
        parser.error("--products must be at least 10")
    if options.rate <= 0:
        parser.error("--rate must be more than 0")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    return run(lambda signals, cleanup: Demo(options, signals, cleanup).run())


class Demo:
    """One run. Whatever it starts is stopped by `cleanup`, the last first."""

    consumers: Child
    web: WebServer
    traffic: Traffic
    accounts: Accounts

    def __init__(self, options: argparse.Namespace, signals: Signals, cleanup: ExitStack) -> None:
        self.options = options
        self.signals = signals
        self.cleanup = cleanup

    def run(self) -> int:
        seconds = self.options.seconds
        start_redis(self.cleanup)
        self.signals.check()
        if not os.environ.get("SHOP_ORDER_SECONDS"):
            # Short enough to see it happen.
            os.environ["SHOP_ORDER_SECONDS"] = str(30 if seconds is None else min(max(seconds / 4, 2), 30))
        data = set_up_django(self.cleanup)
        self._start(data)
        self.lines = Lines()
        try:
            self._await_web(data)
            until = math.inf if seconds is None else seconds * TRAFFIC_PART
            while (left := until - self.lines.seconds) > 0:
                self.signals.wait(min(1.0, left))
                self._show()
        except Stopped:
            if seconds is not None:
                raise
            # Ctrl-C is how a run without an end ends.
            self.traffic.stop()
            self.consumers.stop()
            print_summary(self.accounts.summary(self.traffic.done))
            print("\nThe next start of the demo sends waiting messages again from the database.")
            return 0
        self.traffic.stop()
        print("The traffic has stopped; the consumers finish the remaining messages.", flush=True)
        self._drain()
        self._check()
        ended_with = self.consumers.stop()

        complaints = self.accounts.complaints(self.traffic.done)
        if ended_with:
            complaints.append(f"the consumers ended with {ended_with}; see {self.consumers.log}")
        print_summary(self.accounts.summary(self.traffic.done))
        return verdict(complaints, self.consumers, "Every sent message is accounted for.")

    def _start(self, data: Path) -> None:
        """Start the processes, fill the shop meanwhile, and let its traffic begin."""
        self.consumers = Child(
            "consumers", data / "consumers.log", "runrmqconsumers", "--threads", "4", DJANGO_DEBUG="0"
        )
        self.cleanup.callback(self.consumers.stop)
        self.web = WebServer(data, self.options.port)
        self.cleanup.callback(self.web.stop)
        self._fill()

        from example_project.demo.accounts import Accounts
        from example_project.demo.traffic import Traffic, resume

        self.accounts = Accounts()
        resume()
        self.traffic = Traffic(self.options.rate)
        self.traffic.start()
        self.cleanup.callback(self.traffic.stop)

    def _fill(self) -> None:
        from django.contrib.auth import get_user_model
        from django.core.management import call_command

        self.signals.check()
        call_command("seed_shop", products=self.options.products)
        users: Any = get_user_model()
        if not users.objects.filter(username=LOGIN).exists():
            users.objects.create_superuser(LOGIN, "admin@example.com", PASSWORD)
        self.signals.check()

    def _await_web(self, data: Path) -> None:
        """Return when the web server answers, and say where to look. Prices change meanwhile."""
        while not self.web.answers():
            if self.lines.seconds > START_SECONDS:
                raise DemoFailed(f"the web server did not answer within {START_SECONDS:g} s")
            self._show()
            self.signals.wait(0.2)

        from example_project.prices.management.commands.seed_shop import MISSING_SKU, SLOW_DISK_SKU

        address = self.web.address
        print(
            f"\nShop:   {address}\nOrders: {address}orders/\nAdmin:  {address}admin/   login {LOGIN}, password {PASSWORD}\n"
            f"Queues: {address}admin/django_rmq/topic/\n"
            f"\nProduct {SLOW_DISK_SKU} fails twice each time it is rendered, then succeeds: a retry.\n"
            f"Product {MISSING_SKU} has no photo: its message is in Dead. Give it one in the admin "
            f"({address}admin/prices/product/{MISSING_SKU}/change/) and change its price.\n"
            f"Logs:   {data}/\n" + ("Ctrl-C ends it.\n" if self.options.seconds is None else ""),
            flush=True,
        )

    def _check(self) -> None:
        """Raise DemoFailed if anything that should run does not."""
        self.consumers.check()
        self.web.check()
        if self.traffic.error is not None:
            raise DemoFailed(f"the traffic failed: {self.traffic.error!r}") from self.traffic.error

    def _show(self) -> None:
        self._check()
        self.lines.show(
            lambda: "  ".join(f"{name} {value}" for name, value in self.accounts.totals().items())
        )

    def _drain(self) -> None:
        """Return when nothing is left to do, or nothing has happened for too long."""
        before: Any = None
        changed = time.monotonic()
        while not self.accounts.finished():
            figures = self.accounts.figures()
            if figures != before:
                before, changed = figures, time.monotonic()
            elif time.monotonic() - changed > STALL_SECONDS:
                return
            self._show()
            self.signals.wait(0.5)


if __name__ == "__main__":
    sys.exit(main())
