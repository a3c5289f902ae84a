"""Topics in the admin: the dashboard, a topic with its lists, a message, and the forms by which a person acts.

Every page is wrapped by the admin site, names the permissions that it needs, and shows a banner where Redis is
away. What is done, and what of it is permitted and recorded, is for ``django_rmq.operations`` to say.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, NamedTuple
from urllib.parse import urlencode

from django.contrib import admin, messages
from django.contrib.admin.utils import quote, unquote
from django.core.exceptions import PermissionDenied
from django.core.paginator import Paginator
from django.db import models
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect, QueryDict
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.formats import number_format
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from django_rmq.admin import traces, trends
from django_rmq.admin.acts import ACTS, Act, Chosen, named_acts, sweeping_acts
from django_rmq.admin.bodies import show_body, summary, visible
from django_rmq.admin.dashboard import dashboard
from django_rmq.admin.figures import Places, Row, Tab, Trouble, row_of
from django_rmq.admin.filters import LONGEST_TEXT, PARAMETERS, FilterForm
from django_rmq.admin.forms import BodyForm, SendForm
from django_rmq.admin.words import (
    DID,
    EMPTY,
    MARKS,
    OUTCOMES,
    REASONS,
    STATE_NOTES,
    STATES,
    outcomes_sentence,
)
from django_rmq.core.logs.complaints import Complaints
from django_rmq.core.words.messages import Topic
from django_rmq.exceptions import (
    CallerError,
    ConfigurationError,
    InvalidMessage,
    InvalidRequest,
    LostRace,
    MessageGone,
    NotPermitted,
    RmqError,
    ServerTrouble,
    UnknownTopic,
    WrongType,
)
from django_rmq.operations import Actor, Copy, Limits, Operations, Permission, Progress
from django_rmq.operations.redaction import is_redacted, may_search
from django_rmq.project.settings import get_config

_complain = Complaints(logging.getLogger("django_rmq.admin"))

SLICE_SECONDS = 1.0
"""How long one request works on many messages; then the page shows how far it is, and goes on."""

LONGEST_SLICE = 4
"""A slice of a search is twice as long as the one before, so often."""

COUNT_SECONDS = 1.0
"""How long is counted for a question; then it says “at least”."""

SLOTS_SHOWN = 256
_LONGEST_BACK = {"tab": 20, "cursor": 512, "hours": 20, "first": 20} | {
    name: LONGEST_TEXT if name in ("text", "error") else 20 for name in PARAMETERS
}
"""Bytes of the longest parameters of a list: with them a link to a message stays short enough for any web server."""

LONGEST_ID = 1_200
"""Characters of the longest id: 512 bytes of member are 683 of them."""

View = Callable[..., HttpResponse]


def page(*permissions: Permission) -> Callable[[View], View]:
    """Declare what a view needs, and turn what goes wrong into a page that says so."""

    def decorate(view: View) -> View:
        @wraps(view)
        def guarded(self: TopicAdmin, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
            request.current_app = self.admin_site.name
            try:
                self.operations(request).actor.require(*permissions)
                return view(self, request, *args, **kwargs)
            except NotPermitted as error:
                raise PermissionDenied(str(error)) from error
            except UnknownTopic as error:
                raise Http404(str(error)) from error
            except (RmqError, ImportError) as error:
                return self.trouble(request, error)

        guarded.rmq_permissions = permissions  # type: ignore[attr-defined]
        return guarded

    return decorate


class _Asked(NamedTuple):
    """What a person asked for on a topic's page."""

    act: Act
    topic: Topic
    state: str
    form: Any
    leave: str
    """Where to go when it is done."""
    back: str
    """The list's own query, as it was."""


class TopicAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    """The pages of RMQ. Nothing is added, changed or deleted here in Django's sense: there is no table."""

    # --- who may what, and where things are

    def operations(self, request: HttpRequest) -> Operations:
        """Return what the user of this request may see and do."""
        return Operations(Actor.of_user(request.user, "admin"))

    def has_module_permission(self, request: HttpRequest) -> bool:
        return self.has_view_permission(request)

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return bool(request.user.has_perm(Permission.VIEW.full_name))

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def get_object(self, request: HttpRequest, object_id: str, from_field: Any = None) -> models.Model | None:
        """Return the topic of this name, if it is declared: there is no table to ask."""
        return self.model(name=object_id) if object_id in get_config().topics else None

    def get_urls(self) -> list[URLPattern]:
        """Return the addresses of all pages, each behind the admin site."""

        def at(route: str, view: View, name: str) -> URLPattern:
            return path(route, self.admin_site.admin_view(view), name=f"django_rmq_topic_{name}")

        return [
            at("", self.changelist_view, "changelist"),
            at("live/", self.dashboard_live_view, "dashboard_live"),
            at("<str:object_id>/change/", self.change_view, "change"),
            at("<str:object_id>/live/", self.topic_live_view, "live"),
            at("<str:object_id>/history/", self.history_view, "history"),
            at("<str:object_id>/send/", self.send_view, "send"),
            at("<str:object_id>/act/", self.act_view, "act"),
            at("<str:object_id>/message/<str:message_id>/", self.message_view, "message"),
            at("<str:object_id>/message/<str:message_id>/raw/", self.raw_view, "raw"),
            at("<str:object_id>/message/<str:message_id>/edit/", self.edit_view, "edit"),
        ]

    def url(self, name: str, *args: str) -> str:
        """Return the address of one of our pages on this admin site."""
        return reverse(f"admin:django_rmq_topic_{name}", args=args, current_app=self.admin_site.name)

    def places(self, topic: str) -> Places:
        """Return where the pages of a topic are."""
        quoted = quote(topic)
        return Places(
            topic=self.url("change", quoted),
            live=self.url("live", quoted),
            act=self.url("act", quoted),
            send=self.url("send", quoted),
            log=self.url("history", quoted),
        )

    # --- the dashboard

    @page(Permission.VIEW)
    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        """Show all topics."""
        return self.render(
            request, "topic/change_list.html", {**self._dashboard(request), **(extra_context or {})}
        )

    @page(Permission.VIEW)
    def dashboard_live_view(self, request: HttpRequest) -> HttpResponse:
        """Answer the figures of the dashboard, anew."""
        return self.fragment(request, "topic/_dashboard.html", self._dashboard(request))

    def _dashboard(self, request: HttpRequest) -> dict[str, Any]:
        return dashboard(
            self.operations(request),
            request.GET,
            self.url("dashboard_live"),
            lambda name: self.url("change", quote(name)),
        )

    # --- a topic

    @page(Permission.VIEW)
    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None
    ) -> HttpResponse:
        """Show a topic: the list of one state, or its slots, or its history."""
        operations = self.operations(request)
        topic = get_config().topic(unquote(object_id))
        context = self._topic(request, operations, topic)
        if context["tab"] in STATES:
            context |= self._messages(request, operations, topic, context["tab"])
        return self.render(request, "topic/change_form.html", {**context, **(extra_context or {})}, topic)

    @page(Permission.VIEW)
    def topic_live_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Answer the figures of a topic, anew; a list of messages stays as it is until somebody asks for it."""
        topic = get_config().topic(unquote(object_id))
        context = self._topic(request, self.operations(request), topic)
        if context["tab"] in STATES:
            context["panel"] = ""
        return self.fragment(request, "topic/_live.html", context)

    @page(Permission.VIEW)
    def history_view(self, request: HttpRequest, object_id: str, extra_context: Any = None) -> HttpResponse:
        """Show who did what to a topic, as Django's own page does."""
        return super().history_view(request, object_id, extra_context)

    def get_paginator(self, request: HttpRequest, queryset: Any, *args: Any, **kwargs: Any) -> Paginator:  # type: ignore[type-arg]
        """Page through the history, the newest first."""
        return super().get_paginator(request, queryset.order_by("-action_time", "-pk"), *args, **kwargs)

    def _topic(self, request: HttpRequest, operations: Operations, topic: Topic) -> dict[str, Any]:
        figures = operations.topic(topic.name)
        places = self.places(topic.name)
        row = row_of(
            figures, trends.recent(operations.broker, [figures], {figures.topic})[figures.topic], places.topic
        )
        wanted = request.GET.get("tab", "")
        tab = wanted if wanted in (*STATES, "slots", "history") else "store"
        query = {"tab": tab} | {
            name: request.GET[name][:8] for name in ("hours", "first") if name in request.GET
        }
        places.live = f"{places.live}?{urlencode(query)}"
        context: dict[str, Any] = {
            "topic": topic,
            "row": row,
            "now_ms": figures.now_ms,
            "tab": tab,
            "tabs": self._tabs(row, tab),
            "urls": places,
            "back": _back(request.GET.urlencode()),
            "may": {
                "send": operations.actor.may(Permission.SEND),
                "pause": operations.actor.may(Permission.PAUSE),
            },
            "notes": [*row.problems, *([figures.workers_problem] if figures.workers_problem else [])]
            + (
                [
                    _("Only %(looked)s of %(slots)s slots were looked at.")
                    % {"looked": figures.looked_at, "slots": topic.slots}
                ]
                if row.is_partial
                else []
            ),
            "panel": "admin/django_rmq/topic/_messages.html",
        }
        if tab == "slots":
            context |= self._slots(request, operations, topic)
        elif tab == "history":
            context |= self._history(request, operations, topic)
        return context

    @staticmethod
    def _tabs(row: Row, current: str) -> list[Tab]:
        counts = {"store": row.store, "prepare": row.prepare, "retry": row.retry, "dead": row.dead}
        if row.claims or current == "claim":
            counts["claim"] = row.claims
        tabs = [
            Tab(
                state,
                str(STATES[state]),
                f"{row.url}?tab={state}",
                state == current,
                count,
                state == "dead" and count > 0,
            )
            for state, count in counts.items()
        ]
        tabs.append(Tab("slots", _("Consumers and slots"), f"{row.url}?tab=slots", current == "slots"))
        tabs.append(Tab("history", _("History"), f"{row.url}?tab=history", current == "history"))
        return tabs

    def _messages(
        self, request: HttpRequest, operations: Operations, topic: Topic, state: str
    ) -> dict[str, Any]:
        form = self._filter_form(operations, topic, state, request.GET)
        wanted = form.wanted
        errors = [str(error) for found in form.errors.values() for error in found]
        cursor = request.GET.get("cursor", "")
        try:
            listing = operations.listing(topic.name, state, cursor=cursor, wanted=wanted)
        except CallerError as error:
            errors.append(str(error))
            listing = operations.listing(topic.name, state)
            cursor = ""
        note = ""
        if operations.actor.may(Permission.VIEW_BODIES) and not may_search(operations.actor, topic):
            note = _("Bodies of this topic are redacted, and cannot be searched.")
        return {
            "state": state,
            "filter_form": form,
            "filter_errors": errors,
            "filter_note": note,
            "filter_values": form.values,
            "filtered": not wanted.is_empty,
            "listing": listing,
            "lines": [self._line(topic, copy, request) for copy in listing.copies],
            "first_page": not cursor,
            "acts": named_acts(operations, topic, state),
            "mass_acts": sweeping_acts(operations, topic, state, wanted)
            if listing.copies or listing.cursor
            else [],
            "empty": EMPTY[state],
        }

    def _filter_form(self, operations: Operations, topic: Topic, state: str, data: QueryDict) -> FilterForm:
        return FilterForm(topic, state, may_search=may_search(operations.actor, topic), data=data)

    def _line(self, topic: Topic, copy: Copy, request: HttpRequest) -> dict[str, Any]:
        if copy.raw is None:
            line = _("%(size)s bytes, %(id)s") % {"size": copy.size, "id": copy.id.rpartition("~")[2][:16]}
        elif copy.key is not None:
            line = f"{visible(copy.key)}  {summary(topic, copy.raw)}"
        else:
            line = summary(topic, copy.raw)
        error = copy.error.partition("\n")[0][:200]
        return {
            "copy": copy,
            "id": copy.id,
            "summary": line or _("(empty)"),
            "error": visible(error or copy.error_class),
            "reason": REASONS.get(copy.failed, copy.failed),
            "mark": MARKS.get(copy.mark, copy.mark),
            "url": self.url("message", quote(topic.name), copy.id)
            + f"?{urlencode({'back': _back(request.GET.urlencode())})}",
        }

    def _slots(self, request: HttpRequest, operations: Operations, topic: Topic) -> dict[str, Any]:
        first = _number(request.GET.get("first")) // SLOTS_SHOWN * SLOTS_SHOWN
        first = first if first < topic.slots else 0
        found = operations.slots(topic.name, first, SLOTS_SHOWN)
        workers = []
        try:
            everybody = operations.workers()
        except RmqError:
            everybody = []  # the head of the page says why
        for one in everybody:
            worker = one.member.worker
            shared = topic.name in one.shared
            if shared or any(served.name == topic.name for served in worker.topics):
                workers.append(
                    {
                        "short": worker.id[:8],
                        "host": worker.host,
                        "pid": worker.pid,
                        "threads": worker.threads,
                        "owned": topic.slots if shared else one.slots.get(topic.name, 0),
                        "since_ms": worker.started * 1000,
                    }
                )
        rows = [
            {
                "slot": one.slot,
                "owner": one.worker,
                "owner_short": one.worker[:8],
                "since_ms": one.since_ms,
                "store": one.counts.store,
                "prepare": one.counts.prepare,
                "retry": one.counts.retry,
                "dead": one.counts.dead,
                "paused": one.counts.paused,
                "problem": one.problem,
            }
            for one in found.rows
        ]
        last = first + len(rows) - 1
        note = _("The fullest slot is %(times)s times as full as the mean.") % {
            "times": number_format(round(found.skew, 1))
        }
        return {
            "panel": "admin/django_rmq/topic/_slots.html",
            "workers": workers,
            "slots": rows,
            "fullest": max((one.counts.store for one in found.rows), default=0) or 1,
            "skew_note": note if found.skew else _("All slots are empty."),
            "part_note": _("Slots %(first)s to %(last)s of %(slots)s.")
            % {"first": first, "last": last, "slots": topic.slots}
            if len(rows) < topic.slots
            else "",
            "previous": first - SLOTS_SHOWN if first else None,
            "next": last + 1 if last + 1 < topic.slots else None,
        }

    def _history(self, request: HttpRequest, operations: Operations, topic: Topic) -> dict[str, Any]:
        kept = get_config().history.hours
        offered = trends.spans(kept)
        wanted = _number(request.GET.get("hours"))
        hours = wanted if wanted in offered else min(6, offered[-1])
        try:
            minutes, problem = trends.read(operations.broker, topic, hours), ""
        except WrongType as error:
            minutes, problem = [], str(error)
        sampled = any(minute.depth for minute in minutes)
        if problem:
            note = problem
        elif not kept:
            note = _('No history is kept: RMQ["HISTORY"]["HOURS"] is 0.')
        elif not sampled:
            note = _("Nothing was sampled in this time. Workers sample once a minute.")
        else:
            note = _("Sampled by the workers once a minute; a gap is a time in which none did.")
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
            "charts": trends.charts(topic, minutes) if sampled else [],
            "history_note": note,
        }

    # --- a message

    @page(Permission.VIEW)
    def message_view(self, request: HttpRequest, object_id: str, message_id: str) -> HttpResponse:
        """Show a message: every copy that there is of it."""
        operations = self.operations(request)
        topic = get_config().topic(unquote(object_id))
        status = 200
        try:
            copies = operations.get(topic.name, _short(message_id))
        except (MessageGone, InvalidRequest):
            copies, status = [], 404
        back = _back(request.GET.get("back"))
        places = self.places(topic.name)
        return self.render(
            request,
            "topic/message.html",
            {
                "topic": topic,
                "copies": [self._copy(operations, copy, back) for copy in copies],
                "slot": message_id.partition(".")[0][:8],
                "now_ms": operations.broker.now_ms(),
                "urls": places,
                "back": back,
                "back_url": f"{places.topic}?{back}",
                "here": _("Message"),
            },
            topic,
            status,
        )

    def _copy(self, operations: Operations, copy: Copy, back: str) -> dict[str, Any]:
        topic = copy.topic
        redacted = is_redacted(topic)
        may_edit = all(
            operations.actor.may(one) for one in (Permission.REPLAY, Permission.EDIT, Permission.VIEW_BODIES)
        )
        query = urlencode({"state": copy.state, "back": back})
        return {
            "copy": copy,
            "id": copy.id,
            "state": copy.state,
            "state_name": STATES[copy.state],
            "state_note": STATE_NOTES[copy.state],
            "body": None if copy.raw is None else show_body(topic, copy.raw),
            "key": None if copy.key is None else visible(copy.key),
            "slot_basis": visible(copy.slot_basis or ""),
            "headers": [(visible(str(name)), visible(str(value))) for name, value in copy.headers.items()],
            "reason": REASONS.get(copy.failed, copy.failed),
            "mark": MARKS.get(copy.mark, copy.mark),
            "error": visible(copy.error),
            "error_class": visible(copy.error_class),
            "withheld": copy.raw is None or redacted,
            "acts": named_acts(operations, topic, copy.state),
            "edit_url": f"{self.url('edit', quote(topic.name), copy.id)}?{query}"
            if copy.state == "dead" and may_edit
            else "",
            "raw_url": f"{self.url('raw', quote(topic.name), copy.id)}?{query}"
            if copy.raw is not None and not redacted
            else "",
        }

    @page(Permission.VIEW, Permission.VIEW_BODIES)
    def raw_view(self, request: HttpRequest, object_id: str, message_id: str) -> HttpResponse:
        """Answer a body as it was stored, as a file."""
        topic = get_config().topic(unquote(object_id))
        if is_redacted(topic):
            raise PermissionDenied(f"the bodies of topic {topic.name} are redacted")
        try:
            copies = self.operations(request).get(topic.name, _short(message_id))
        except (MessageGone, InvalidRequest) as error:
            raise Http404(str(error)) from error
        wanted = [copy for copy in copies if copy.state == request.GET.get("state")] or copies
        response = HttpResponse(wanted[0].raw or b"", content_type="text/plain; charset=utf-8")
        response["Content-Disposition"] = 'attachment; filename="body.txt"'
        response["X-Content-Type-Options"] = "nosniff"
        return response

    @page(Permission.VIEW, Permission.VIEW_BODIES, Permission.REPLAY, Permission.EDIT)
    def edit_view(self, request: HttpRequest, object_id: str, message_id: str) -> HttpResponse:
        """Ask for another body of a dead message, and replay it with that."""
        operations = self.operations(request)
        topic = get_config().topic(unquote(object_id))
        back = _back(request.GET.get("back"))
        places = self.places(topic.name)
        leave = f"{places.topic}?{back}"
        form: BodyForm
        if request.method == "POST":
            form = BodyForm(topic, request.POST)
            if form.is_valid():
                try:
                    done = operations.replay_edited(topic.name, _short(message_id), form.cleaned_data["body"])
                except (InvalidMessage, LostRace) as error:
                    form.add_error(None, str(error))
                else:
                    self._tell(request, _("Edit and replay"), done.outcomes)
                    return HttpResponseRedirect(leave)
        else:
            try:
                copies = operations.get(topic.name, _short(message_id))
            except (MessageGone, InvalidRequest):
                copies = []
            dead = next((copy for copy in copies if copy.state == "dead"), None)
            if dead is None:
                messages.warning(request, _("This message is not dead, or not any more."))
                return HttpResponseRedirect(leave)
            form = BodyForm(topic, initial={"body": _editable(dead)})
        notes = []
        if is_redacted(topic):
            notes.append(_("This is the body as it is stored: whoever edits it has to see it."))
        if not topic.keyed:
            notes.append(_("The body is what makes the message: an edited one is another message."))
        return self.render(
            request,
            "topic/form.html",
            {
                "heading": _("Edit and replay"),
                "here": _("Edit and replay"),
                "submit": _("Replay with this body"),
                "form": form,
                "notes": notes,
                "urls": places,
                "back_url": leave,
            },
            topic,
        )

    @page(Permission.VIEW, Permission.SEND)
    def send_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Ask for a message and send it."""
        operations = self.operations(request)
        topic = get_config().topic(unquote(object_id))
        places = self.places(topic.name)
        form = SendForm(topic, request.POST if request.method == "POST" else None)
        if request.method == "POST" and form.is_valid():
            try:
                sent = operations.send(topic.name, form.cleaned_data["body"], **form.options)
            except (InvalidMessage, LostRace) as error:
                form.add_error(None, str(error))
            else:
                self._tell(request, _("Send"), {sent.status: 1})
                return HttpResponseRedirect(places.topic)
        return self.render(
            request,
            "topic/form.html",
            {
                "heading": _("Send a message"),
                "here": _("Send a message"),
                "submit": _("Send"),
                "form": form,
                "urls": places,
                "back_url": places.topic,
            },
            topic,
        )

    # --- acts

    @page(Permission.VIEW)
    def act_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Do something to messages or to the topic, after a question where there is one to ask."""
        operations = self.operations(request)
        topic = get_config().topic(unquote(object_id))
        places = self.places(topic.name)
        back = _back(request.POST.get("back"))
        leave = f"{places.topic}?{back}"
        name = request.POST.get("act", "")
        if request.method != "POST":
            return HttpResponseRedirect(places.topic)
        if name in ("pause", "resume"):
            run = operations.pause(topic.name) if name == "pause" else operations.resume(topic.name)
            self._tell_slots(request, _("Pause") if name == "pause" else _("Resume"), run.result())
            return HttpResponseRedirect(leave)
        act, state = ACTS.get(name), request.POST.get("state", "")
        if act is None or not act.fits(topic, state):
            messages.error(request, _("There is no such act for these messages."))
            return HttpResponseRedirect(leave)
        operations.actor.require(*act.permissions)
        form = act.form(topic, state, request.POST if "confirmed" in request.POST else None)
        answer = self._act_on_named if act.named is not None else self._act_on_all
        return answer(request, operations, _Asked(act, topic, state, form, leave, back))

    def _act_on_named(self, request: HttpRequest, operations: Operations, asked: _Asked) -> HttpResponse:
        act, topic, state, form, leave, back = asked
        ids = list(dict.fromkeys(request.POST.getlist("id")))
        if not ids:
            messages.warning(request, _("No message was selected."))
            return HttpResponseRedirect(leave)
        asks = act.always_asks or len(ids) > 1
        if asks and not (form.is_bound and form.is_valid()):
            chosen = Chosen(topic, state, ids)
            carried = [("act", act.name), ("state", state), ("back", back), *(("id", one) for one in ids)]
            question = act.question(chosen, len(ids), True)
            return self._ask(request, act, topic, question, form, carried, leave)
        assert act.named is not None
        answers = form.cleaned_data if form.is_bound and form.is_valid() else {}
        try:
            done = act.named(operations, Chosen(topic, state, ids, answers=answers))
        except CallerError as error:
            if isinstance(error, NotPermitted):
                raise
            messages.error(request, str(error))
        else:
            self._tell(request, str(act.label), done.outcomes)
        return HttpResponseRedirect(leave)

    def _act_on_all(self, request: HttpRequest, operations: Operations, asked: _Asked) -> HttpResponse:
        act, topic, state, form, leave, back = asked
        assert act.sweep is not None
        filter_form = self._filter_form(operations, topic, state, request.POST)
        wanted = filter_form.wanted
        # A condition that has no meaning here must not be left out: more would be done than was asked for.
        strange = [name for name in PARAMETERS if name not in filter_form.fields and request.POST.get(name)]
        if strange or not filter_form.is_valid() or not act.fits_filter(wanted):
            messages.error(request, _("This filter cannot be used for that."))
            return HttpResponseRedirect(leave)
        carried = [("act", act.name), ("state", state), ("back", back), *filter_form.values]
        try:
            if not (form.is_bound and form.is_valid()):
                run = act.sweep(
                    operations, Chosen(topic, state, wanted=wanted), Limits(seconds=COUNT_SECONDS), True
                )
                counted = run.result()
                count = counted.outcomes.get("matching", 0)
                if not count and counted.is_complete:
                    messages.warning(request, _("Nothing matches (any more)."))
                    return HttpResponseRedirect(leave)
                question = act.question(Chosen(topic, state, wanted=wanted), count, counted.is_complete)
                return self._ask(request, act, topic, question, form, carried, leave, filter_form.described)
            return self._go_on(
                request, operations, act, Chosen(topic, state, (), wanted, form.cleaned_data), carried, leave
            )
        except CallerError as error:
            if isinstance(error, NotPermitted):
                raise
            messages.error(request, str(error))
            return HttpResponseRedirect(leave)

    def _go_on(
        self,
        request: HttpRequest,
        operations: Operations,
        act: Act,
        chosen: Chosen,
        carried: list[tuple[str, str]],
        leave: str,
    ) -> HttpResponse:
        """Work for a moment; then say how it ended, or how far it is."""
        assert act.sweep is not None
        before = _so_far(request.POST.get("so_far"))
        done_before, total = _number(request.POST.get("done")), _number(request.POST.get("total"))
        began = _number(request.POST.get("began")) or operations.broker.now_ms()
        if before:
            passed = max(0.0, (operations.broker.now_ms() - began) / 1000)
            chosen = replace(chosen, wanted=chosen.wanted.as_of(chosen.state, passed))
        left = max(total - done_before, 1) if total else None
        rate = chosen.answer("rate")
        # A search begins anew with each request: longer and longer ones come to an end.
        number = min(_number(request.POST.get("slice")), LONGEST_SLICE)
        seconds = SLICE_SECONDS * (1 << number if chosen.wanted.search else 1)
        limits = Limits(messages=left, seconds=seconds, rate=rate)
        run = request.POST.get("run", "")
        trace = traces.begun(request, run)
        progress = act.sweep(Operations(operations.actor, trace=trace), chosen, limits, False).result()
        outcomes = dict(before)
        for word, count in progress.outcomes.items():
            outcomes[word] = outcomes.get(word, 0) + count
        total = total or progress.total
        done = done_before + progress.done
        is_stuck = number == LONGEST_SLICE and not progress.done
        if progress.is_complete or is_stuck or (left is not None and progress.done >= left):
            traces.end(request, run)
            self._tell(request, str(act.label), outcomes)
            self._tell_problems(request, progress)
            if is_stuck and not progress.is_complete:
                messages.warning(request, _("The search took too long to go on: narrow the filter."))
            return HttpResponseRedirect(leave)
        answers = [
            (name, str(value)) for name, value in (chosen.answers or {}).items() if value not in (None, "")
        ]
        return self.render(
            request,
            "topic/progress.html",
            {
                "heading": act.label,
                "here": act.label,
                "so_far": _("%(done)s of %(total)s: %(outcomes)s")
                % {
                    "done": number_format(done, force_grouping=True),
                    "total": number_format(total, force_grouping=True),
                    "outcomes": outcomes_sentence(outcomes),
                },
                "seen": min(done, total),
                "total": total,
                "carried": [
                    *carried,
                    *answers,
                    ("so_far", json.dumps(outcomes)),
                    ("done", str(done)),
                    ("total", str(total)),
                    ("began", str(began)),
                    ("slice", str(number + 1)),
                    ("run", traces.keep(request, run, trace)),
                ],
                "urls": self.places(chosen.topic.name),
                "back_url": leave,
            },
            chosen.topic,
        )

    def _ask(
        self,
        request: HttpRequest,
        act: Act,
        topic: Topic,
        question: str,
        form: Any,
        carried: Sequence[tuple[str, str]],
        leave: str,
        conditions: Sequence[tuple[str, str]] = (),
    ) -> HttpResponse:
        return self.render(
            request,
            "topic/confirm.html",
            {
                "heading": act.label,
                "here": act.label,
                "question": question,
                "conditions": conditions,
                "form": form,
                "carried": carried,
                "danger": act.is_danger,
                "submit": _("Yes, do it"),
                "urls": self.places(topic.name),
                "back_url": leave,
            },
            topic,
        )

    @staticmethod
    def _tell(request: HttpRequest, what: str, outcomes: Mapping[str, int]) -> None:
        """Say what came of an act."""
        did = any(count and word in DID for word, count in outcomes.items())
        text = _("%(act)s: %(outcomes)s.") % {"act": what, "outcomes": outcomes_sentence(outcomes)}
        (messages.success if did else messages.warning)(request, text)

    def _tell_slots(self, request: HttpRequest, what: str, progress: Progress) -> None:
        slots = ngettext("%(count)s slot", "%(count)s slots", progress.total) % {"count": progress.total}
        outcomes = outcomes_sentence(progress.outcomes)
        text = _("%(act)s: %(outcomes)s.") % {"act": what, "outcomes": f"{outcomes} ({slots})"}
        messages.success(request, text)
        self._tell_problems(request, progress)

    @staticmethod
    def _tell_problems(request: HttpRequest, progress: Progress) -> None:
        for problem in progress.problems[:5]:
            messages.error(request, problem)

    # --- answers

    def render(
        self,
        request: HttpRequest,
        template: str,
        context: Mapping[str, Any],
        topic: Topic | None = None,
        status: int = 200,
    ) -> TemplateResponse:
        """Return a page of ours within this admin site."""
        name = topic.name if topic is not None else ""
        return TemplateResponse(
            request,
            f"admin/django_rmq/{template}",
            {
                **self.admin_site.each_context(request),
                "opts": self.opts,
                "title": name or str(self.opts.verbose_name_plural).capitalize(),
                "name": name,
                "topic": topic,
                **context,
            },
            status=status,
        )

    def fragment(self, request: HttpRequest, template: str, context: Mapping[str, Any]) -> TemplateResponse:
        """Return parts of a page for the script that keeps it fresh."""
        response = TemplateResponse(
            request,
            f"admin/django_rmq/{template}",
            {"opts": self.opts, "name": getattr(context.get("topic"), "name", ""), **context},
        )
        response["X-RMQ-Fragment"] = "1"
        return response

    def trouble(self, request: HttpRequest, error: Exception) -> HttpResponse:
        """Return a page that says what is wrong, in the place of one that cannot be shown."""
        text = str(error)
        if isinstance(error, ServerTrouble):
            title, status = _("Redis is away."), 503
            _complain(type(error), "A page of the admin could not be shown: %s", error)
        elif isinstance(error, LostRace):
            title, status = _("Somebody else was first."), 409
        elif isinstance(error, ConfigurationError):
            # They hold more than who may see topics may see.
            title, status = _("The settings of RMQ are wrong."), 503
            text = _("The log of the server says what is wrong.")
            _complain(type(error), "A page of the admin could not be shown: %s", error)
        else:
            title, status = _("This cannot be done."), 400
        response = self.render(
            request,
            "trouble.html",
            {"trouble": Trouble(title, text), "urls": Places(), "again": request.get_full_path()},
            status=status,
        )
        if status == 503:
            response["Retry-After"] = "5"
        return response


# --- what comes from a request is anything -----------------------------------------------------------


def _number(text: str | None) -> int:
    """Return a whole number of a query or form; 0 for anything else."""
    return int(text) if text and re.fullmatch(r"[0-9]{1,15}", text) else 0


def _short(message_id: str) -> str:
    if len(message_id) > LONGEST_ID:
        raise Http404("no such message")
    return message_id


def _back(text: str | None) -> str:
    """Return the query string to go back to, with the parameters that a list has and no others."""
    given = QueryDict((text or "")[:4000])
    known = {
        name: given[name]
        for name, longest in _LONGEST_BACK.items()
        if name in given and len(given[name].encode("utf-8", "replace")) <= longest
    }
    return urlencode(known)


def _so_far(text: str | None) -> dict[str, int]:
    """Return the outcomes that a page carried on; whatever it made of them, they are only shown."""
    try:
        given = json.loads(text or "{}")
        return {
            str(word): int(count)
            for word, count in given.items()
            if word in OUTCOMES and 0 <= int(count) < 1e15
        }
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return {}


def _editable(copy: Copy) -> str:
    """Return the body of a copy as it goes into a field."""
    raw = copy.raw or b""
    if copy.topic.body == "json":
        try:
            return json.dumps(copy.body(), ensure_ascii=False, indent=2, sort_keys=True)
        except (ValueError, RecursionError):
            pass
    return raw.decode("utf-8", "replace")


__all__ = ["TopicAdmin", "page"]
