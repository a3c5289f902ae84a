"""The product sets alone: a Redis, sources that report changes, Spark, and the sets as they change.

`python -m example_project.product_sets.demo` has the sources report for some seconds, changes a rule at half time, lets
Spark finish, and ends with 0 only if the sets are what plain Python makes of the same events.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from decimal import Decimal

from django_rmq.spark.java import check_installed
from example_project.demo.stage import (
    Command,
    Signals,
    Source,
    Watch,
    WebServer,
    run,
    set_up_django,
    start_redis,
    verdict,
)

FIRST_EVENTS_SECONDS = 300.0
FINISH_SECONDS = 300.0
EDITED = "Best rated"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m example_project.product_sets.demo", description=__doc__)
    parser.add_argument("--seconds", type=float, default=30, help="duration of the changes (default 30)")
    parser.add_argument("--items", type=int, default=500, help="number of items (default 500)")
    parser.add_argument("--port", type=int, help="the web server's port (default 8000, or a free one)")
    parser.add_argument("--rate", type=float, default=200, help="changes per second (default 200)")
    options = parser.parse_args(argv)
    if not (options.seconds > 0 and options.items > 0 and options.rate > 0):
        parser.error("--seconds, --items and --rate must be more than 0")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    return run(demonstrate, parse(argv))


def demonstrate(options: argparse.Namespace, signals: Signals, cleanup: ExitStack) -> int:
    start_redis(cleanup)
    data = set_up_django(cleanup)
    signals.check()

    from django.conf import settings
    from django.core.management import call_command

    from example_project.product_sets.accounts import SetAccounts
    from example_project.product_sets.feeds import SECONDS_PER_FILE, Feeds
    from example_project.product_sets.models import ProductSet
    from example_project.product_sets.sets import (
        MEMBERSHIPS,
        create_first_sets,
        differing_labels,
        save_set,
        send_memberships,
    )

    check_installed()
    # The shop has the merchants that sell the items.
    call_command("seed_shop", products=options.items)
    # The files of an earlier run are of feeds that no longer exist.
    shutil.rmtree(settings.PRODUCT_SETS_FEEDS, ignore_errors=True)
    shutil.rmtree(settings.PRODUCT_SETS_CHECKPOINTS / "intake", ignore_errors=True)
    feeds = Feeds(settings.PRODUCT_SETS_FEEDS, options.items)
    accounts = SetAccounts(feeds)
    create_first_sets()
    # The messages of an earlier run were lost with its Redis.
    send_memberships(differing_labels())
    spark = Command(
        "product sets",
        data / "product-sets.log",
        *("runrmqpipeline", "product-sets", "--interval", "1s"),
        *("--master", f"local[{min(os.cpu_count() or 1, 4)}]"),
        *("--conf", "spark.sql.shuffle.partitions=2"),
    )
    cleanup.callback(spark.stop)
    feeds.report_all()
    sources = Source("feeds", options.rate, feeds.report_changes, SECONDS_PER_FILE)
    cleanup.callback(sources.stop)
    labels = Command("worker", data / "worker.log", "runrmqconsumers", MEMBERSHIPS)
    cleanup.callback(labels.stop)
    web = WebServer(data, options.port)
    cleanup.callback(web.stop)
    print(
        f"{options.items} items, {options.rate:g} changes/s\nSets:  {web.address}sets/\nLogs:  {data}/\n",
        flush=True,
    )
    watch = Watch(
        lambda: f"written {feeds.written}  read {accounts.events_read()}  sets {accounts.sizes()}",
        *(part.check for part in (signals, spark, labels, web, sources)),
    )
    watch.wait(FIRST_EVENTS_SECONDS, lambda: accounts.events_read() > 0)
    print("Spark has loaded all items; the sources start to report changes.")
    sources.start()
    watch.wait(options.seconds / 2)
    if edited := ProductSet.objects.filter(name=EDITED).first():
        edited.min_rating = Decimal("4.5") if edited.min_rating == 4 else Decimal(4)
        save_set(edited)
        print(f"The rule of {edited.name} is edited: {edited.rule}")
    watch.wait(options.seconds / 2)
    sources.stop()
    print("The sources have stopped; Spark finishes the remaining work.")
    watch.wait(FINISH_SECONDS, accounts.finished)
    exit_code = spark.stop()
    labels.stop()

    complaints = accounts.complaints()
    if exit_code:
        complaints.append(f"Spark ended with {exit_code}")
    praise = "Everything is accounted for: plain Python computes the same sets from the same events."
    return verdict(accounts.summary(), complaints, spark, praise)


if __name__ == "__main__":
    sys.exit(main())
