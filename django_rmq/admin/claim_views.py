"""The page of what Spark queries hold of a topic, and the return of the claims of one of them."""

from __future__ import annotations

import time

from django.contrib import messages
from django.contrib.admin.utils import quote
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.formats import number_format
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from django_rmq.admin.body_display import visible
from django_rmq.admin.labels import CLAIM_STATES
from django_rmq.admin.page import Pages, show_outcomes, show_problems, topic_page
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import InvalidRequest, OperationRefused
from django_rmq.operations import ClaimStats, Operations, Permission
from django_rmq.operations.authorization import PERMISSION_OF

MOST_SECONDS = 10.0
"""Seconds for which one request returns messages of claims."""

CLAIM_ACTS = {"return": gettext_lazy("Return"), "spend": gettext_lazy("Return with a retry used")}


@topic_page(Permission.VIEW)
def claims_view(pages: Pages, request: HttpRequest, operations: Operations, topic: Topic) -> HttpResponse:
    """Show what Spark queries hold of a topic, and return the claims of one of them."""
    places = pages.places(topic.name)
    try:
        claims = operations.claims(topic.name)
        if request.method == "POST":
            return _act_on_claims(pages, request, operations, topic, claims)
    except (InvalidRequest, OperationRefused) as error:
        messages.error(request, str(error))
        # The page of the claims is refused as well, and would lead to itself without an end.
        place = "topic" if isinstance(error, OperationRefused) else "claims"
        return HttpResponseRedirect(places[place])
    context = {
        "heading": _("Claims"),
        "lines": [
            {"row": one, "name": visible(one.consumer), "state": CLAIM_STATES.get(one.state, one.state)}
            for one in claims
        ],
        "now_ms": time.time() * 1000,
        "acts": CLAIM_ACTS if operations.may(topic, PERMISSION_OF["return claims"]) else {},
        "urls": {"topic": places["topic"], "act": places["claims"]},
    }
    return pages.render(request, "topic/claims.html", context, topic)


def _act_on_claims(
    pages: Pages, request: HttpRequest, operations: Operations, topic: Topic, claims: list[ClaimStats]
) -> HttpResponse:
    """Return the claims of a consumer, after a question."""
    name, consumer = request.POST.get("act", ""), request.POST.get("consumer", "")
    claims_url = pages.url("claims", quote(topic.name))
    held = [one for one in claims if one.consumer == consumer]
    if name not in CLAIM_ACTS:
        messages.error(request, _("This action is not available for these messages."))
    elif not held:
        messages.warning(request, _("This query no longer holds anything."))
    elif "confirmed" not in request.POST:
        operations.declared(topic.name, PERMISSION_OF["return claims"])
        return pages.confirm_page(
            request,
            _claims_question(name, consumer, sum(one.messages for one in held)),
            [("act", name), ("consumer", consumer)],
            act=claims_url,
            back_url=claims_url,
            topic=topic,
            heading=CLAIM_ACTS[name],
        )
    else:
        run = operations.return_claims(topic.name, consumer, spent=name == "spend")
        until = time.monotonic() + MOST_SECONDS
        for progress in run:
            if time.monotonic() > until and not progress.is_complete:
                messages.warning(request, _("Not all are returned yet. Do it again."))
                break
        run.close()
        show_outcomes(request, str(CLAIM_ACTS[name]), run.progress.outcomes)
        show_problems(request, run.progress)
    return HttpResponseRedirect(claims_url)


def _claims_question(name: str, consumer: str, count: int) -> str:
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
