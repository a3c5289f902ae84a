"""Filters and tags of the admin's templates: how times, durations and numbers are written, small lines, and query strings."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Protocol

from django import template
from django.utils import timezone
from django.utils.formats import date_format, number_format
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from django_rmq.core.model.scores import LAST_INSTANT_MS
from django_rmq.operations.health import readable_duration

register = template.Library()


class SmallLine(Protocol):
    """What is drawn in a cell of a table."""

    path: str
    width: int
    height: int


@register.filter
def moment(ms: float | None) -> datetime | None:
    """Return the instant ``ms`` (since the epoch) on the viewer's clock. None: there is no such instant."""
    if ms is None or not 0 <= ms < LAST_INSTANT_MS:
        return None
    return timezone.localtime(datetime.fromtimestamp(ms / 1000, UTC))


duration = register.filter("duration", readable_duration)


@register.filter
def number(value: float | None) -> str:
    """Return a count with groups of digits; a small one with a fraction."""
    if value is None:
        return "–"
    if isinstance(value, float):
        value = round(value) if abs(value) >= 9.95 or value == int(value) else round(value, 1)
    if isinstance(value, int) and 0 <= value < 100:
        # A table has hundreds of small counts, and no language writes them in another way.
        return str(value)
    return number_format(value, force_grouping=True)


@register.simple_tag
def when(ms: float | None, now_ms: float) -> str | SafeString:
    """Return the distance of ``ms`` from now, with the instant itself as a tooltip."""
    instant = moment(ms)
    if ms is None or instant is None:
        return "–"
    seconds = (ms - now_ms) / 1000
    if abs(seconds) < 1:
        words = _("now")
    else:
        words = (_("in %(time)s") if seconds > 0 else _("%(time)s ago")) % {"time": duration(seconds)}
    exact = date_format(instant, "DATETIME_FORMAT")
    return format_html(
        '<time datetime="{}" title="{}">{}</time>', instant.isoformat(timespec="milliseconds"), exact, words
    )


@register.simple_tag
def instant(ms: float | None) -> str | SafeString:
    """Return the instant ``ms`` to the millisecond, on the viewer's clock."""
    at = moment(ms)
    if at is None:
        return "–"
    text = f"{date_format(at, 'Y-m-d H:i:s')}.{at.microsecond // 1000:03d}"
    return format_html('<time datetime="{}">{}</time>', at.isoformat(timespec="milliseconds"), text)


@register.simple_tag
def sparkline(spark: SmallLine | None, kind: str, label: str) -> SafeString:
    """Return a small line, or nothing. A page has hundreds of them, and a template for it costs three times as much."""
    if spark is None:
        return SafeString("")
    return format_html(
        '<svg class="rmq-spark rmq-kind-{}" viewBox="0 0 {} {}" role="img" aria-label="{}" preserveAspectRatio="none">'
        '<path class="rmq-line" d="{}"></path></svg>',
        *(kind, spark.width, spark.height, label, spark.path),
    )


@register.simple_tag(takes_context=True)
def with_query(context: dict[str, Any], **changes: object) -> str:
    """Return the page's own query string with some of its parameters set, or left out where None."""
    query = context["request"].GET.copy()
    for name, value in changes.items():
        query.pop(name, None)
        if value is not None:
            query[name] = value
    return f"?{query.urlencode()}"
