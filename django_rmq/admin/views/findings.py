"""The findings above the figures of a page: what needs attention, worst first, with links."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from django.templatetags.static import static
from django.utils.translation import ngettext

from django_rmq.admin.body_display import visible
from django_rmq.admin.views.page import Pages
from django_rmq.operations import Health
from django_rmq.operations.health import Finding, Severity

SHOWN = 3
"""How many findings of one check and severity are listed; the others are counted."""

MOST_COUNTED = 9
"""The largest number for which there is an icon; that of ten says "9+"."""

_SITE_PAGES = {
    "dashboard": "changelist",
    "servers": "servers",
    "workers": "workers",
    "outbox": "outbox",
    "running": "running",
    "schedules": "schedules",
}
"""Page of a check, if it is not one of a topic → the name of its address."""


@dataclass(frozen=True, slots=True)
class FindingLine:
    """One sentence of the findings."""

    topic: str
    text: str
    url: str
    """The page that explains it, or where it is repaired; empty if there is none."""
    is_alarm: bool
    """Whether it needs attention. What a person has done on purpose does not."""


@dataclass(frozen=True, slots=True)
class FindingsPanel:
    """What is to be said of the queues in a few sentences."""

    lines: list[FindingLine]
    count: int
    """How many findings need attention, also those that are not listed."""
    icon: str
    """The address of the icon with the count; empty if nothing needs attention."""


def findings_panel(pages: Pages, health: Health) -> FindingsPanel:
    """Return what a page says about these findings."""
    findings = sorted(health.findings, key=lambda one: one.is_intended)
    seen: Counter[tuple[bool, Severity, str]] = Counter()
    lines = list[FindingLine]()
    totals = Counter(_kind(one) for one in findings)
    for one in findings:
        kind = _kind(one)
        seen[kind] += 1
        if seen[kind] <= SHOWN:
            lines.append(FindingLine(one.topic, visible(one.text), _url(pages, one), not one.is_intended))
        elif seen[kind] == totals[kind]:
            more = totals[kind] - SHOWN
            text = ngettext(
                "and %(count)s more like these (manage.py rmqhealth -v 2 lists all)",
                "and %(count)s more like these (manage.py rmqhealth -v 2 lists all)",
                more,
            ) % {"count": more}
            lines.append(FindingLine("", text, "", not one.is_intended))
    count = sum(not one.is_intended for one in findings)
    return FindingsPanel(
        lines, count, static(f"django_rmq/findings-{min(count, MOST_COUNTED + 1)}.svg") if count else ""
    )


def _kind(one: Finding) -> tuple[bool, Severity, str]:
    return one.is_intended, one.severity, one.name


def _url(pages: Pages, one: Finding) -> str:
    where = one.check.page
    if name := _SITE_PAGES.get(where):
        return pages.url(name)
    if not one.topic:
        return ""
    topic = pages.places(one.topic).topic
    return topic if where == "topic" else f"{topic}?tab={where}"
