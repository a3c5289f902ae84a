"""The common part of all pages: the user, the values of the request, and the responses: a page, a part of one, or an error."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import TypeVar
from urllib.parse import urlencode

from django import VERSION as DJANGO
from django import forms
from django.contrib import admin, messages
from django.contrib.admin.utils import quote, unquote
from django.core.exceptions import PermissionDenied
from django.db import models
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase, HttpResponseRedirect, QueryDict
from django.template.response import TemplateResponse
from django.urls import reverse
from django.urls.converters import StringConverter
from django.utils.formats import number_format
from django.utils.html import format_html
from django.utils.text import capfirst
from django.utils.translation import gettext as _

from django_rmq.admin.forms import LONGEST_FILTER_TEXT, PARAMETERS
from django_rmq.admin.labels import DID, OUTCOMES
from django_rmq.core.log import LogThrottle
from django_rmq.core.model.bounds import LONGEST_ID
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import (
    CallerError,
    ConfigurationError,
    InvalidMessage,
    InvalidRequest,
    LostRace,
    NotPermitted,
    OperationRefused,
    RmqError,
    ServerTrouble,
    UnknownSchedule,
    UnknownTopic,
)
from django_rmq.operations import Actor, BulkProgress, Operations, Permission
from django_rmq.operations.authorization import topic_rule
from django_rmq.operations.messages import LONGEST_CURSOR

_LONGEST_BACK = {"tab": 20, "cursor": LONGEST_CURSOR, "hours": 20, "first": 20} | {
    name: LONGEST_FILTER_TEXT if name in ("text", "error") else 20 for name in PARAMETERS
}
"""Maximum size of a list's parameters in bytes; a link to a message then stays short enough for any web server."""


def number(text: str | None) -> int:
    """Return a whole number from a query or form; 0 for anything else."""
    # ``int`` accepts digits of all scripts, and raises an error for thousands of them.
    return int(text) if text and re.fullmatch(r"[0-9]{1,15}", text) else 0


def short_id(message_id: str) -> str:
    """Return an id, unless it is longer than any valid one."""
    if len(message_id) > LONGEST_ID:
        raise Http404("no such message")
    return message_id


def back_of(text: str | None) -> str:
    """Return the query string to go back to, with only the parameters of a list."""
    given = QueryDict((text or "")[:4000])
    known = {
        name: given[name]
        for name, longest in _LONGEST_BACK.items()
        if name in given and len(given[name].encode("utf-8", "replace")) <= longest
    }
    return urlencode(known)


@dataclass(frozen=True, slots=True)
class Banner:
    """The content of a banner."""

    title: str
    text: str


_PLACES = {"topic": "change", "log": "history", "causes": "topic_causes"} | {
    name: name for name in ("live", "act", "send", "claims", "pin", "export")
}
"""Place to which the pages of a topic link → the name of its address."""

_log_throttled = LogThrottle(logging.getLogger("django_rmq.admin"))

View = Callable[..., HttpResponseBase]
Answer = TypeVar("Answer", bound=HttpResponseBase)


def page(*permissions: Permission) -> Callable[[Callable[..., Answer]], Callable[..., Answer | HttpResponse]]:
    """Give a view the user's operations if the user has the permissions; an error becomes a page that shows it."""

    def decorate(view: Callable[..., Answer]) -> Callable[..., Answer | HttpResponse]:
        @wraps(view)
        def guarded(
            self: Pages, request: HttpRequest, *args: object, **kwargs: object
        ) -> Answer | HttpResponse:
            # By this name the ``url`` tag finds the pages of this admin site, of which a project may have several.
            request.current_app = self.admin_site.name
            try:
                operations = self.operations(request)
                operations.actor.require(*permissions)
                return view(self, request, operations, *args, **kwargs)
            except NotPermitted as error:
                raise PermissionDenied(str(error)) from error
            except (UnknownTopic, UnknownSchedule) as error:
                raise Http404(str(error)) from error
            except (RmqError, ImportError) as error:
                return self.error_page(request, error)

        guarded.rmq_permissions = permissions  # type: ignore[attr-defined]
        return guarded

    return decorate


def topic_page(
    *permissions: Permission,
) -> Callable[[Callable[..., Answer]], Callable[..., Answer | HttpResponse]]:
    """Give a view the same as ``page``, and the topic in the address if the user may know of it for the permissions."""

    def decorate(view: Callable[..., Answer]) -> Callable[..., Answer | HttpResponse]:
        @wraps(view)
        def of_topic(
            self: Pages,
            request: HttpRequest,
            operations: Operations,
            object_id: str,
            *args: object,
            **kwargs: object,
        ) -> Answer:
            topic = operations.declared(unquote(object_id), *permissions)
            return view(self, request, operations, topic, *args, **kwargs)

        guarded = page()(of_topic)
        guarded.rmq_permissions = permissions  # type: ignore[attr-defined]
        return guarded

    return decorate


def live_page(
    shown: Callable[..., dict[str, object]],
    template: str,
    part: str,
    *,
    act: Callable[..., HttpResponse] | None = None,
    guard: Callable[[View], View] | None = None,
) -> tuple[View, View]:
    """Return two views of what ``shown`` returns: a page, and the part of it that its script refreshes.

    ``act``: what a POST to the page does. ``guard``: ``page`` or ``topic_page``, by default for all who may view.
    """

    def whole(pages: Pages, request: HttpRequest, *of: object, **named: object) -> HttpResponse:
        if request.method == "POST" and act is not None:
            return act(pages, request, *of, **named)
        topic = next((one for one in of if isinstance(one, Topic)), None)
        return pages.render(request, template, shown(pages, request, *of, **named), topic)

    def live(pages: Pages, request: HttpRequest, *of: object, **named: object) -> HttpResponse:
        return pages.fragment(request, part, shown(pages, request, *of, **named))

    guard = guard or page(Permission.VIEW)
    return guard(whole), guard(live)


AMBIGUOUS = frozenset({"background", "running", "schedules", "workers"})
"""Names of topics whose addresses would be those of other pages (``TopicAdmin.get_urls``). Theirs begin with ``~``."""


class TopicConverter(StringConverter):
    """The name of a topic in an address, as the admin quotes it. No topic has a name that begins with ``~``."""

    def to_python(self, value: str) -> str:
        return value.removeprefix("~")

    def to_url(self, value: str) -> str:
        return f"~{value}" if value in AMBIGUOUS else value


class Pages(admin.ModelAdmin):  # type: ignore[type-arg]
    """The pages of RMQ within one admin site.

    There is no table: nothing is added, changed or deleted in Django's sense.
    """

    # --- permissions and addresses

    def operations(self, request: HttpRequest) -> Operations:
        """Return the operations of the user of this request, with the topics that the user may know of."""
        try:
            operations: Operations = request.rmq_operations  # type: ignore[attr-defined]
        except AttributeError:
            operations = Operations(Actor.of_user(request.user, "admin", topic_rule(request)))
            request.rmq_operations = operations  # type: ignore[attr-defined]
        return operations

    def has_module_permission(self, request: HttpRequest) -> bool:
        return self.has_view_permission(request)

    def has_view_permission(self, request: HttpRequest, obj: object = None) -> bool:
        return bool(request.user.has_perm(Permission.VIEW.full_name))

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: object = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: object = None) -> bool:
        return False

    def get_object(
        self, request: HttpRequest, object_id: str, from_field: str | None = None
    ) -> models.Model | None:
        """Return the topic of this name, if the user may know of it; there is no table to query."""
        return self.model(name=object_id) if object_id in self.operations(request).topics() else None

    def url(self, name: str, *args: str) -> str:
        """Return the address of one of RMQ's pages on this admin site."""
        return reverse(f"admin:django_rmq_topic_{name}", args=args, current_app=self.admin_site.name)

    def places(self, topic: str) -> dict[str, str]:
        """Return the addresses to which the pages of a topic link."""
        return {place: self.url(name, quote(topic)) for place, name in _PLACES.items()}

    # --- answers

    def render(
        self,
        request: HttpRequest,
        template: str,
        context: Mapping[str, object],
        topic: Topic | None = None,
        status: int = 200,
    ) -> TemplateResponse:
        """Return one of RMQ's pages within this admin site."""
        name = topic.name if topic is not None else ""
        here = str(context.get("here", context.get("heading", "")))
        return TemplateResponse(
            request,
            f"admin/django_rmq/{template}",
            {
                **self.admin_site.each_context(request),
                "opts": self.opts,
                "title": " | ".join(filter(None, (name, here)))
                or str(self.opts.verbose_name_plural).capitalize(),
                "name": name,
                "topic": topic,
                "crumbs": self._crumbs(name, here),
                # The stylesheet of Django 6.1 expects breadcrumbs in a list, that of 5.2 has no style for one.
                "crumbs_are_listed": DJANGO >= (6, 1),
                **context,
            },
            status=status,
        )

    def _crumbs(self, topic: str, here: str) -> list[tuple[str, str]]:
        """Return the breadcrumbs: each with its address, and the page itself with none."""
        site = self.admin_site.name
        crumbs = [
            (_("Home"), reverse("admin:index", current_app=site)),
            (
                str(self.opts.app_config.verbose_name),
                reverse("admin:app_list", args=(self.opts.app_label,), current_app=site),
            ),
            (capfirst(str(self.opts.verbose_name_plural)), self.url("changelist")),
        ]
        if topic:
            crumbs.append((topic, self.url("change", quote(topic))))
        if here:
            crumbs.append((here, ""))
        return [*crumbs[:-1], (crumbs[-1][0], "")]

    def fragment(
        self, request: HttpRequest, template: str, context: Mapping[str, object]
    ) -> TemplateResponse:
        """Return parts of a page for the script that refreshes it."""
        response = TemplateResponse(
            request,
            "admin/django_rmq/fragment.html",
            {
                "part": f"admin/django_rmq/{template}",
                "opts": self.opts,
                "name": getattr(context.get("topic"), "name", ""),
                **context,
            },
        )
        # The script puts nothing else into its page, such as what a proxy answers with the status 200.
        response["X-RMQ-Fragment"] = "1"
        return response

    def confirm_page(
        self,
        request: HttpRequest,
        question: str,
        carried: Sequence[tuple[str, str]],
        *,
        act: str,
        back_url: str,
        topic: Topic | None = None,
        **more: object,
    ) -> TemplateResponse:
        """Return a page that asks a question. The form of its answer carries fields to the address ``act``."""
        context = {"question": question, "carried": carried, "urls": {"act": act}, "back_url": back_url}
        return self.render(request, "topic/confirm.html", {**context, **more}, topic)

    def form_page(
        self,
        request: HttpRequest,
        form: forms.Form,
        act: Callable[[], object],
        *,
        back_url: str,
        topic: Topic | None = None,
        **more: object,
    ) -> HttpResponse:
        """Return a page with a form. If valid values were sent, do ``act`` and go to ``back_url``.

        An error that another value may avoid is shown with the form, and so is a server that is unavailable.
        """
        banner: Banner | None = None
        status = 200
        if form.is_bound and form.is_valid():
            try:
                act()
            except (InvalidMessage, InvalidRequest, OperationRefused, LostRace) as error:
                form.add_error(None, str(error))
            except ServerTrouble as error:
                # The form stays, with what was typed.
                banner, status = self.banner_of(request, error)
            else:
                return HttpResponseRedirect(back_url)
        context = {"form": form, "banner": banner, "back_url": back_url}
        return self.render(request, "topic/form.html", {**context, **more}, topic, status)

    def error_page(self, request: HttpRequest, error: Exception) -> HttpResponse:
        """Return a page that shows an error, in place of one that cannot be shown."""
        banner, status = self.banner_of(request, error)
        context = {"banner": banner, "again": request.get_full_path()}
        response = self.render(request, "error.html", context, status=status)
        if status == 503:
            response["Retry-After"] = "5"
        return response

    def banner_of(self, request: HttpRequest, error: Exception) -> tuple[Banner, int]:
        """Return what a page says about an error, and its status."""
        text = str(error)
        if isinstance(error, ServerTrouble):
            _log_throttled(type(error), "A page of the admin could not be shown: %s", error)
            if not text.startswith("Redis "):
                return Banner(_("A server is unavailable."), text), 503
            title = _("Redis refuses writes.") if error.refuses_writes else _("Redis is unavailable.")
            address = self.operations(request).config.redis
            if address is not None:
                text = _("%(error)s (server: %(address)s)") % {"error": text, "address": address}
            return Banner(title, text), 503
        if isinstance(error, LostRace):
            return Banner(_("This has changed in the meantime."), text), 409
        if isinstance(error, ConfigurationError):
            # They contain more than users with the permission to see topics may see.
            _log_throttled(type(error), "A page of the admin could not be shown: %s", error)
            return Banner(_("The setting RMQ is not valid."), _("See the log of the server.")), 503
        return Banner(_("This action is not possible."), text), 400


# --- messages above the next page


@contextmanager
def shown_errors(request: HttpRequest) -> Iterator[None]:
    """Show why an action is not possible. What the user may not do or know of is raised, as are errors of servers."""
    try:
        yield
    except CallerError as error:
        if isinstance(error, NotPermitted | UnknownTopic | UnknownSchedule):
            raise
        messages.error(request, str(error))


def outcomes_sentence(outcomes: Mapping[str, int]) -> str:
    """Return the number of messages for each outcome as a sentence: “1,200 replayed, 3 not there any more”."""
    parts = [
        _("%(count)s %(outcome)s")
        % {"count": number_format(count, force_grouping=True), "outcome": OUTCOMES.get(word, word)}
        for word, count in outcomes.items()
        if count
    ]
    return _(", ").join(parts) or _("nothing")


def show_outcomes(request: HttpRequest, what: str, outcomes: Mapping[str, int], undo: str = "") -> None:
    """Show the outcomes of an action. ``undo``: the form that undoes it."""
    did = any(count and word in DID for word, count in outcomes.items())
    text = _("%(act)s: %(outcomes)s.") % {"act": what, "outcomes": outcomes_sentence(outcomes)}
    (messages.success if did else messages.warning)(
        request, format_html("{} {}", text, undo) if undo else text
    )


def show_problems(request: HttpRequest, progress: BulkProgress) -> None:
    """Show which slots could not be processed."""
    for problem in progress.problems[:5]:
        messages.error(request, problem)
