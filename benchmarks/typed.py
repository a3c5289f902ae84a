"""``python -m benchmarks.typed``: what a type costs each send, each body of a bulk send, and each read of a body.

The same content on two topics, one with a type and one without, in turns. A body has five fields, one of them a
list of two objects.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

from benchmarks.table import server

MESSAGES = 2_000


@dataclass(frozen=True)
class Line:
    """A part of a body."""

    sku: int
    price: Decimal


@dataclass(frozen=True)
class PriceChanged:
    """A body."""

    number: int
    shop: str
    at: datetime
    lines: list[Line]
    note: str | None = None


NOON = datetime(2026, 11, 23, 12, tzinfo=UTC)


def instance(number: int) -> PriceChanged:
    """Return an instance that no other number has."""
    lines = [Line(number, Decimal("9.90")), Line(number + 1, Decimal("19.90"))]
    return PriceChanged(number, "Rose's", NOON + timedelta(seconds=number), lines)


def plain(number: int) -> dict[str, Any]:
    """Return the same as plain data, as views have it."""
    return {
        "number": number,
        "shop": "Rose's",
        "at": NOON + timedelta(seconds=number),
        "lines": [{"sku": number, "price": Decimal("9.90")}, {"sku": number + 1, "price": Decimal("19.90")}],
        "note": None,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.typed", description=__doc__)
    parser.add_argument("--turns", type=int, default=9, help="turns of each kind (default 9)")
    options = parser.parse_args()
    with server() as (_, url):
        _configure(url)
        figures = _measured(options.turns)
    print(f"{options.turns} turns of {MESSAGES} messages each; µs per message (median)")
    print(f"{'':28}{'untyped':>10}{'plain data':>12}{'instance':>10}")
    for work, kinds in figures.items():
        untyped, data, typed = (
            statistics.median(kinds[name]) * 1e6 for name in ("untyped", "plain", "typed")
        )
        print(f"{work:28}{untyped:10.1f}{data:12.1f}{typed:10.1f}")
    return 0


def _configure(url: str) -> None:
    import django
    from django.conf import settings

    topic = {"TYPE": "range_merge", "SLOTS": 64, "TIME_RANGE": 60, "LISTENER": False}
    settings.configure(
        RMQ={
            "REDIS": url,
            "TOPICS": {"untyped": topic, "typed": {**topic, "BODY": "benchmarks.typed.PriceChanged"}},
        },
        INSTALLED_APPS=["django.contrib.contenttypes", "django.contrib.auth", "django_rmq"],
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
        USE_TZ=True,
    )
    django.setup()


def _measured(turns: int) -> dict[str, dict[str, list[float]]]:
    """Return the seconds per message of each work and kind, turn by turn."""
    from benchmarks.typed import instance as typed_instance  # of the module that the settings name
    from django_rmq import Message, send_message, send_messages
    from django_rmq.conf import get_config
    from django_rmq.core.model.body_codec import encode_body
    from django_rmq.core.model.replies import Delivery

    config = get_config()
    kinds: dict[str, tuple[str, Callable[[int], Any]]] = {
        "untyped": ("untyped", plain),
        "plain": ("typed", plain),
        "typed": ("typed", typed_instance),
    }

    def send_each(topic: str, bodies: list[Any]) -> None:
        for body in bodies:
            send_message(topic, body)

    def read(topic: str, bodies: list[bytes]) -> None:
        for raw in bodies:
            Message(config.topic(topic), 0, 1, Delivery(raw, 0.0, 16)).body  # noqa: B018 - this is what is measured

    works: dict[str, Callable[[str, list[Any]], Any]] = {
        "send_message": send_each,
        "send_messages, each": send_messages,
        "message.body": read,
    }
    found: dict[str, dict[str, list[float]]] = {work: {kind: [] for kind in kinds} for work in works}
    number = 0
    for turn in range(-1, turns):
        for work, act in works.items():
            for kind, (topic, make) in kinds.items():
                bodies = [make(number + index) for index in range(MESSAGES)]
                number += MESSAGES
                if act is read:
                    bodies = [encode_body(config.topic(topic), body) for body in bodies]
                began = time.perf_counter()
                act(topic, bodies)
                if turn >= 0:  # the first one warms up
                    found[work][kind].append((time.perf_counter() - began) / MESSAGES)
    return found


if __name__ == "__main__":
    sys.exit(main())
