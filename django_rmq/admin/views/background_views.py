"""The page of the actions that workers do in the background and of the deletions that can be undone, and the undo itself."""

from __future__ import annotations

from django.contrib import messages
from django.contrib.admin.utils import quote
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.loader import render_to_string
from django.utils.formats import number_format
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_rmq.admin.body_display import readable
from django_rmq.admin.views.page import (
    Pages,
    back_of,
    live_page,
    outcomes_sentence,
    page,
    show_outcomes,
    show_problems,
    shown_errors,
)
from django_rmq.core.model.stored_actions import ActionProgress
from django_rmq.core.model.topic import Topic
from django_rmq.operations import Deletion, Operations, Permission, undo
from django_rmq.operations.authorization import PERMISSION_OF

KINDS = {
    "replay": gettext_lazy("Replay all"),
    "delete": gettext_lazy("Delete all matches"),
    "purge": gettext_lazy("Purge"),
}

_DELETION_KINDS = {"delete": gettext_lazy("Delete"), "purge": gettext_lazy("Purge")}

ACTION_STATES = {
    "running": gettext_lazy("runs"),
    "waiting": gettext_lazy("waits for a worker"),
    "stopping": gettext_lazy("is being stopped"),
    "done": gettext_lazy("done"),
    "stopped": gettext_lazy("stopped"),
    "failed": gettext_lazy("failed"),
}


def _stop(pages: Pages, request: HttpRequest, operations: Operations) -> HttpResponse:
    """Stop the action that was chosen."""
    with shown_errors(request):
        operations.stop_action(request.POST.get("action", ""))
        messages.success(request, _("The action was stopped. What it has done stays done."))
    return HttpResponseRedirect(pages.url("background"))


@page(Permission.VIEW)
def undo_view(pages: Pages, request: HttpRequest, operations: Operations) -> HttpResponse:
    """Bring back what an action has deleted; then show the page from which that was asked."""
    topic, leave = request.POST.get("topic", ""), pages.url("background")
    if topic:
        leave = f"{pages.url('change', quote(topic))}?{back_of(request.POST.get('back'))}"
    if request.method == "POST":
        with shown_errors(request):
            progress = operations.undo(request.POST.get("deletion", "")).result()
            show_outcomes(request, _("Undo"), progress.outcomes)
            show_problems(request, progress)
    return HttpResponseRedirect(leave)


def undo_form(pages: Pages, request: HttpRequest, deletion: str, topic: Topic, back: str) -> str:
    """Return the form that undoes a deletion and leads back to the list."""
    context = {"deletion": deletion, "undo_url": pages.url("undo"), "topic": topic.name, "back": back}
    return render_to_string("admin/django_rmq/topic/_undo.html", context, request)


def kept_sentence() -> str:
    """Return what the question says of messages that are deleted."""
    return _(
        "Deleted messages can be brought back for one hour: the first %(number)s of an action, and up to %(size)s MB. "
        "Those that run cannot."
    ) % {
        "number": number_format(undo.MOST_MESSAGES, force_grouping=True),
        "size": undo.MOST_BYTES // 1024**2,
    }


def _background(pages: Pages, request: HttpRequest, operations: Operations) -> dict[str, object]:
    """Return the actions in the background, and the deletions that can be undone."""
    actions, now_ms = operations.background_actions(), operations.broker.now_ms()
    return {
        "heading": _("In the background"),
        "now_ms": now_ms,
        "lines": [_line(pages, one, now_ms) for one in reversed(actions)],
        "stop_url": pages.url("background"),
        "undo_url": pages.url("undo"),
        "kept": kept_sentence(),
        "deletions": [_deletion_line(pages, operations, one) for one in operations.undoable()],
        "urls": {"live": pages.url("background_live")},
    }


background_view, background_live_view = live_page(
    _background, "topic/background.html", "topic/_background.html", act=_stop
)


def _deletion_line(pages: Pages, operations: Operations, one: Deletion) -> dict[str, object]:
    topic = operations.config.topics.get(one.topic)
    return {
        "row": readable(one),
        "kind": _DELETION_KINDS[one.kind],
        "url": pages.url("change", quote(one.topic)),
        "may_undo": topic is not None and operations.may(topic, PERMISSION_OF[one.kind]),
    }


def _line(pages: Pages, one: ActionProgress, now_ms: int) -> dict[str, object]:
    action, state = one.action, one.state(now_ms)
    return {
        "row": readable(one),
        "action": readable(action),
        "kind": KINDS[action.kind],
        "url": pages.url("change", quote(action.topic)),
        "state": state,
        "state_text": ACTION_STATES[state],
        "may_stop": state in ("running", "waiting"),
        "outcomes": outcomes_sentence(one.outcomes) if one.done else "",
        "rate": one.rate(now_ms),
        "seconds_left": one.seconds_left(now_ms),
    }
