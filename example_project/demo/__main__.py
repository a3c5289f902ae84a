"""The whole shop in one command: Redis, consumers, web server, traffic, and what happens, line by line.

`python -m example_project.demo` runs until Ctrl-C. With `--seconds` it runs for about that long, and ends with 0 only if
everything that was sent is accounted for.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from example_project.demo.stage import (
    START_SECONDS,
    Command,
    DemoFailed,
    Signals,
    Source,
    Stopped,
    Watch,
    WebServer,
    print_summary,
    run,
    set_up_django,
    start_redis,
    verdict,
)

LOGIN = PASSWORD = "admin"

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
    if (options.seconds is not None and options.seconds <= 0) or options.rate <= 0 or options.products < 10:
        parser.error("--seconds and --rate must be more than 0, and --products at least 10")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    return run(demonstrate, parse(argv))


def demonstrate(options: argparse.Namespace, signals: Signals, cleanup: ExitStack) -> int:
    seconds = options.seconds
    start_redis(cleanup)
    signals.check()
    if not os.environ.get("SHOP_ORDER_SECONDS"):
        # Short enough to see it happen.
        os.environ["SHOP_ORDER_SECONDS"] = str(30 if seconds is None else min(max(seconds / 4, 2), 30))
    data = set_up_django(cleanup)
    consumers = Command("consumers", data / "consumers.log", "runrmqconsumers", "--threads", "4")
    cleanup.callback(consumers.stop)
    web = WebServer(data, options.port)
    cleanup.callback(web.stop)
    signals.check()
    fill(options.products)
    signals.check()

    from example_project.demo.accounts import Accounts
    from example_project.demo.traffic import Traffic, resume

    accounts = Accounts()
    resume()
    traffic = Traffic()
    source = Source("traffic", options.rate, traffic.go_on, 0.1)
    source.start()
    cleanup.callback(source.stop)
    watch = Watch(
        lambda: "  ".join(f"{name} {value}" for name, value in accounts.totals().items()),
        *(part.check for part in (signals, consumers, web, source)),
    )
    try:
        if not watch.wait(START_SECONDS, web.answers):
            raise DemoFailed(f"the web server did not answer within {START_SECONDS:g} s")
        welcome(web.address, data)
        watch.wait(math.inf if seconds is None else seconds * TRAFFIC_PART)
    except Stopped:
        if seconds is not None:
            raise
        # Ctrl-C is how a run without an end ends.
        source.stop()
        consumers.stop()
        print_summary(accounts.summary(traffic.done))
        print("\nThe next start of the demo sends waiting messages again from the database.")
        return 0
    source.stop()
    print("The traffic has stopped; the consumers finish the remaining messages.", flush=True)
    before: object = None
    while not watch.wait(STALL_SECONDS, accounts.finished) and (figures := accounts.figures()) != before:
        before = figures
    ended_with = consumers.stop()

    complaints = accounts.complaints(traffic.done)
    if ended_with:
        complaints.append(f"the consumers ended with {ended_with}; see {consumers.log}")
    praise = "Every sent message is accounted for."
    return verdict(accounts.summary(traffic.done), complaints, consumers, praise)


def fill(products: int) -> None:
    """Fill the catalogue, and make a login for the admin."""
    from django.contrib.auth.models import User
    from django.core.management import call_command

    call_command("seed_shop", products=products)
    if not User.objects.filter(username=LOGIN).exists():
        User.objects.create_superuser(LOGIN, "admin@example.com", PASSWORD)


def welcome(address: str, data: Path) -> None:
    """Say where to look."""
    from example_project.prices.management.commands.seed_shop import MISSING_SKU, SLOW_DISK_SKU

    print(
        f"\nShop:   {address}\nOrders: {address}orders/\nAdmin:  {address}admin/   login {LOGIN}, password {PASSWORD}\n"
        f"Queues: {address}admin/django_rmq/topic/\n"
        f"\nProduct {SLOW_DISK_SKU} fails twice each time it is rendered, then succeeds: a retry.\n"
        f"Product {MISSING_SKU} has no photo: its message is in Dead. Give it one in the admin "
        f"({address}admin/prices/product/{MISSING_SKU}/change/) and change its price.\n"
        f"Logs:   {data}/\nCtrl-C ends it.\n",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
