"""The panel of findings on the dashboard and the page of a topic: what needs attention, worst first, with links.

``operations.health`` judges, and says in which words.
"""

from __future__ import annotations

from dataclasses import dataclass

from django.contrib.admin.utils import quote
from django.templatetags.static import static
from django.utils.translation import ngettext

from django_rmq.admin.body_display import visible
from django_rmq.admin.page import Pages
from django_rmq.operations import Health
from django_rmq.operations.health import Finding, Severity

SHOWN = 3
"""How many findings of one check and severity are listed; the others are counted, and can be opened."""

MOST_OPENED = 50
"""How many of these others can be opened."""

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
    """Whether it needs attention."""
    others: tuple[FindingLine, ...] = ()
    """The findings that the sentence counts, so that a person can open them."""


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
    lines = list[FindingLine]()
    of_kind: dict[tuple[bool, Severity, str], list[Finding]] = {}
    for one in findings:
        of_kind.setdefault((one.is_intended, one.severity, one.name), []).append(one)
    for alike in of_kind.values():
        lines += [_line(pages, one) for one in alike[:SHOWN]]
        if others := alike[SHOWN:]:
            lines.append(_counted(pages, others))
    count = sum(one.needs_attention for one in findings)
    return FindingsPanel(
        lines, count, static(f"django_rmq/findings-{min(count, MOST_COUNTED + 1)}.svg") if count else ""
    )


def _line(pages: Pages, one: Finding) -> FindingLine:
    return FindingLine(one.topic, visible(one.text), _url(pages, one), one.needs_attention)


def _counted(pages: Pages, others: list[Finding]) -> FindingLine:
    """Return the line that counts findings of one kind."""
    text = ngettext("and %(count)s more like these", "and %(count)s more like these", len(others)) % {
        "count": len(others)
    }
    opened = [_line(pages, one) for one in others[:MOST_OPENED]]
    if left := len(others) - len(opened):
        listed_by = ngettext(
            "and %(count)s more, which manage.py rmqhealth -v 2 lists",
            "and %(count)s more, which manage.py rmqhealth -v 2 lists",
            left,
        ) % {"count": left}
        opened.append(FindingLine("", listed_by, "", opened[0].is_alarm))
    return FindingLine("", text, "", opened[0].is_alarm, tuple(opened))


def _url(pages: Pages, one: Finding) -> str:
    where = one.check.page
    if name := _SITE_PAGES.get(where):
        return pages.url(name)
    if not one.topic:
        return ""
    topic = pages.url("change", quote(one.topic))
    return topic if where == "topic" else f"{topic}?tab={where}"
