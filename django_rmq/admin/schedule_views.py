"""Schedules: when they run, pause, resume, run now, and edit when they run."""

from __future__ import annotations

from django import forms
from django.contrib import messages
from django.contrib.admin.utils import quote, unquote
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_rmq.admin.body_display import visible
from django_rmq.admin.labels import timing_text
from django_rmq.admin.page import Pages, page, show_outcomes, shown_errors
from django_rmq.core.model.schedule import CATCH_UP
from django_rmq.operations import Operations, Permission, ScheduleStats
from django_rmq.operations.health import is_schedule_late

CATCH_UPS = {"none": gettext_lazy("none"), "last": gettext_lazy("the last one"), "all": gettext_lazy("all")}


class ScheduleForm(forms.Form):
    """When a schedule runs."""

    cron = forms.CharField(
        label=gettext_lazy("Cron expression"),
        required=False,
        max_length=200,
        help_text=gettext_lazy("Minute, hour, day of the month, month, day of the week."),
    )
    every = forms.IntegerField(
        label=gettext_lazy("Interval in seconds"),
        required=False,
        min_value=1,
        help_text=gettext_lazy("Instead of a cron expression."),
    )
    timezone = forms.CharField(label=gettext_lazy("Time zone"), max_length=100)
    catch_up = forms.ChoiceField(
        label=gettext_lazy("Missed runs to make up for"), choices=[(one, CATCH_UPS[one]) for one in CATCH_UP]
    )


@page(Permission.VIEW)
def schedules_view(pages: Pages, request: HttpRequest, operations: Operations) -> HttpResponse:
    """Show all schedules, and do what was chosen for one of them."""
    if request.method == "POST":
        return _act(pages, request, operations)
    context = {
        "heading": _("Schedules"),
        "lines": [_line(pages, operations, one) for one in operations.schedules()],
        "now_ms": operations.broker.now_ms(),
        "urls": {"act": pages.url("schedules")},
    }
    return pages.render(request, "topic/schedules.html", context)


def _act(pages: Pages, request: HttpRequest, operations: Operations) -> HttpResponse:
    name, act = request.POST.get("name", ""), request.POST.get("act", "")
    with shown_errors(request):
        if act == "run":
            operations.run_schedule(name)
            show_outcomes(request, _("Run now"), {"stored": 1})
        elif act == "pause":
            show_outcomes(request, _("Pause"), {operations.pause_schedule(name): 1})
        elif act == "resume":
            show_outcomes(request, _("Resume"), {operations.resume_schedule(name): 1})
        elif act == "reset":
            show_outcomes(request, _("Reset"), {operations.reset_schedule(name): 1})
        else:
            messages.error(request, _("This action is not available for these messages."))
    return HttpResponseRedirect(pages.url("schedules"))


@page(Permission.VIEW, Permission.EDIT)
def schedule_view(pages: Pages, request: HttpRequest, operations: Operations, object_id: str) -> HttpResponse:
    """Change when a schedule runs."""
    one = operations.schedule(unquote(object_id))
    rule = one.schedule
    before = {
        "cron": rule.cron or "",
        "every": rule.every,
        "timezone": rule.timezone,
        "catch_up": rule.catch_up,
    }
    form = ScheduleForm(request.POST or None, initial=before, auto_id="rmq-%s", label_suffix="")

    def edit() -> None:
        changes = {**form.cleaned_data, "cron": form.cleaned_data["cron"].strip() or None}
        show_outcomes(request, _("Edit"), {operations.edit_schedule(one.name, changes): 1})

    note = _("The settings say: %(timing)s. What is changed here stays after a deployment.")
    return pages.form_page(
        request,
        form,
        edit,
        back_url=pages.url("schedules"),
        heading=_("Edit schedule %(name)s") % {"name": one.name},
        notes=[note % {"timing": timing_text(one.declared)}],
        submit=_("Save"),
    )


def _line(pages: Pages, operations: Operations, one: ScheduleStats) -> dict[str, object]:
    topic = operations.topics().get(one.topic)

    def may(needed: Permission) -> bool:
        return operations.actor.may(needed) if topic is None else operations.may(topic, needed)

    return {
        "row": one,
        "timing": visible(timing_text(one.schedule)),
        "catch_up": CATCH_UPS.get(one.schedule.catch_up, one.schedule.catch_up),
        "declared": visible(timing_text(one.declared)) if one.override else "",
        "is_late": is_schedule_late(one),
        "problem": visible(one.problem),
        "late_seconds": one.late_ms / 1000 if one.late_ms >= 1000 else 0,
        "url": "" if topic is None else pages.url("change", quote(one.topic)),
        "edit_url": pages.url("schedule", quote(one.name)),
        "may": {
            "pause": may(Permission.PAUSE),
            "run": may(Permission.SEND),
            "edit": may(Permission.EDIT),
        },
    }
