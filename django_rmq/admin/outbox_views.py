"""The outbox: what waits in the databases to be sent, what was refused, and a retry or deletion of either."""

from __future__ import annotations

import time

from django.contrib import messages
from django.contrib.admin.utils import quote
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.formats import number_format
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from django_rmq.admin.body_display import summary, visible
from django_rmq.admin.page import Pages, page, show_outcomes, shown_errors
from django_rmq.operations import Operations, OutboxRow, Permission
from django_rmq.operations.health import is_old_in_outbox
from django_rmq.operations.outbox import ACTS

ROWS_SHOWN = 100
"""The number of rows on the page: the oldest."""

ACTIONS = {
    "send": gettext_lazy("send"),
    "ensure": gettext_lazy("ensure"),
    "remove": gettext_lazy("remove"),
    "cancel": gettext_lazy("cancel"),
}


@page(Permission.VIEW)
def outbox_view(pages: Pages, request: HttpRequest, operations: Operations) -> HttpResponse:
    """Show the oldest rows of the outbox, and do what was chosen for some of them."""
    if request.method == "POST":
        return _act(pages, request, operations)
    state, topic = request.GET.get("state", ""), request.GET.get("topic", "").replace("\0", "")[:100]
    state = state if state in ("waiting", "refused") else ""
    waits, problems = operations.outbox_as_known()
    names = [one.topic for one in waits]
    chosen, unread = operations.outbox_rows(
        [topic] if topic else None, refused={"waiting": False, "refused": True}.get(state), limit=ROWS_SHOWN
    )
    acts_of = {one.topic: _acts_of(operations, one.topic) for one in chosen}
    oldest = max(((one.oldest_ms or 0) / 1000 for one in waits), default=0.0)
    context = {
        "heading": _("Outbox"),
        "waiting": sum(one.messages for one in waits),
        "refused": sum(one.refused for one in waits),
        "oldest_seconds": oldest,
        "is_old": is_old_in_outbox(oldest),
        "lines": [_line(pages, operations, one) | {"acts": acts_of[one.topic]} for one in chosen],
        "is_cut": len(chosen) == ROWS_SHOWN,
        "problems": list(dict.fromkeys([*problems, *unread])),
        "state": state,
        "chosen_topic": topic,
        "names": names if topic in names or not topic else [*names, topic],
        "now_ms": time.time() * 1000,
        "acts": {act for acts in acts_of.values() for act in acts},
        "urls": {"act": pages.url("outbox")},
    }
    return pages.render(request, "topic/outbox.html", context)


def _acts_of(operations: Operations, name: str) -> list[str]:
    """Return what the actor may do with rows of a topic, which the settings may no longer have."""
    known = {act: operations.known([name], permission) for act, permission in ACTS.items()}
    return [act for act, permission in ACTS.items() if operations.actor.may(permission) and known[act]]


def _act(pages: Pages, request: HttpRequest, operations: Operations) -> HttpResponse:
    leave = pages.url("outbox")
    ids = list(dict.fromkeys(request.POST.getlist("id")))[:ROWS_SHOWN]
    act = request.POST.get("act", "")
    if act not in ACTS:
        messages.error(request, _("This action is not available for these messages."))
    elif not ids:
        messages.warning(request, _("No message was selected."))
    elif act == "delete" and "confirmed" not in request.POST:
        operations.actor.require(ACTS[act])
        question = ngettext(
            "Delete %(count)s message from the outbox? It will never be sent.",
            "Delete %(count)s messages from the outbox? They will never be sent.",
            len(ids),
        ) % {"count": number_format(len(ids))}
        carried = [("act", "delete"), *(("id", one) for one in ids)]
        return pages.confirm_page(
            request, question, carried, act=leave, back_url=leave, heading=_("Delete"), danger=True
        )
    else:
        with shown_errors(request):
            if act == "retry":
                show_outcomes(request, _("Retry"), operations.retry_outbox(ids))
            else:
                show_outcomes(request, _("Delete"), operations.delete_outbox(ids))
    return HttpResponseRedirect(leave)


def _line(pages: Pages, operations: Operations, one: OutboxRow) -> dict[str, object]:
    topic = operations.topics().get(one.topic)
    if one.raw is None or topic is None:
        text = _("%(size)s bytes") % {"size": one.size}
    elif one.act in ("remove", "cancel") and topic.keyed:
        text = visible(one.raw.decode("utf-8", "backslashreplace"))
    else:
        text = summary(topic, one.raw, key=one.key)
    return {
        "row": one,
        "summary": text or _("(empty)"),
        "error": visible(one.error[:200]),
        "action": ACTIONS.get(one.act, one.act),
        "url": "" if topic is None else pages.url("change", quote(one.topic)),
    }
