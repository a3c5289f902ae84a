"""Actions on messages or on a topic: the question, the work in slices, the result, and the undo.

Here is also the page of the actions that workers do in the background, and of the deletions that can be undone. The LogEntry of
an action that takes several requests is kept in the user's session until the action ends.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import NamedTuple
from uuid import uuid4

from django.contrib import messages
from django.contrib.admin.utils import quote
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, QueryDict
from django.template.loader import render_to_string
from django.utils.formats import number_format
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from django_rmq.admin.body_display import readable
from django_rmq.admin.forms import PARAMETERS
from django_rmq.admin.labels import OUTCOMES
from django_rmq.admin.message_views import cause_text, filter_form, list_line
from django_rmq.admin.page import (
    Pages,
    back_of,
    live_page,
    number,
    outcomes_sentence,
    page,
    show_outcomes,
    show_problems,
    shown_errors,
    topic_page,
)
from django_rmq.admin.page_actions import ACTS, Chosen, PageAction, QuestionForm
from django_rmq.core.model.stored_actions import ActionProgress
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import InvalidRequest, MessageGone, OperationRefused
from django_rmq.operations import BulkProgress, Deletion, Limits, Operations, Permission, Trace, undo
from django_rmq.operations.authorization import PERMISSION_OF

_TRACES = "rmq_traces"
_MOST_TRACES = 20
"""The number of actions in progress in one session; the rest of an older one gets a LogEntry of its own."""


def _begun_trace(request: HttpRequest, run: str) -> Trace:
    """Return the trace of the action that ``run`` names, or a new one."""
    entry, outcomes, undo = request.session.get(_TRACES, {}).get(run, (None, {}, ""))
    return Trace(entry, dict(outcomes), undo)


def _keep_trace(request: HttpRequest, run: str, trace: Trace) -> str:
    """Store the trace of an action that goes on; return the name under which the next request finds it."""
    run = run or uuid4().hex
    traces = {name: value for name, value in request.session.get(_TRACES, {}).items() if name != run}
    # Django stores a session only if a key of it is set: a change within the old value would be lost.
    request.session[_TRACES] = {
        **dict(list(traces.items())[1 - _MOST_TRACES :]),
        run: [trace.entry, trace.outcomes, trace.undo],
    }
    return run


def _end_trace(request: HttpRequest, run: str) -> None:
    traces = request.session.get(_TRACES, {})
    if run in traces:
        request.session[_TRACES] = {name: value for name, value in traces.items() if name != run}


SLICE_SECONDS = 1.0
"""Seconds that one request works on many messages; then the page shows the progress and goes on."""

LONGEST_SLICE = 4
"""How often the slice of a search doubles."""

COUNT_SECONDS = 1.0
"""Seconds for counting before a question; after that the question says “at least”."""


class _ActionRequest(NamedTuple):
    """An action that a person requests on a topic's page."""

    act: PageAction
    topic: Topic
    state: str
    form: QuestionForm
    leave: str
    """The address to which to go when it is done."""
    back: str
    """The query string of the list."""


@topic_page(Permission.VIEW)
def act_view(pages: Pages, request: HttpRequest, operations: Operations, topic: Topic) -> HttpResponse:
    """Perform an action on messages or the topic, after a question if there is one."""
    places = pages.places(topic.name)
    back = back_of(request.POST.get("back"))
    leave = f"{places['topic']}?{back}"
    name = request.POST.get("act", "")
    if request.method != "POST":
        # A person whose session had ended comes here from the login page, and what was sent before is lost.
        messages.warning(request, _("Nothing was done. Choose the action again."))
        return HttpResponseRedirect(places["topic"])
    if name in ("pause", "resume"):
        run = operations.pause(topic.name) if name == "pause" else operations.resume(topic.name)
        _show_slot_outcomes(request, _("Pause") if name == "pause" else _("Resume"), run.result())
        return HttpResponseRedirect(leave)
    act, state = ACTS.get(name), request.POST.get("state", "")
    if act is None or not act.fits(topic, state):
        messages.error(request, _("This action is not available for these messages."))
        return HttpResponseRedirect(leave)
    form = act.form(topic, state, request.POST if "confirmed" in request.POST else None)
    act_on = _act_on_named if act.named is not None else _act_on_all
    response: HttpResponse = HttpResponseRedirect(leave)
    with shown_errors(request):
        response = act_on(pages, request, operations, _ActionRequest(act, topic, state, form, leave, back))
    return response  # noqa: RET504 - after an error it leads back


def _show_slot_outcomes(request: HttpRequest, what: str, progress: BulkProgress) -> None:
    """Show the outcomes of an action on all slots."""
    slots = ngettext("%(count)s slot", "%(count)s slots", progress.total) % {"count": progress.total}
    outcomes = outcomes_sentence(progress.outcomes)
    text = _("%(act)s: %(outcomes)s.") % {"act": what, "outcomes": f"{outcomes} ({slots})"}
    messages.success(request, text)
    show_problems(request, progress)


def _act_on_named(
    pages: Pages, request: HttpRequest, operations: Operations, requested: _ActionRequest
) -> HttpResponse:
    act, topic, state, form, leave, back = requested
    ids = list(dict.fromkeys(request.POST.getlist("id")))
    if not ids:
        messages.warning(request, _("No message was selected."))
        return HttpResponseRedirect(leave)
    asks = act.always_asks or len(ids) > 1
    if asks and not (form.is_bound and form.is_valid()):
        operations.declared(topic.name, act.permission)
        chosen = Chosen(topic, state, ids)
        carried = [("act", act.name), ("state", state), ("back", back), *(("id", one) for one in ids)]
        conditions = _named(pages, request, operations, topic, ids[0]) if len(ids) == 1 else []
        question = act.question(chosen, len(ids), True)
        return _ask(pages, request, requested, question, carried, conditions=conditions)
    assert act.named is not None
    answers = form.cleaned_data if form.is_bound and form.is_valid() else {}
    done = act.named(operations, Chosen(topic, state, ids, answers=answers))
    undo = undo_form(pages, request, done.undo, topic, back) if done.undo else ""
    show_outcomes(request, str(act.label), done.outcomes, undo)
    return HttpResponseRedirect(leave)


def _named(
    pages: Pages, request: HttpRequest, operations: Operations, topic: Topic, message_id: str
) -> list[tuple[str, str]]:
    """Return what the question says of one message: a list that is refreshed may have moved another one under the pointer."""
    try:
        (copy, *_others) = operations.get(topic.name, message_id)
    except (MessageGone, InvalidRequest, OperationRefused):
        return []
    return [(_("Message"), str(list_line(pages, topic, copy, request)["summary"]))]


def _act_on_all(
    pages: Pages, request: HttpRequest, operations: Operations, requested: _ActionRequest
) -> HttpResponse:
    act, topic, state, form, leave, back = requested
    assert act.sweep is not None
    form_of_filter = filter_form(operations, topic, state, request.POST)
    wanted = form_of_filter.wanted
    # A condition that does not apply here must not be ignored, because more would be done than requested.
    strange = [name for name in PARAMETERS if name not in form_of_filter.fields and request.POST.get(name)]
    if strange or not form_of_filter.is_valid() or not act.fits_filter(wanted):
        messages.error(request, _("This filter cannot be used for this action."))
        return HttpResponseRedirect(leave)
    carried = [("act", act.name), ("state", state), ("back", back), *form_of_filter.values]
    if not (form.is_bound and form.is_valid()):
        # To count is permitted to more people than the action.
        operations.declared(topic.name, act.permission)
        chosen = Chosen(topic, state, wanted=wanted)
        counted = act.sweep(operations, chosen, limits=Limits(seconds=COUNT_SECONDS), dry_run=True).result()
        count = counted.outcomes.get("matching", 0)
        if not count and counted.is_complete:
            messages.warning(request, _("No messages match."))
            return HttpResponseRedirect(leave)
        if counted.is_complete:
            carried.append(("asked", str(count)))
        question = act.question(chosen, count, counted.is_complete)
        cause = ""
        if wanted.cause:
            cause = cause_text(operations.listing(topic.name, state, wanted=wanted, limit=1).copies)
        return _ask(pages, request, requested, question, carried, conditions=form_of_filter.described(cause))
    if "background" in request.POST and act.background is not None:
        rate = form.cleaned_data.get("rate")
        keep = not form.cleaned_data.get("for_good")
        operations.start_action(topic.name, act.background, state, wanted, rate=rate, keep=keep)
        messages.success(request, _("Workers do this in the background; you can leave this page."))
        return HttpResponseRedirect(pages.url("background"))
    chosen = Chosen(topic, state, (), wanted, form.cleaned_data)
    return _go_on(pages, request, operations, requested, chosen, carried)


def so_far(text: str | None) -> dict[str, int]:
    """Return the outcomes that a page carried on. They are only shown, so they need not be trusted."""
    try:
        given = json.loads(text or "{}")
        return {
            str(word): int(count)
            for word, count in given.items()
            if word in OUTCOMES and 0 <= int(count) < 1e15
        }
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return {}


@dataclass
class _Work:
    """The progress of an action on many messages, as its page carries it from one request to the next."""

    outcomes: dict[str, int]
    done: int
    most: int
    """The most messages that it takes: those of the state, with the slot and the age, when it began."""
    counted: int
    """The number that the question named. 0: not all were counted."""
    began: int
    """When it began, in ms by the clock of Redis."""
    number: int
    """The number of requests so far. A search starts again with each, and longer slices let it come to an end."""
    run: str

    @classmethod
    def carried_on(cls, given: QueryDict, operations: Operations) -> _Work:
        """Return the progress that a page carried, or the beginning."""
        return cls(
            so_far(given.get("so_far")),
            number(given.get("done")),
            number(given.get("most")),
            number(given.get("asked")),
            number(given.get("began")) or operations.broker.now_ms(),
            # A page may send any number, and the seconds of a request double with it.
            min(number(given.get("slice")), LONGEST_SLICE),
            given.get("run", ""),
        )

    def add(self, progress: BulkProgress) -> None:
        """Add the results of one request."""
        for word, count in progress.outcomes.items():
            self.outcomes[word] = self.outcomes.get(word, 0) + count
        self.most = self.most or progress.total
        self.done += progress.done

    @property
    def total(self) -> int:
        """How many it is to take, or at most."""
        return self.counted or self.most

    @property
    def sentence(self) -> str:
        if not self.counted:
            return outcomes_sentence(self.outcomes)
        return _("%(done)s of %(total)s: %(outcomes)s") % {
            "done": number_format(self.done, force_grouping=True),
            "total": number_format(self.counted, force_grouping=True),
            "outcomes": outcomes_sentence(self.outcomes),
        }

    @property
    def fields(self) -> list[tuple[str, str]]:
        """The fields of the page's form."""
        return [
            ("so_far", json.dumps(self.outcomes)),
            ("done", str(self.done)),
            ("most", str(self.most)),
            ("asked", str(self.counted)),
            ("began", str(self.began)),
            ("slice", str(self.number + 1)),
        ]


def _go_on(
    pages: Pages,
    request: HttpRequest,
    operations: Operations,
    requested: _ActionRequest,
    chosen: Chosen,
    carried: list[tuple[str, str]],
) -> HttpResponse:
    """Work for a moment; then show the result or the progress."""
    act, leave = requested.act, requested.leave
    assert act.sweep is not None
    work = _Work.carried_on(request.POST, operations)
    if work.outcomes:
        passed = max(0.0, (operations.broker.now_ms() - work.began) / 1000)
        chosen = replace(chosen, wanted=chosen.wanted.as_of(chosen.state, passed))
    left = max(work.total - work.done, 1) if work.total else None
    seconds = SLICE_SECONDS * (1 << work.number if chosen.wanted.compares else 1)
    limits = Limits(messages=left, seconds=seconds, rate=chosen.answer("rate"), is_counted=True)
    trace = _begun_trace(request, work.run)
    progress = act.sweep(Operations(operations.actor, trace=trace), chosen, limits=limits).result()
    work.add(progress)
    is_stuck = work.number == LONGEST_SLICE and not progress.done
    if progress.is_complete or is_stuck:
        _end_trace(request, work.run)
        undo = (
            undo_form(pages, request, progress.undo, requested.topic, requested.back) if progress.undo else ""
        )
        show_outcomes(request, str(act.label), work.outcomes, undo)
        show_problems(request, progress)
        if is_stuck and not progress.is_complete:
            messages.warning(request, _("The search took too long. Narrow the filter."))
        return HttpResponseRedirect(leave)
    context = {
        "heading": act.label,
        "so_far": work.sentence,
        "seen": min(work.done, work.counted),
        "total": work.counted,
        "carried": [*carried, *chosen.answered, *work.fields, ("run", _keep_trace(request, work.run, trace))],
        "urls": pages.places(chosen.topic.name),
        "back_url": leave,
    }
    return pages.render(request, "topic/progress.html", context, chosen.topic)


def _ask(
    pages: Pages,
    request: HttpRequest,
    requested: _ActionRequest,
    question: str,
    carried: list[tuple[str, str]],
    **more: object,
) -> HttpResponse:
    act, topic = requested.act, requested.topic
    return pages.confirm_page(
        request,
        question,
        carried,
        act=pages.places(topic.name)["act"],
        back_url=requested.leave,
        topic=topic,
        heading=act.label,
        form=requested.form,
        danger=act.is_danger,
        kept=kept_sentence() if act.keeps else "",
        in_background=act.background is not None,
        **more,
    )


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
    ) % {"number": number_format(undo.MOST_MESSAGES, force_grouping=True), "size": undo.MOST_BYTES // 1024**2}


def _background(pages: Pages, request: HttpRequest, operations: Operations) -> dict[str, object]:
    """Return the actions in the background, and the deletions that can be undone."""
    actions, now_ms = operations.background_actions(), operations.broker.now_ms()
    return {
        "heading": _("In the background"),
        "now_ms": now_ms,
        "lines": [_line(pages, operations, one, now_ms) for one in reversed(actions)],
        "stop_url": pages.url("background"),
        "undo_url": pages.url("undo"),
        "kept": kept_sentence(),
        "deletions": [_deletion_line(pages, operations, one) for one in operations.undoable()],
        "urls": {"live": pages.url("background_live")},
    }


background_view, background_live_view = live_page(
    _background, "topic/background.html", "topic/_background.html", act=_stop
)


def _may(operations: Operations, name: str, kind: str) -> bool:
    """Return whether the actor may do this to a topic; if the settings no longer have it, only the permission counts."""
    topic, permission = operations.config.topics.get(name), PERMISSION_OF[kind]
    return operations.actor.may(permission) if topic is None else operations.may(topic, permission)


def _deletion_line(pages: Pages, operations: Operations, one: Deletion) -> dict[str, object]:
    return {
        "row": readable(one),
        "kind": _DELETION_KINDS[one.kind],
        "url": pages.url("change", quote(one.topic)),
        "may_undo": one.topic in operations.config.topics and _may(operations, one.topic, one.kind),
    }


def _line(pages: Pages, operations: Operations, one: ActionProgress, now_ms: int) -> dict[str, object]:
    action, state = one.action, one.state(now_ms)
    return {
        "row": readable(one),
        "action": readable(action),
        "kind": KINDS[action.kind],
        "url": pages.url("change", quote(action.topic)),
        "state": state,
        "state_text": ACTION_STATES[state],
        "may_stop": state in ("running", "waiting") and _may(operations, action.topic, action.kind),
        "outcomes": outcomes_sentence(one.outcomes) if one.done else "",
        "rate": one.rate(now_ms),
        "seconds_left": one.seconds_left(now_ms),
    }
