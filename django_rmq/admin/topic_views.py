"""The pages of a topic: ``change_view`` is the main one, with its figures above, and below them what a tab shows.

A tab shows the messages of one state (``message_views``), the slots with their workers, the history or the settings, whose
limits ``limits_view`` changes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from urllib.parse import urlencode

from django.contrib import messages
from django.contrib.admin.utils import quote
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.utils.formats import number_format
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from django_rmq.admin import charts, message_views
from django_rmq.admin.audit_log import translate_record
from django_rmq.admin.body_display import visible
from django_rmq.admin.dashboard import pinned
from django_rmq.admin.findings_panel import findings_panel
from django_rmq.admin.forms import LimitsForm, limit_text
from django_rmq.admin.labels import STATES, StateLabel, state_label, timing_text
from django_rmq.admin.page import Pages, back_of, number, topic_page
from django_rmq.admin.topic_figures import TopicRow, read_recent, row_of
from django_rmq.core.model.changed_limits import LIMITS
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import RmqError, WrongType
from django_rmq.operations import Operations, Permission
from django_rmq.operations.authorization import PERMISSION_OF

SLOTS_SHOWN = 256


def slots_panel(request: HttpRequest, operations: Operations, topic: Topic) -> dict[str, object]:
    """Return the content for a part of the slots."""
    first = number(request.GET.get("first")) // SLOTS_SHOWN * SLOTS_SHOWN
    first = first if first < topic.slots else 0
    page = operations.slots(topic.name, first, SLOTS_SHOWN)
    last, slots = first + len(page.rows) - 1, page.topic.slots
    note = _("The fullest slot is %(times)s times as full as the mean.") % {
        "times": number_format(round(page.skew, 1))
    }
    return {
        "panel": "admin/django_rmq/topic/_slots.html",
        "workers": _workers(operations, topic),
        "workers_problem": page.workers_problem,
        "slots": page.rows,
        "fullest": max((one.counts.store for one in page.rows), default=0) or 1,
        "skew_note": note if page.skew else _("All slots are empty."),
        "part_note": _("Slots %(first)s to %(last)s of %(slots)s.")
        % {"first": first, "last": last, "slots": slots}
        if len(page.rows) < slots
        else "",
        "previous": first - SLOTS_SHOWN if first else None,
        "next": last + 1 if last + 1 < slots else None,
    }


def _workers(operations: Operations, topic: Topic) -> list[dict[str, object]]:
    try:
        everybody = operations.workers()
    except RmqError:
        everybody = []  # the page shows why, in their place
    workers = []
    for one in everybody:
        worker = one.member.worker
        shared = topic.name in one.shared
        if shared or any(served.name == topic.name for served in worker.topics):
            owned = topic.slots if shared else one.slots.get(topic.name, 0)
            workers.append({"worker": worker, "owned": owned, "since_ms": worker.started * 1000})
    return workers


def history_panel(request: HttpRequest, operations: Operations, topic: Topic) -> dict[str, object]:
    """Return the content for the requested hours."""
    retention = operations.config.history_retention
    offered = charts.spans(retention or 0.0)
    asked_hours = number(request.GET.get("hours"))
    hours = asked_hours if asked_hours in offered else min(6, offered[-1])
    try:
        minutes, problem = charts.read_history(operations, topic, hours), ""
    except WrongType as error:
        minutes, problem = [], str(error)
    sampled = any(minute.depth for minute in minutes)
    if problem:
        note = problem
    elif not retention:
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
        "annotated": charts.annotated(operations, charts.charts(topic, minutes) if sampled else [], [topic]),
        "history_note": note,
    }


def settings_panel(pages: Pages, operations: Operations, topic: Topic) -> dict[str, object]:
    """Return the content about the rules of a topic."""
    card = operations.topic_card(topic.name)
    limits = card.limits

    def declared(name: str) -> str:
        return limit_text(getattr(limits.declared, name)) if name in limits.different else ""

    return {
        "panel": "admin/django_rmq/topic/_settings.html",
        "limits": {
            "rate": limit_text(limits.topic.max_rate),
            "declared_rate": declared("max_rate"),
            "in_flight": limit_text(limits.topic.max_in_flight),
            "declared_in_flight": declared("max_in_flight"),
            "changed": limits.changed is not None,
            "by": visible(limits.changed.by) if limits.changed is not None else "",
            "at_ms": limits.changed.at_ms if limits.changed is not None else None,
        },
        "settings": card.settings,
        "listener": card.listener,
        "schedules": [{"row": one, "timing": timing_text(one.schedule)} for one in card.schedules],
        "schedules_url": pages.url("schedules"),
        "problems": card.problems,
        "limits_url": pages.url("limits", quote(topic.name)),
    }


@topic_page(Permission.VIEW, Permission.PAUSE)
def limits_view(pages: Pages, request: HttpRequest, operations: Operations, topic: Topic) -> HttpResponse:
    """Change the limits of a topic at run time, or return it to its settings."""
    back_url = f"{pages.url('change', quote(topic.name))}?tab=settings"
    if request.method == "POST" and request.POST.get("act") == "reset":
        operations.reset_limits(topic.name)
        messages.success(
            request, _("The limits are those of the settings. Workers apply them within five seconds.")
        )
        return HttpResponseRedirect(back_url)
    form = LimitsForm(operations.topic_limits(topic.name), request.POST if request.method == "POST" else None)

    def change() -> None:
        if form.values:
            operations.change_limits(topic.name, form.values)
        else:
            operations.reset_limits(topic.name)
        messages.success(request, _("The limits were changed. Workers apply them within five seconds."))

    return pages.form_page(
        request,
        form,
        change,
        back_url=back_url,
        topic=topic,
        heading=_("Limits of %(topic)s") % {"topic": topic.name},
        here=_("Limits"),
        notes=[_("What was changed here takes precedence over the settings, also after a deployment.")],
        submit=_("Save"),
    )


@topic_page(Permission.VIEW)
def change_view(pages: Pages, request: HttpRequest, operations: Operations, topic: Topic) -> HttpResponse:
    """Show a topic: the list of one state, or its slots, its history or its settings."""
    context = _topic(pages, request, operations, topic)
    tab = str(context["tab"])
    context["is_pinned"] = topic.name in pinned(request)
    if tab in STATES:
        context |= message_views.panel(pages, request, operations, topic, tab)
    return pages.render(request, "topic/change_form.html", context, topic)


@topic_page(Permission.VIEW)
def history_view(pages: Pages, request: HttpRequest, operations: Operations, topic: Topic) -> HttpResponse:
    """Show the actions of users on a topic, like Django's own page, in the language of the reader."""
    response = pages.history_view(request, quote(topic.name))
    if isinstance(response, TemplateResponse) and response.context_data:
        for entry in response.context_data["action_list"]:
            entry.change_message = translate_record(entry.change_message)
    return response


@topic_page(Permission.VIEW)
def live_view(pages: Pages, request: HttpRequest, operations: Operations, topic: Topic) -> HttpResponse:
    """Return the current figures of a topic, with its slots or history. Lists of messages and settings are not refreshed."""
    context = _topic(pages, request, operations, topic)
    if context["tab"] in (*STATES, "settings"):
        context["panel"] = ""
    return pages.fragment(request, "topic/_live.html", context)


def _topic(pages: Pages, request: HttpRequest, operations: Operations, topic: Topic) -> dict[str, object]:
    figures = operations.topic(topic.name)
    places = pages.places(topic.name)
    row = row_of(figures, read_recent(operations, [figures], {topic.name})[topic.name], places["topic"])
    asked_tab = request.GET.get("tab", "")
    tab = asked_tab if asked_tab in (*STATES, "slots", "history", "settings") else "store"
    query = {"tab": tab} | {name: request.GET[name][:8] for name in ("hours", "first") if name in request.GET}
    places["live"] += f"?{urlencode(query)}"
    limits = operations.topic_limits(topic.name)
    context: dict[str, object] = {
        # The badges show the limits in effect.
        "topic": replace(topic, **{name: getattr(limits.topic, name) for name in LIMITS}),
        "limits_differ": bool(limits.different),
        "row": row,
        "now_ms": figures.now_ms,
        "tab": tab,
        "tabs": _tabs(row, tab),
        "urls": places,
        "findings": findings_panel(pages, operations.shared_health([figures], figures.workers_problem)),
        "back": back_of(request.GET.urlencode()),
        "may": {
            "send": operations.may(topic, Permission.SEND),
            "pause": operations.may(topic, PERMISSION_OF["pause"]),
        },
        "notes": [
            _("Only %(looked)s of %(slots)s slots were read.")
            % {"looked": figures.looked_at, "slots": topic.slots}
        ]
        if row.is_partial
        else [],
        "panel": "admin/django_rmq/topic/_messages.html",
    }
    if tab == "slots":
        context |= slots_panel(request, operations, topic)
    elif tab == "history":
        context |= history_panel(request, operations, topic)
    elif tab == "settings":
        context |= settings_panel(pages, operations, topic)
    return context


@dataclass(frozen=True, slots=True)
class Tab:
    """A tab of a topic."""

    label: StateLabel
    url: str
    current: bool
    count: int | None
    alarm: bool


def _tabs(row: TopicRow, current: str) -> list[Tab]:
    counts = {state: getattr(row.depth, state) for state in ("store", "prepare", "retry", "dead")}
    if row.depth.claimed or current == "claim":
        counts["claim"] = row.depth.claimed
    labels = {state: state_label(state) for state in counts} | {
        "slots": StateLabel(_("Consumers and slots"), ""),
        "history": StateLabel(_("History"), ""),
        "settings": StateLabel(_("Settings"), ""),
    }
    return [
        Tab(
            label,
            f"{row.url}?tab={name}",
            name == current,
            counts.get(name),
            name == "dead" and row.depth.dead > 0,
        )
        for name, label in labels.items()
    ]
