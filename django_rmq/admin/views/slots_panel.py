"""The slots of a topic, and its workers."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest
from django.utils.formats import number_format
from django.utils.translation import gettext as _

from django_rmq.admin.views.page import number
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import RmqError
from django_rmq.operations import Operations, SlotStats

SLOTS_SHOWN = 256


def panel(request: HttpRequest, operations: Operations, topic: Topic) -> dict[str, Any]:
    """Return the content for a part of the slots."""
    first = number(request.GET.get("first")) // SLOTS_SHOWN * SLOTS_SHOWN
    first = first if first < topic.slots else 0
    found = operations.slots(topic.name, first, SLOTS_SHOWN)
    last = first + len(found.rows) - 1
    note = _("The fullest slot is %(times)s times as full as the mean.") % {
        "times": number_format(round(found.skew, 1))
    }
    return {
        "panel": "admin/django_rmq/topic/_slots.html",
        "workers": _workers(operations, topic),
        "slots": [_row(one) for one in found.rows],
        "fullest": max((one.counts.store for one in found.rows), default=0) or 1,
        "skew_note": note if found.skew else _("All slots are empty."),
        "part_note": _("Slots %(first)s to %(last)s of %(slots)s.")
        % {"first": first, "last": last, "slots": topic.slots}
        if len(found.rows) < topic.slots
        else "",
        "previous": first - SLOTS_SHOWN if first else None,
        "next": last + 1 if last + 1 < topic.slots else None,
    }


def _row(one: SlotStats) -> dict[str, Any]:
    return {
        "slot": one.slot,
        "owner": one.worker,
        "owner_short": one.worker[:8],
        "since_ms": one.since_ms,
        "store": one.counts.store,
        "prepare": one.counts.prepare,
        "retry": one.counts.retry,
        "dead": one.counts.dead,
        "paused": one.counts.paused,
        "problem": one.problem,
    }


def _workers(operations: Operations, topic: Topic) -> list[dict[str, Any]]:
    try:
        everybody = operations.workers()
    except RmqError:
        everybody = []  # the head of the page shows why
    workers = []
    for one in everybody:
        worker = one.member.worker
        shared = topic.name in one.shared
        if shared or any(served.name == topic.name for served in worker.topics):
            workers.append(
                {
                    "short": worker.id[:8],
                    "host": worker.host,
                    "pid": worker.pid,
                    "threads": worker.threads,
                    "owned": topic.slots if shared else one.slots.get(topic.name, 0),
                    "since_ms": worker.started * 1000,
                }
            )
    return workers


__all__ = ["panel"]
