"""The selection alone: a Redis, sources that report changes, Spark, and the product sets as they change.

`python -m example_project.selection.demo` has the sources report for some seconds, changes a rule at half time, lets
Spark finish, and ends with 0 only if the sets are what plain Python makes of the same events.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from example_project.selection.sources import SOURCES
from example_project.stage import (
    Child,
    DemoFailed,
    Display,
    Signals,
    print_summary,
    run,
    set_up_django,
    start_redis,
    verdict,
)

if TYPE_CHECKING:
    from example_project.selection.run import SelectionRun

SPARK_BEGINS_SECONDS = 300.0
FINISH_SECONDS = 300.0

TOPIC = "selection-changes"
EDITED = "Best rated"
RULES = ("rating >= 4 and price is known", "rating >= 4.5 and price is known")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m example_project.selection.demo", description=__doc__)
    parser.add_argument("--seconds", type=float, default=30, help="duration of the changes (default 30)")
    parser.add_argument("--items", type=int, default=500, help="number of items (default 500)")
    parser.add_argument("--rate", type=float, default=200, help="changes per second (default 200)")
    options = parser.parse_args(argv)
    if not (options.seconds > 0 and options.items > 0 and options.rate > 0):
        parser.error("--seconds, --items and --rate must be more than 0")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    return run(lambda signals, cleanup: _demonstrate(options, signals, cleanup))


def _demonstrate(options: argparse.Namespace, signals: Signals, cleanup: ExitStack) -> int:
    start_redis(cleanup)
    data = set_up_django(cleanup)
    signals.check()

    from django.core.management import call_command

    from example_project.selection.changes import TOPIC as MEMBERSHIPS
    from example_project.selection.models import ProductSet
    from example_project.selection.run import SelectionRun, why_not
    from example_project.selection.sets import TIMES, save_set

    if reason := why_not():
        raise DemoFailed(reason)
    # Who sells the items.
    call_command("seed_shop", products=options.items)
    selection = SelectionRun(data, items=options.items, rate=options.rate)
    selection.start(cleanup)
    labels = Child("worker", data / "worker.log", "runrmqconsumers", MEMBERSHIPS, TIMES, DJANGO_DEBUG="0")
    cleanup.callback(labels.stop)
    print(
        f"{options.items} items, {len(SOURCES)} sources, {options.rate:g} changes/s\nLogs:  {data}/\n",
        flush=True,
    )
    began = time.monotonic()
    show = cleanup.enter_context(Display())

    def watch(seconds: float, ended: Callable[[], bool] = lambda: False) -> None:
        until = time.monotonic() + seconds
        while not ended() and time.monotonic() < until:
            selection.check()
            labels.check()
            show.show(time.monotonic() - began, selection.rich_table, lambda: _line(selection))
            signals.wait(min(0.5, seconds))

    watch(SPARK_BEGINS_SECONDS, lambda: selection.taken_in() > 0)
    show.note("Spark has loaded all items; the sources start to report changes.")
    selection.start_feeds(options.seconds)
    watch(options.seconds / 2)
    edited = ProductSet.objects.filter(name=EDITED, active=True).first()
    if edited is not None:
        edited.rule = RULES[edited.rule == RULES[0]]
        save_set(edited)
        show.note(f"The rule of {edited.name} is edited: {edited.rule}")
    watch(options.seconds / 2)
    selection.stop_feeds()
    show.note("The sources have stopped; Spark finishes the remaining work.")
    watch(FINISH_SECONDS, selection.finished)
    ended_with = selection.stop()
    labels.stop()
    show.close()

    print_summary(selection.summary())
    complaints = selection.complaints()
    if ended_with:
        complaints.append(f"Spark ended with {ended_with}")
    praise = "Everything is accounted for: plain Python computes the same sets from the same events."
    return verdict(complaints, selection.pipeline, praise)


def _line(selection: SelectionRun) -> str:
    figures = selection.accounts.figures()[TOPIC]
    return (
        f"written {selection.feeds.written.total()}  taken in {selection.taken_in()}  sent {figures.counters['sent']}  "
        f"merged {figures.merged}  consumed {figures.counters['acked']}  sets {selection.told()}"
    )


if __name__ == "__main__":
    sys.exit(main())
