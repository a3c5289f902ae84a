"""The claims of Spark queries on a topic, and the return of those that no query will end."""

from __future__ import annotations

import time

from django.contrib import messages
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.formats import number_format
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from django_rmq.admin.body_display import visible
from django_rmq.admin.dashboard_rows import PageAddresses
from django_rmq.admin.labels import CLAIM_STATES
from django_rmq.admin.views.page import Pages, tell, tell_problems, topic_page
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import CallerError, NotPermitted, OperationRefused
from django_rmq.operations import ClaimStats, Operations, Permission

MOST_SECONDS = 10.0
"""Seconds for which one request returns messages."""

ACTS = {"return": gettext_lazy("Return"), "spend": gettext_lazy("Return with a retry used")}


@topic_page(Permission.VIEW)
def claims_view(pages: Pages, request: HttpRequest, operations: Operations, topic: Topic) -> HttpResponse:
    """Show what Spark queries hold of a topic, and return the claims of one of them."""
    places = pages.places(topic.name)
    try:
        found = operations.claims(topic.name)
        if request.method == "POST":
            return _act(pages, request, operations, topic, found)
    except CallerError as error:
        if isinstance(error, NotPermitted):
            raise
        messages.error(request, str(error))
        return HttpResponseRedirect(places.topic if isinstance(error, OperationRefused) else places.claims)
    context = {
        "heading": _("Claims"),
        "lines": [
            {"row": one, "name": visible(one.consumer), "state": CLAIM_STATES.get(one.state, one.state)}
            for one in found
        ],
        "now_ms": time.time() * 1000,
        "acts": ACTS if operations.may(topic, Permission.REPLAY) else {},
        "urls": PageAddresses(topic=places.topic, act=places.claims),
    }
    return pages.render(request, "topic/claims.html", context, topic)


def _act(
    pages: Pages, request: HttpRequest, operations: Operations, topic: Topic, found: list[ClaimStats]
) -> HttpResponse:
    """Return the claims of a consumer, after a question."""
    name, consumer = request.POST.get("act", ""), request.POST.get("consumer", "")
    places = pages.places(topic.name)
    held = [one for one in found if one.consumer == consumer]
    if name not in ACTS:
        messages.error(request, _("This action is not available for these messages."))
    elif not held:
        messages.warning(request, _("This query no longer holds anything."))
    elif "confirmed" not in request.POST:
        operations.declared(topic.name, Permission.REPLAY)
        context = {
            "heading": ACTS[name],
            "question": _question(name, consumer, sum(one.messages for one in held)),
            "carried": [("act", name), ("consumer", consumer)],
            "submit": _("Yes, do it"),
            "urls": PageAddresses(topic=places.topic, act=places.claims),
            "back_url": places.claims,
        }
        return pages.render(request, "topic/confirm.html", context, topic)
    else:
        run = operations.return_claims(topic.name, consumer, spent=name == "spend")
        until = time.monotonic() + MOST_SECONDS
        for progress in run:
            if time.monotonic() > until and not progress.is_complete:
                messages.warning(request, _("Not all are returned yet. Do it again."))
                break
        run.close()
        tell(request, str(ACTS[name]), run.progress.outcomes)
        tell_problems(request, run.progress)
    return HttpResponseRedirect(places.claims)


def _question(name: str, consumer: str, count: int) -> str:
    given = {"number": number_format(count, force_grouping=True), "consumer": visible(consumer)}
    if name == "spend":
        text = ngettext(
            "Return %(number)s message of %(consumer)s, with a retry used? Stop the query first.",
            "Return %(number)s messages of %(consumer)s, with a retry of each used? Stop the query first.",
            count,
        )
    else:
        text = ngettext(
            "Return %(number)s message of %(consumer)s? Stop the query first.",
            "Return %(number)s messages of %(consumer)s? Stop the query first.",
            count,
        )
    return text % given
