"""The history of a topic, as charts."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from django_rmq.admin import charts
from django_rmq.admin.views.page import number
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import WrongType
from django_rmq.operations import Operations


def panel(request: HttpRequest, operations: Operations, topic: Topic) -> dict[str, Any]:
    """Return the content for the requested hours."""
    kept = operations.config.history_retention
    offered = charts.spans(kept or 0.0)
    wanted = number(request.GET.get("hours"))
    hours = wanted if wanted in offered else min(6, offered[-1])
    try:
        minutes, problem = charts.read(operations, topic, hours), ""
    except WrongType as error:
        minutes, problem = [], str(error)
    sampled = any(minute.depth for minute in minutes)
    if problem:
        note = problem
    elif not kept:
        note = _('No history is kept: RMQ["HISTORY_RETENTION"] is None.')
    elif not sampled:
        note = _("No samples in this period. Workers sample once a minute.")
    else:
        note = _("Sampled by the workers once a minute. Gaps are times without a worker.")
    return {
        "panel": "admin/django_rmq/topic/_history.html",
        "spans": [
            {
                "hours": span,
                "current": span == hours,
                "label": ngettext("%(count)s hour", "%(count)s hours", span) % {"count": span}
                if span < 72
                else ngettext("%(count)s day", "%(count)s days", span // 24) % {"count": span // 24},
            }
            for span in offered
        ],
        "charts": charts.charts(topic, minutes) if sampled else [],
        "history_note": note,
    }


__all__ = ["panel"]
