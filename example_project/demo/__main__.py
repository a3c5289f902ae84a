"""The whole shop in one command: Redis, consumers, web server, traffic, and a table of what happens.

`python -m example_project.demo` runs until Ctrl-C. Product sets join when Spark has started, where it can. With
`--seconds` the shop runs without Spark for about that long, and ends with 0 only if everything that was sent is
accounted for.
"""

from __future__ import annotations

import argparse
import math
import os
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from example_project.demo.embedded_server import free_port
from example_project.demo.embedded_zookeeper import EmbeddedZooKeeper
from example_project.demo.stage import (
    Child,
    DemoFailed,
    Display,
    Signals,
    Stopped,
    print_summary,
    run,
    set_up_django,
    start_redis,
    verdict,
)
from example_project.demo.table import drawn, line, summary

if TYPE_CHECKING:
    from example_project.demo.accounts import Accounts
    from example_project.demo.traffic import Traffic
    from example_project.product_sets.run import ProductSetsRun

HOST = "127.0.0.1"
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
        help="run for about this long without Spark, and say whether all is accounted for (default: until Ctrl-C)",
    )
    parser.add_argument("--port", type=int, help="the web server's port (default 8000, or a free one)")
    parser.add_argument("--products", type=int, default=2000, help="size of the catalogue (default 2000)")
    parser.add_argument("--rate", type=float, default=100, help="price changes per second (default 100)")
    parser.add_argument(
        "--zookeeper",
        action="store_true",
        help="coordinate the workers through ZooKeeper: that of ZOOKEEPER_HOSTS, or one that the demo starts (needs Java)",
    )
    parser.add_argument(
        "--no-sets",
        action="store_true",
        help="skip the product sets; they are also skipped with --seconds, and without PySpark or Java",
    )
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
    web: Child
    traffic: Traffic
    accounts: Accounts
    port: int
    sets: ProductSetsRun | None = None
    sets_change = False
    """Whether the sources of the product sets report."""

    def __init__(self, options: argparse.Namespace, signals: Signals, cleanup: ExitStack) -> None:
        self.options = options
        self.signals = signals
        self.cleanup = cleanup

    def run(self) -> int:
        data = self._prepare()
        self._start(data)
        began = time.monotonic()
        show = self.cleanup.enter_context(Display())
        seconds = self.options.seconds
        try:
            self._await_web(show, data, began)
            if seconds is None and not self.options.no_sets:
                self._start_sets(show, data)
            until = math.inf if seconds is None else began + seconds * TRAFFIC_PART
            while (left := until - time.monotonic()) > 0:
                self.signals.wait(min(1.0, left))
                self._check()
                self._look_for_sets(show)
                self._show(show, time.monotonic() - began)
        except Stopped:
            if seconds is not None:
                raise
            # Ctrl-C is how a run without an end ends.
            self.traffic.stop()
            if self.sets is not None:
                self.sets.stop()
            self.consumers.stop()
            show.close()
            print_summary(summary(self.accounts, self.traffic.done, self.sets))
            print("\nThe next start of the demo sends waiting messages again from the database.")
            return 0
        self.traffic.stop()
        show.note("The traffic has stopped; the consumers finish the remaining messages.")
        self._drain(show, began)
        self._check()
        ended_with = self.consumers.stop()
        show.close()

        complaints = self.accounts.complaints(self.traffic.done)
        if ended_with:
            complaints.append(f"the consumers ended with {ended_with}; see {self.consumers.log}")
        print_summary(summary(self.accounts, self.traffic.done, None))
        return verdict(complaints, self.consumers, "Every sent message is accounted for.")

    def _prepare(self) -> Path:
        """Set the environment, start Redis, set up Django; return the folder for data."""
        start_redis(self.cleanup)
        self.signals.check()
        if self.options.zookeeper:
            self._prepare_zookeeper()
        if not os.environ.get("SHOP_ORDER_SECONDS"):
            # Short enough to see it happen.
            seconds = self.options.seconds
            os.environ["SHOP_ORDER_SECONDS"] = str(30 if seconds is None else min(max(seconds / 4, 2), 30))
        return set_up_django(self.cleanup)

    def _prepare_zookeeper(self) -> None:
        if os.environ.get("ZOOKEEPER_HOSTS"):
            print("ZooKeeper: the one of ZOOKEEPER_HOSTS")
        else:
            folder = self.cleanup.enter_context(tempfile.TemporaryDirectory(prefix="shop-zookeeper-"))
            server = EmbeddedZooKeeper(folder)
            self.cleanup.callback(server.stop)
            server.start()
            os.environ["ZOOKEEPER_HOSTS"] = server.hosts
            print(f"ZooKeeper: {server.java} on port {server.port}")
        os.environ["SHOP_ZOOKEEPER"] = "1"
        self.signals.check()

    def _fill(self) -> None:
        from django.contrib.auth import get_user_model
        from django.core.management import call_command

        self.signals.check()
        call_command("seed_shop", products=self.options.products)
        users: Any = get_user_model()
        if not users.objects.filter(username=LOGIN).exists():
            users.objects.create_superuser(LOGIN, "admin@example.com", PASSWORD)
        self.signals.check()

    def _start(self, data: Path) -> None:
        """Start the processes, fill the shop meanwhile, and let its traffic begin."""
        self.consumers = Child(
            "consumers", data / "consumers.log", "runrmqconsumers", "--threads", "4", DJANGO_DEBUG="0"
        )
        self.cleanup.callback(self.consumers.stop)
        self.port = self._port()
        self.web = Child("web server", data / "web.log", "runserver", "--noreload", f"{HOST}:{self.port}")
        self.cleanup.callback(self.web.stop)
        self._fill()

        from example_project.demo.accounts import Accounts
        from example_project.demo.traffic import Traffic
        from example_project.resuming import resume

        self.accounts = Accounts()
        # What an earlier run left undone was lost with its Redis.
        resume()
        self.traffic = Traffic(self.options.rate)
        self.traffic.start()
        self.cleanup.callback(self.traffic.stop)

    def _await_web(self, show: Display, data: Path, began: float) -> None:
        """Return when the web server answers, and say where to look. Prices change meanwhile."""
        while not self._web_answers():
            seconds = time.monotonic() - began
            if seconds > START_SECONDS:
                raise DemoFailed(f"the web server did not answer within {START_SECONDS:g} s")
            self._show(show, seconds)
            self.signals.wait(0.2)
            self._check()

        from example_project.prices.management.commands.seed_shop import MISSING_SKU, SLOW_DISK_SKU

        address = f"http://{HOST}:{self.port}/"
        show.note(
            f"\nShop:   {address}\nOrders: {address}orders/\nAdmin:  {address}admin/   login {LOGIN}, password {PASSWORD}\n"
            f"Queues: {address}admin/django_rmq/topic/\n"
            f"\nProduct {SLOW_DISK_SKU} fails twice each time it is rendered, then succeeds: a retry.\n"
            f"Product {MISSING_SKU} has no photo: its message is in Dead. Give it one in the admin "
            f"({address}admin/prices/product/{MISSING_SKU}/change/) and change its price.\n"
            f"Logs:   {data}/\n" + ("Ctrl-C ends it.\n" if self.options.seconds is None else "")
        )

    def _start_sets(self, show: Display, data: Path) -> None:
        """Start Spark for the product sets if it can run here. The shop does not wait for it."""
        from example_project.product_sets.run import ProductSetsRun, why_not

        if reason := why_not():
            show.note(f"Sets: skipped. {reason}")
            return
        show.note(f"Sets:   http://{HOST}:{self.port}/sets/   when Spark has started")
        self.sets = ProductSetsRun(data, items=min(self.options.products, 500), rate=self.options.rate)
        self.sets.start(self.cleanup)

    def _look_for_sets(self, show: Display) -> None:
        """Let the sources report once Spark has evaluated the first items; go on without sets if it never does."""
        if self.sets is None or self.sets_change:
            return
        if reason := self.sets.failure():
            self.sets.stop()
            self.sets = None
            show.note(f"Sets: skipped. {reason}")
        elif self.sets.has_begun():
            self.sets_change = True
            self.sets.thread.start()
            show.note("Spark has evaluated the first items: the sets fill.")

    def _port(self) -> int:
        wanted: int | None = self.options.port
        if wanted == 0:
            return free_port()
        with socket.socket() as probe:
            # As the web server will: a port that waits for the end of old connections is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, wanted or 8000))
            except OSError as error:
                if wanted is not None:
                    raise DemoFailed(f"port {wanted} cannot be used: {error.strerror}") from None
                return free_port()
        return wanted or 8000

    def _web_answers(self) -> bool:
        try:
            with socket.create_connection((HOST, self.port), timeout=1):
                return True
        except OSError:
            return False

    def _check(self) -> None:
        """Raise DemoFailed if anything that should run does not."""
        self.consumers.check()
        self.web.check()
        if self.traffic.error is not None:
            raise DemoFailed(f"the traffic failed: {self.traffic.error!r}") from self.traffic.error
        if self.sets_change and self.sets is not None:
            self.sets.check()

    def _show(self, show: Display, seconds: float) -> None:
        figures = self.accounts.figures()
        show.show(
            seconds,
            lambda: drawn(figures, self.accounts, self.sets, seconds),
            lambda: line(figures, self.accounts, self.sets),
        )

    def _drain(self, show: Display, began: float) -> None:
        """Return when nothing is left to do, or nothing has happened for too long."""
        before: Any = None
        changed = time.monotonic()
        while not self.accounts.finished():
            figures = self.accounts.figures()
            if figures != before:
                before, changed = figures, time.monotonic()
            elif time.monotonic() - changed > STALL_SECONDS:
                return
            self._show(show, time.monotonic() - began)
            self.signals.wait(0.5)
            self._check()


if __name__ == "__main__":
    sys.exit(main())
