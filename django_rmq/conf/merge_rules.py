"""Settings that contradict each other on topics that debounce or collect."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from django_rmq.conf.problems import Problems
from django_rmq.durations import duration_text


def merging(problems: Problems, place: str, values: dict[str, Any], own: Mapping[str, Any]) -> None:
    """Report what contradicts DEBOUNCE and ACCUMULATE. ``values``: without what does not fit the topic's type."""
    _debounce(problems, place, values, own)
    _accumulate(problems, place, values, own)


def _debounce(problems: Problems, place: str, values: dict[str, Any], own: Mapping[str, Any]) -> None:
    range_ms, wait_ms = values.get("time_range_ms"), values.get("max_wait_ms")
    if values.get("debounce") and wait_ms is None:
        problems.report(
            "E006",
            f"{place} has DEBOUNCE and no MAX_WAIT: a message that is sent all the time would never be delivered.",
            "Set MAX_WAIT to the longest time from the first send to the delivery.",
        )
    elif own.get("max_wait_ms") and "max_wait_ms" in values and not values.get("debounce"):
        problems.report("E006", f"{place} has MAX_WAIT without DEBOUNCE.", 'Set "DEBOUNCE": True, too.')
    elif values.get("debounce") and range_ms is not None and wait_ms is not None and wait_ms < range_ms:
        problems.report(
            "E006",
            f"{place} has MAX_WAIT {_text(wait_ms)} and TIME_RANGE {_text(range_ms)}: MAX_WAIT is the shorter one.",
            "Set MAX_WAIT to at least TIME_RANGE.",
        )


def _text(ms: int) -> str:
    return duration_text(timedelta(milliseconds=ms))


def _accumulate(problems: Problems, place: str, values: dict[str, Any], own: Mapping[str, Any]) -> None:
    if not values.get("accumulate"):
        return
    identity, origin = values.get("identity", "body"), values.get("origin")
    if own.get("accumulate") and identity != "key":
        problems.report(
            "E006",
            f'{place} has ACCUMULATE and IDENTITY "{identity}": messages merge when they are equal, so there is '
            "nothing to collect.",
            'Set IDENTITY "key".',
        )
    if own.get("accumulate") and origin:
        problems.report(
            "E006",
            f"{place} has ACCUMULATE and ORIGIN: a message that holds several sends has no single origin.",
            "Remove one of them.",
        )
    if own.get("accumulate") and values.get("outbox"):
        problems.report(
            "E006",
            f"{place} has ACCUMULATE and OUTBOX: the outbox sends only the newest state of a message.",
            'Set "OUTBOX": False for this topic.',
        )
    if identity != "key" or origin or values.get("outbox"):
        values.pop("accumulate")


__all__ = ["merging"]
