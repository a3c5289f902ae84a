"""The whole shop in one command: Redis, consumers, web server, traffic, and a table of what happens.

`python -m example_project.demo` runs until Ctrl-C; with `--seconds` it then stops the traffic, lets the
consumers finish, and ends with 0 only if everything that was sent is accounted for.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from django_rmq.exceptions import RmqError
from example_project.embedded_redis import EmbeddedRedis, NoRedisServer
from example_project.embedded_server import DidNotStart, free_port
from example_project.embedded_zookeeper import EmbeddedZooKeeper

if TYPE_CHECKING:
    from example_project.accounts import Accounts, Figures
    from example_project.traffic import Traffic

ROOT = Path(__file__).resolve().parents[1]
HOST = "127.0.0.1"
LOGIN = PASSWORD = "admin"

STEP_SECONDS = 0.1
START_SECONDS = 60.0
STOP_SECONDS = 60.0
STALL_SECONDS = 60.0
"""How long nothing may happen before we stop waiting for the consumers to finish."""


class Stopped(Exception):
    """Ctrl-C or SIGTERM."""


class DemoFailed(Exception):
    """The demo cannot go on; the message says why."""


class Signals:
    """Notes the first SIGINT or SIGTERM; whoever waits looks here, so that no step is torn apart."""

    def __init__(self) -> None:
        self.received: int | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    def _note(self, number: int, _: object) -> None:
        self.received = self.received or number

    def check(self) -> None:
        """Raise Stopped if a signal came."""
        if self.received:
            raise Stopped

    def wait(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Return whether `until` came true within so many seconds; raise Stopped on a signal."""
        deadline = time.monotonic() + seconds
        while True:
            self.check()
            if until():
                return True
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(STEP_SECONDS, left))


class Child:
    """A command of ours in a process of its own, with its output in a log file."""

    def __init__(self, name: str, log: Path, *command: str, **environment: str) -> None:
        self.name = name
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(ROOT / "manage.py"), *command],
                cwd=ROOT,
                env=os.environ | environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Ctrl-C reaches us alone: the consumers have to work until the traffic has stopped.
                start_new_session=True,
            )

    def check(self) -> None:
        """Raise DemoFailed with the end of its log if it has ended."""
        if self.process.poll() is not None:
            raise DemoFailed(f"the {self.name} ended with {self.process.returncode}:\n{self.tail()}")

    def stop(self) -> int:
        """Ask it to end, and return its exit code; one that does not listen is killed."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        return self.process.returncode

    def tail(self) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-25:])


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m example_project.demo", description=__doc__)
    parser.add_argument(
        "--seconds", type=float, help="traffic for so long, then a summary (default: until Ctrl-C)"
    )
    parser.add_argument("--port", type=int, help="the web server's port (default 8000, or a free one)")
    parser.add_argument("--products", type=int, default=2000, help="size of the catalogue (default 2000)")
    parser.add_argument("--rate", type=float, default=100, help="price changes per second (default 100)")
    parser.add_argument(
        "--zookeeper",
        action="store_true",
        help="let the workers come together in ZooKeeper: that of ZOOKEEPER_HOSTS, or one started here (needs Java)",
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
    signals = Signals()
    try:
        with ExitStack() as cleanup:
            return Demo(options, signals, cleanup).run()
    except Stopped:
        print("\nStopped before its time.")
        return 128 + (signals.received or 0)
    except (DemoFailed, DidNotStart, NoRedisServer, RmqError) as failure:
        print(f"\nThe demo failed: {failure}", file=sys.stderr)
        return 1


class Demo:
    """One run. Whatever it starts is stopped by `cleanup`, the last first."""

    consumers: Child
    web: Child
    traffic: Traffic
    accounts: Accounts

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
            while seconds is None or time.monotonic() - began < seconds:
                left = 1.0 if seconds is None else seconds - (time.monotonic() - began)
                self.signals.wait(min(1.0, max(left, 0.0)))
                self._check()
                show(self.accounts.figures(), self.accounts, time.monotonic() - began)
        except Stopped:
            if seconds is not None:
                raise
            # Ctrl-C is how a run without an end ends.
            self.traffic.stop()
            self.consumers.stop()
            show.close()
            self._summary()
            print("\nWhat still waits is sent again from the database when the demo next starts.")
            return 0
        self.traffic.stop()
        show.note("The traffic has stopped; the consumers finish what is left.")
        self._drain(show, began)
        self._check()
        ended_with = self.consumers.stop()
        show.close()

        complaints = self.accounts.complaints(self.traffic.done)
        if ended_with:
            complaints.append(f"the consumers ended with {ended_with}; see {self.consumers.log}")
        self._summary()
        if complaints:
            print("\nNot everything is accounted for:")
            for complaint in complaints:
                print(f"  - {complaint}")
            print(f"\nThe last lines of {self.consumers.log}:\n{self.consumers.tail()}")
            return 1
        print("\nEverything that was sent is accounted for.")
        return 0

    def _prepare(self) -> Path:
        """Set the environment, start Redis, set up Django; return the folder for data."""
        given = os.environ.get("REDIS_URL")
        if given:
            print("Redis: the one of REDIS_URL")
        else:
            folder = self.cleanup.enter_context(tempfile.TemporaryDirectory(prefix="shop-redis-"))
            server = EmbeddedRedis(folder)
            self.cleanup.callback(server.stop)
            server.start()
            os.environ["REDIS_URL"] = server.url
            print(f"Redis: {server.binary} on port {server.port}")
        self.signals.check()
        if self.options.zookeeper:
            self._prepare_zookeeper()
        if not os.environ.get("SHOP_ORDER_SECONDS"):
            # Short enough to see it happen.
            seconds = self.options.seconds
            os.environ["SHOP_ORDER_SECONDS"] = str(30 if seconds is None else min(max(seconds / 4, 2), 30))
        os.environ["DJANGO_SETTINGS_MODULE"] = "example_project.settings"
        wanted_debug = os.environ.get("DJANGO_DEBUG", "1")
        # Only the web server is a place to debug: the others would note every query.
        os.environ["DJANGO_DEBUG"] = "0"

        import django
        from django.conf import settings

        django.setup()
        os.environ["DJANGO_DEBUG"] = wanted_debug
        data: Path = settings.SHOP_DATA
        lock = self.cleanup.enter_context((data / "demo.lock").open("w"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DemoFailed(f"another demo runs on {data}; give this one a folder in SHOP_DATA") from None
        self._fill()
        return data

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

        call_command("migrate", verbosity=0)
        self.signals.check()
        call_command("seed_shop", products=self.options.products)
        users: Any = get_user_model()
        if not users.objects.filter(username=LOGIN).exists():
            users.objects.create_superuser(LOGIN, "admin@example.com", PASSWORD)
        self.signals.check()

    def _start(self, data: Path) -> None:
        """Start the processes and the traffic, and say where to look."""
        from django.core.management import call_command

        from example_project.accounts import Accounts
        from example_project.traffic import Traffic

        self.accounts = Accounts()
        # What an earlier run left undone was lost with its Redis.
        call_command("resend_pending")
        self.consumers = Child(
            "consumers", data / "consumers.log", "runrmqconsumers", "--threads", "4", DJANGO_DEBUG="0"
        )
        self.cleanup.callback(self.consumers.stop)
        port = self._port()
        self.web = Child("web server", data / "web.log", "runserver", "--noreload", f"{HOST}:{port}")
        self.cleanup.callback(self.web.stop)
        if not self.signals.wait(START_SECONDS, lambda: self._web_answers(port)):
            raise DemoFailed(f"the web server did not answer within {START_SECONDS:g} s")
        self.traffic = Traffic(self.options.rate)
        self.traffic.start()
        self.cleanup.callback(self.traffic.stop)

        from example_project.prices.management.commands.seed_shop import MISSING_SKU, SLOW_DISK_SKU

        address = f"http://{HOST}:{port}/"
        print(
            f"\nShop:   {address}\nOrders: {address}orders/\nAdmin:  {address}admin/   login {LOGIN}, password {PASSWORD}\n"
            f"Queues: {address}admin/django_rmq/topic/\n"
            f"\nProduct {SLOW_DISK_SKU} fails twice each time it is rendered, then succeeds: a retry.\n"
            f"Product {MISSING_SKU} has no photo: its message is in Dead. Give it one in the admin "
            f"({address}admin/prices/product/{MISSING_SKU}/change/) and change its price.\n"
            f"Logs:   {data}/\n" + ("Ctrl-C ends it.\n" if self.options.seconds is None else ""),
            flush=True,
        )

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

    def _web_answers(self, port: int) -> bool:
        self.web.check()
        try:
            with socket.create_connection((HOST, port), timeout=1):
                return True
        except OSError:
            return False

    def _check(self) -> None:
        """Raise DemoFailed if anything that should run does not."""
        self.consumers.check()
        self.web.check()
        if self.traffic.error is not None:
            raise DemoFailed(f"the traffic broke off: {self.traffic.error!r}") from self.traffic.error

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
            show(figures, self.accounts, time.monotonic() - began)
            self.signals.wait(0.5)
            self._check()

    def _summary(self) -> None:
        figures = self.accounts.figures()
        found = totals(figures, self.accounts)
        ledgers = [ledger for slots in self.accounts.ledgers().values() for ledger in slots]
        unbalanced = sum(not ledger.balanced for ledger in ledgers)
        done = self.traffic.done
        late = self.accounts.latest_close().total_seconds()
        lines: dict[str, object] = {
            "sent": f"{found['sent']} ({done.price_changes} price changes, {done.orders} orders)",
            "merged": found["merged"],
            "rendered": found["rendered"],
            "paid": done.paid,
            "closed": f"{found['closed']} (the latest {late:.3f} s after its time)",
            "retried": found["retried"],
            "dead": found["dead"],
            "not yet due or resting": found["waiting"] + found["resting"],
            "ledger": f"NOT balanced in {unbalanced} slots"
            if unbalanced
            else f"balanced in {len(ledgers)} slots",
            "delivered early": self.accounts.closed_early(),
        }
        print("\nSummary")
        for name, value in lines.items():
            print(f"  {name + ':':<24}{value}")


def totals(figures: dict[str, Figures], accounts: Accounts) -> dict[str, int]:
    """The whole shop in a few numbers; `sent` is what came from outside, not what listeners sent on."""
    topics = list(figures.values())
    return {
        "sent": sum(topic.counters["sent"] for name, topic in figures.items() if name != "image-renders"),
        "merged": sum(topic.merged for topic in topics),
        "rendered": figures["image-renders"].counters["committed"],
        "closed": accounts.closed_orders().count(),
        "retried": sum(topic.retried for topic in topics),
        "dead": sum(topic.dead for topic in topics),
        "waiting": sum(topic.store for topic in topics),
        "running": sum(topic.prepare for topic in topics),
        "resting": sum(topic.retry for topic in topics),
    }


COLUMNS = ("sent", "merged", "delivered", "done", "retried", "dead", "waiting", "running", "resting")


def row(figures: Figures) -> tuple[int, ...]:
    """A topic's figures in the order of COLUMNS."""
    counters = figures.counters
    return (
        counters["sent"],
        figures.merged,
        counters["prepared"],
        counters["committed"],
        figures.retried,
        figures.dead,
        figures.store,
        figures.prepare,
        figures.retry,
    )


class Display:
    """A table that changes in place on a terminal that can (and where rich is installed), else a line every now and then."""

    SECONDS_BETWEEN_LINES = 2.0

    def __init__(self) -> None:
        self._live: Any = None
        self._next_line = 0.0

    def __enter__(self) -> Self:
        if sys.stdout.isatty():
            try:
                from rich.live import Live
            except ImportError:
                return self
            self._live = Live(auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the last table where it is."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def note(self, text: str) -> None:
        """Say something once."""
        (print if self._live is None else self._live.console.print)(text)

    def __call__(self, figures: dict[str, Figures], accounts: Accounts, seconds: float) -> None:
        if self._live is not None:
            self._live.update(self._table(figures, accounts, seconds), refresh=True)
        elif seconds >= self._next_line:
            self._next_line = seconds + self.SECONDS_BETWEEN_LINES
            print(self._line(figures, accounts, seconds), flush=True)

    @staticmethod
    def _table(figures: dict[str, Figures], accounts: Accounts, seconds: float) -> Any:
        from rich.table import Table

        early = accounts.closed_early()
        table = Table(
            title=f"{seconds:.0f} s",
            caption=f"orders closed: {accounts.closed_orders().count()}, early: {early}",
        )
        table.add_column("topic")
        for column in COLUMNS:
            table.add_column(column, justify="right", min_width=7)
        for name, topic in figures.items():
            table.add_row(name, *(f"{value:,}" for value in row(topic)))
        return table

    @staticmethod
    def _line(figures: dict[str, Figures], accounts: Accounts, seconds: float) -> str:
        found = totals(figures, accounts)
        return f"{seconds:4.0f} s  " + "  ".join(f"{name} {value}" for name, value in found.items())


if __name__ == "__main__":
    sys.exit(main())
