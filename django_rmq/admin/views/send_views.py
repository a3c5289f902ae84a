"""The forms for writing a message: a new one, or another body for a dead one."""

from __future__ import annotations

from django.contrib import messages
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.translation import gettext as _

from django_rmq.admin.dashboard_rows import Banner
from django_rmq.admin.forms import BodyForm, SendForm
from django_rmq.admin.views.page import Pages, back_of, short_id, tell, topic_page
from django_rmq.core.model.body_codec import dumps
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import InvalidMessage, InvalidRequest, LostRace, MessageGone, ServerTrouble
from django_rmq.operations import MessageCopy, Operations, Permission
from django_rmq.operations.authorization import is_redacted


@topic_page(Permission.VIEW, Permission.VIEW_BODIES, Permission.REPLAY, Permission.EDIT)
def edit_view(
    pages: Pages, request: HttpRequest, operations: Operations, topic: Topic, message_id: str
) -> HttpResponse:
    """Show the form for another body of a dead message, and replay the message with it."""
    places = pages.places(topic.name)
    leave = f"{places.topic}?{back_of(request.GET.get('back'))}"
    form: BodyForm
    banner: Banner | None = None
    status = 200
    if request.method == "POST":
        form = BodyForm(topic, request.POST)
        if form.is_valid():
            try:
                done = operations.replay_edited(topic.name, short_id(message_id), form.cleaned_data["body"])
            except (InvalidMessage, LostRace) as error:
                form.add_error(None, str(error))
            except ServerTrouble as error:
                # The form stays, with what was typed.
                banner, status = pages.banner_of(request, error)
            else:
                tell(request, _("Edit and replay"), done.outcomes)
                return HttpResponseRedirect(leave)
    else:
        dead = _dead_copy(operations, topic, short_id(message_id))
        if dead is None:
            messages.warning(request, _("This message is no longer dead."))
            return HttpResponseRedirect(leave)
        form = BodyForm(topic, initial={"body": _editable(dead)})
    context = {
        "heading": _("Edit and replay"),
        "submit": _("Replay with this body"),
        "form": form,
        "banner": banner,
        "notes": _notes(topic),
        "urls": places,
        "back_url": leave,
    }
    return pages.render(request, "topic/form.html", context, topic, status)


def _dead_copy(operations: Operations, topic: Topic, message_id: str) -> MessageCopy | None:
    try:
        copies = operations.get(topic.name, message_id)
    except (MessageGone, InvalidRequest):
        return None
    return next((copy for copy in copies if copy.state == "dead"), None)


def _notes(topic: Topic) -> list[str]:
    notes = []
    if is_redacted(topic):
        notes.append(_("This is the stored body, without redaction."))
    if not topic.keyed:
        notes.append(_("The body identifies the message, so an edited message is a different message."))
    return notes


def _editable(copy: MessageCopy) -> str:
    """Return the body of a copy as the text of a field."""
    raw = copy.raw or b""
    if copy.topic.body == "json":
        try:
            return dumps(copy.body(), ensure_ascii=False, indent=2, sort_keys=True)
        except (ValueError, RecursionError):
            pass
    return raw.decode("utf-8", "replace")


@topic_page(Permission.VIEW, Permission.SEND)
def send_view(pages: Pages, request: HttpRequest, operations: Operations, topic: Topic) -> HttpResponse:
    """Show the form for a message, and send it."""
    places = pages.places(topic.name)
    form = SendForm(topic, request.POST if request.method == "POST" else None)
    banner: Banner | None = None
    status = 200
    if request.method == "POST" and form.is_valid():
        try:
            sent = operations.send(topic.name, form.cleaned_data["body"], **form.options)
        except (InvalidMessage, LostRace) as error:
            form.add_error(None, str(error))
        except ServerTrouble as error:
            # The form stays, with what was typed.
            banner, status = pages.banner_of(request, error)
        else:
            tell(request, _("Send"), {sent.status: 1})
            return HttpResponseRedirect(places.topic)
    return pages.render(
        request,
        "topic/form.html",
        {
            "heading": _("Send a message"),
            "submit": _("Send"),
            "form": form,
            "banner": banner,
            "urls": places,
            "back_url": places.topic,
        },
        topic,
        status,
    )
