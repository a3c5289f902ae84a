"""The routes: each translates a request, asks ``operations``, and translates the answer.

A view names the permission of each of its methods in ``needs``; without one it answers nobody. What is long is done
for ``SLICE_SECONDS`` and says how far it has come: the same request goes on.
"""

from __future__ import annotations

import binascii
import time
from base64 import b64decode
from collections.abc import Mapping
from typing import Any, ClassVar

from django.contrib.auth.models import AnonymousUser
from django.db import connections as databases
from django.db import transaction
from django.http import HttpRequest
from django.utils.decorators import method_decorator
from rest_framework.permissions import AllowAny
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.serializers import BaseSerializer
from rest_framework.views import APIView

from django_rmq.api import errors, permissions, shown, taken, throttles
from django_rmq.api.formats import Negotiation, Parser, Renderer, check_size
from django_rmq.api.schema import documented, view_schema
from django_rmq.core.words.messages import Topic
from django_rmq.exceptions import (
    InvalidMessage,
    MessageGone,
    NotPermitted,
    OperationRefused,
    TopicFull,
    UnknownTopic,
)
from django_rmq.operations import Actor, Done, Limits, Operations, Permission, not_found
from django_rmq.operations.deliveries import Outcome, Settled
from django_rmq.operations.health import Health
from django_rmq.operations.health import Limits as HealthLimits
from django_rmq.operations.waiting import seats
from django_rmq.project.sending import Send
from django_rmq.project.settings import get_config

SLICE_SECONDS = 2.0
"""How long one request works on many messages."""

MESSAGE_ID = {"id": {"type": "string", "pattern": "^[0-9]{1,7}\\..+$"}}
"""A slot, and what names a message there."""

LONGEST_KEY = 255
"""Characters of an Idempotency-Key."""

READY_SECONDS = 1.0
"""How old an answer may be that anybody can ask for."""


class RmqView(APIView):
    """What all routes have in common."""

    needs: ClassVar[Mapping[str, Permission]] = {}
    """Method → the permission without which it is not answered."""
    needed = Permission.VIEW
    """The one that the present request needs."""

    http_method_names = ("get", "post", "delete", "head")
    parser_classes = (Parser,)
    renderer_classes = (Renderer,)
    content_negotiation_class = Negotiation
    versioning_class = None
    metadata_class = None
    schema = view_schema()

    def initialize_request(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Request:
        """Return the request; whatever it calls its encoding, addresses and bodies are UTF-8."""
        request.encoding = "utf-8"
        return super().initialize_request(request, *args, **kwargs)

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Look at the size, then who asks, then whether that is permitted."""
        check_size(request.META.get("CONTENT_LENGTH"), request.META.get("HTTP_CONTENT_ENCODING", ""))
        super().initial(request, *args, **kwargs)
        method = "GET" if request.method == "HEAD" else str(request.method)
        if method.lower() not in self.http_method_names or not hasattr(self, method.lower()):
            return  # which is a 405
        needed = self.needs.get(method)
        try:
            if needed is None:
                raise NotPermitted("nobody may do this")
            self.needed = needed
            self.operations.actor.require(needed)
        except NotPermitted as error:
            self.permission_denied(request, str(error))

    def finalize_response(self, request: Request, response: Response, *args: Any, **kwargs: Any) -> Response:
        """Return the response; nobody on its way may keep it."""
        response["Cache-Control"] = "no-store"
        return super().finalize_response(request, response, *args, **kwargs)

    def get_permissions(self) -> Any:
        """Return the permission that the settings choose."""
        return [permissions.chosen()]

    def get_throttles(self) -> Any:
        """Return those of the project."""
        return throttles.chosen()

    def get_exception_handler(self) -> Any:
        """Return ours, whatever the project has."""
        return errors.answer

    # --- what views ask for

    @property
    def operations(self) -> Operations:
        """What the user of this request may see and do."""
        # A project may have nobody where Django has an anonymous user.
        user: Any = self.request.user
        return Operations(Actor.of_user(user or AnonymousUser(), "rest"))

    def may_know(self, topic: Topic) -> bool:
        """Return whether the user may know of a topic."""
        return permissions.chosen().has_object_permission(self.request, self, topic)

    def known(self) -> list[str]:
        """Return the names of all topics that the user may know of."""
        return [name for name, topic in get_config().topics.items() if self.may_know(topic)]

    def topic(self, name: str) -> Topic:
        """Return a topic; one that the user must not know of is answered like one that is not there."""
        try:
            found = get_config().topic(name)
        except UnknownTopic:
            found = None
        if found is None or not self.may_know(found):
            raise errors.NotFound(f"There is no topic {name[:100]!r}.")
        return found

    @staticmethod
    def read(kind: type[BaseSerializer[Any]], data: Any) -> dict[str, Any]:
        """Return the validated values of a request. Raises ``ValidationError``."""
        fields = kind(data=data)
        fields.is_valid(raise_exception=True)
        return dict(fields.validated_data)


# --- looking


class TopicsView(RmqView):
    """``topics/``."""

    needs = {"GET": Permission.VIEW}

    @documented("topics", "All topics, and what they hold", answers={200: shown.TopicsAnswer})
    def get(self, request: Request) -> Response:
        """List topics."""
        return Response({"results": [shown.topic(one) for one in self.operations.overview(self.known())]})


class TopicView(RmqView):
    """``topics/{topic}/``."""

    needs = {"GET": Permission.VIEW}

    @documented("topic", "One topic, and what it holds", answers={200: shown.TopicAnswer}, errors=[404])
    def get(self, request: Request, topic: str) -> Response:
        """Show one topic."""
        return Response(shown.topic(self.operations.topic(self.topic(topic).name)))


class StatsView(RmqView):
    """``stats/``."""

    needs = {"GET": Permission.VIEW}

    @documented(
        "stats",
        "What has passed through topics so far: sent, done and failed. Topics of very many slots are left out",
        answers={200: shown.StatsAnswer},
    )
    def get(self, request: Request) -> Response:
        """Count."""
        return Response(shown.stats(self.operations.flow(self.known())))


class SlotsView(RmqView):
    """``slots/``."""

    needs = {"GET": Permission.VIEW}

    @documented(
        "slots",
        "Slots of a topic: what each holds, and who owns it",
        query=taken.SlotsQuery,
        answers={200: shown.SlotsAnswer},
        errors=[404],
    )
    def get(self, request: Request) -> Response:
        """List slots."""
        asked = self.read(taken.SlotsQuery, request.query_params)
        topic = self.topic(asked["topic"])
        found = self.operations.slots(topic.name, asked["first"], asked["limit"])
        return Response(shown.slots(found, asked["first"]))


class WorkersView(RmqView):
    """``workers/``."""

    needs = {"GET": Permission.VIEW}

    @documented("workers", "Live workers, and what is assigned to them", answers={200: shown.WorkersAnswer})
    def get(self, request: Request) -> Response:
        """List workers."""
        known = set(self.known())
        return Response({"results": [shown.worker(one, known) for one in self.operations.workers()]})


class MessagesView(RmqView):
    """``topics/{topic}/messages/``."""

    needs = {"GET": Permission.VIEW, "POST": Permission.SEND}

    @documented(
        "messages",
        "Messages of a topic in one state, page by page",
        query=taken.MessagesQuery,
        answers={200: shown.MessagesAnswer},
        errors=[404, 409],
    )
    def get(self, request: Request, topic: str) -> Response:
        """List messages."""
        declared = self.topic(topic)
        asked = self.read(taken.MessagesQuery, request.query_params)
        order = asked.get("order")
        listing = self.operations.listing(
            declared.name,
            asked["state"],
            cursor=asked.get("cursor", ""),
            wanted=taken.wanted(asked),
            limit=asked.get("page_size"),
            descending=None if order is None else order == "descending",
        )
        following = None
        if listing.cursor:
            query = request.query_params.copy()
            query["cursor"] = listing.cursor
            following = f"{request.build_absolute_uri(request.path)}?{query.urlencode()}"
        return Response(shown.page(listing, following))

    @documented(
        "send",
        "Send one message, or many: nothing is sent if one of them cannot be",
        takes=("Sending", [taken.SendFields, taken.SendsFields]),
        headers={
            "Idempotency-Key": (
                "A text of your own, 1 to 255 characters: a repeated request is done once a day, and answered alike",
                {"type": "string", "minLength": 1, "maxLength": LONGEST_KEY, "pattern": "^[ -~]+$"},
            ),
        },
        answers={202: shown.SendsAnswer},
        errors=[404, 409, 422, 429, 507],
        examples={
            "a priority topic": {"body": {"sku": 1, "shop": 7}, "priority": 500},
            "a fixed_time topic": {"body": {"order": 9}, "fixed_time": "2030-01-31T12:00:00Z"},
            "many of a range_merge topic": {"messages": [{"body": {"sku": 1}}, {"body": {"sku": 2}}]},
        },
        answered={
            "stored": {
                "results": [{"id": "3.eyJza3UiOjF9", "slot": 3, "status": "stored", "score": 1893456000000}],
                "outcomes": {"stored": 1},
            }
        },
    )
    def post(self, request: Request, topic: str) -> Response:
        """Send."""
        declared = self.topic(topic)
        data = request.data
        many = isinstance(data, Mapping) and "messages" in data
        asked = self.read(taken.SendsFields if many else taken.SendFields, data)
        sends = [_send(declared, one) for one in (asked["messages"] if many else [asked])]
        # Without it the framework reads no body.
        size = int(request.META["CONTENT_LENGTH"])
        key = request.headers.get("Idempotency-Key")
        if key is None:
            return Response(self._send(declared, sends, size), status=202)
        if not (1 <= len(key) <= LONGEST_KEY and key.isascii() and key.isprintable()):
            raise errors.Invalid(f"Idempotency-Key must be 1 to {LONGEST_KEY} printable characters of ASCII.")
        if len(sends) > taken.MOST_ONCE:
            raise errors.Invalid(f"At most {taken.MOST_ONCE} messages can be sent with an Idempotency-Key.")
        with self.operations.once(key, [declared.name, data], len(sends)) as attempt:
            if attempt.answer is None:
                attempt.done(self._send(declared, sends, size))
        return Response(attempt.answer, status=202)

    def _send(self, topic: Topic, sends: list[Send], size: int) -> Any:
        operations = self.operations
        operations.spend_sends(len(sends), size)
        results = operations.send_each(topic.name, sends)
        outcomes = results.counts()
        if outcomes["refused"] == len(results):
            raise TopicFull(f"topic {topic.name} is full: MAX_BACKLOG is reached where this was to go")
        return shown.sends(results, outcomes, operations.sent_id)


def _send(topic: Topic, asked: Mapping[str, Any]) -> Send:
    options = {
        name: asked[name]
        for name in ("key", "priority", "fixed_time", "slot_basis", "headers", "expires")
        if name in asked
    }
    if "time_range_ms" in asked:
        options["time_range"] = asked["time_range_ms"]
    return Send(_body(topic, asked["body"]), **options)


def _body(topic: Topic, body: Any) -> Any:
    """Return a body as its topic takes it: bytes come as base64."""
    if topic.body != "bytes":
        return body
    try:
        return b64decode(body, validate=True)
    except (TypeError, ValueError, binascii.Error):
        raise InvalidMessage(f"topic {topic.name} has BODY 'bytes': body must be base64") from None


# --- acts


def _outcome(done: Done, message_id: str, good: Mapping[str, int]) -> Response:
    """Answer what came of an act on one message; ``good``: outcome → status."""
    (word,) = done.found.values()
    if word == "gone":
        raise MessageGone(f"there is no message {message_id[:80]} (any more)")
    if word == "not_found":
        raise OperationRefused(not_found(message_id))
    if word not in good:
        raise errors.Conflict(f"The message is {word.replace('_', ' ')}: this is not for it.", word)
    return Response({"id": message_id, "outcome": word}, status=good[word])


class MessageView(RmqView):
    """``topics/{topic}/messages/{id}/``."""

    needs = {"GET": Permission.VIEW, "DELETE": Permission.DELETE}

    @documented(
        "message",
        "All copies of a message: where it waits, runs, rests, is claimed or lies dead",
        path=MESSAGE_ID,
        answers={200: shown.CopiesAnswer},
        errors=[400, 404, 409],
    )
    def get(self, request: Request, topic: str, id: str) -> Response:  # noqa: A002 - the name in the address
        """Show a message."""
        copies = self.operations.get(self.topic(topic).name, id)
        return Response({"results": [shown.copy(one) for one in copies]})

    @documented(
        "delete",
        "Delete a message: 202 where it runs, and ends with its delivery",
        path=MESSAGE_ID,
        query=taken.CopyQuery,
        answers={200: shown.OutcomeAnswer, 202: shown.OutcomeAnswer},
        errors=[404, 409],
    )
    def delete(self, request: Request, topic: str, id: str) -> Response:  # noqa: A002
        """Delete a message."""
        name, operations = self.topic(topic).name, self.operations
        copy = self.read(taken.CopyQuery, request.query_params).get("copy")
        done = operations.delete_only(name, id) if copy is None else operations.delete(name, [id], copy)
        if "both" in done.outcomes:
            raise errors.Conflict(
                "The message is dead and was sent again: say copy=live or copy=dead.", "both"
            )
        return _outcome(done, id, {"deleted": 200, "in_flight": 202})


class ReplayMessageView(RmqView):
    """``topics/{topic}/messages/{id}/replay/``."""

    needs = {"POST": Permission.REPLAY}

    @documented(
        "replay_message",
        "Send a dead message again with its full budget of retries; with a body, edited",
        path=MESSAGE_ID,
        takes=taken.EditFields,
        answers={200: shown.OutcomeAnswer},
        errors=[404, 409, 507],
        examples={"as it was": {}, "edited": {"body": {"sku": 1, "shop": 8}}},
    )
    def post(self, request: Request, topic: str, id: str) -> Response:  # noqa: A002
        """Replay a message."""
        declared, operations = self.topic(topic), self.operations
        asked = self.read(taken.EditFields, request.data)
        if "body" in asked:
            done = operations.replay_edited(declared.name, id, _body(declared, asked["body"]))
        else:
            done = operations.replay(declared.name, [id])
        return _outcome(done, id, {"replayed": 200, "merged": 200})


class BuryView(RmqView):
    """``topics/{topic}/messages/{id}/bury/``."""

    needs = {"POST": Permission.DELETE}

    @documented(
        "bury",
        "Put a message into Dead: 202 where it runs, and dies when its delivery ends",
        path=MESSAGE_ID,
        takes=taken.BuryFields,
        answers={200: shown.OutcomeAnswer, 202: shown.OutcomeAnswer},
        errors=[404, 409],
        examples={"with a reason": {"why": "the customer has asked for it"}},
    )
    def post(self, request: Request, topic: str, id: str) -> Response:  # noqa: A002
        """Bury a message."""
        name = self.topic(topic).name
        asked = self.read(taken.BuryFields, request.data)
        done = self.operations.bury(name, [id], asked.get("why", ""))
        return _outcome(done, id, {"buried": 200, "in_flight": 202})


class RescheduleView(RmqView):
    """``topics/{topic}/messages/{id}/reschedule/``."""

    needs = {"POST": Permission.EDIT}

    @documented(
        "reschedule",
        "Give a waiting message another due time, or another priority",
        path=MESSAGE_ID,
        takes=taken.RescheduleFields,
        answers={200: shown.OutcomeAnswer},
        errors=[404, 409],
        examples={"later": {"due": "2030-01-31T12:00:00Z"}, "before others": {"priority": 10000}},
    )
    def post(self, request: Request, topic: str, id: str) -> Response:  # noqa: A002
        """Reschedule a message."""
        name = self.topic(topic).name
        asked = self.read(taken.RescheduleFields, request.data)
        done = self.operations.reschedule(name, [id], due=asked.get("due"), priority=asked.get("priority"))
        return _outcome(done, id, {"rescheduled": 200})


def _limits(asked: Mapping[str, Any]) -> Limits:
    return Limits(messages=asked.get("limit"), seconds=SLICE_SECONDS)


class ReplayView(RmqView):
    """``topics/{topic}/replay/``."""

    needs = {"POST": Permission.REPLAY}

    @documented(
        "replay",
        "Send dead messages again: those named, or all that a filter means",
        takes=("Replaying", [taken.ReplayNamedFields, taken.ReplayFilterFields]),
        answers={200: shown.ProgressAnswer},
        errors=[404, 409, 507],
        examples={
            "by a filter": {"filter": {"error": "ConnectionError"}, "limit": 1000},
            "count only": {"filter": {}, "dry_run": True},
        },
    )
    def post(self, request: Request, topic: str) -> Response:
        """Replay many."""
        declared, operations = self.topic(topic), self.operations
        data = request.data
        if isinstance(data, Mapping) and ("ids" in data) == ("filter" in data):
            raise errors.Invalid("Say either `ids` or `filter`; an empty filter means all.")
        if not (isinstance(data, Mapping) and "ids" in data):
            asked = self.read(taken.ReplayFilterFields, data)
            wanted = taken.wanted(asked["filter"])
            run = operations.replay_all(
                declared.name, wanted, limits=_limits(asked), dry_run=asked["dry_run"]
            )
            return Response(shown.progress(run.result()))
        asked = self.read(taken.ReplayNamedFields, data)
        done = operations.replay(declared.name, asked["ids"])
        return Response(shown.acted(done))


class PurgeView(RmqView):
    """``topics/{topic}/purge/``."""

    needs = {"POST": Permission.PURGE}

    @documented(
        "purge",
        "Delete what a state of a topic holds, without looking at it",
        takes=taken.PurgeFields,
        answers={200: shown.ProgressAnswer},
        errors=[404, 409],
        examples={"dead for a week": {"state": "dead", "older_than": 604800}},
    )
    def post(self, request: Request, topic: str) -> Response:
        """Purge."""
        name = self.topic(topic).name
        asked = self.read(taken.PurgeFields, request.data)
        run = self.operations.purge(
            name,
            asked["state"],
            older_than=asked.get("older_than"),
            slot=asked.get("slot"),
            limits=_limits(asked),
            dry_run=asked["dry_run"],
        )
        return Response(shown.progress(run.result()))


class PauseView(RmqView):
    """``topics/{topic}/pause/``."""

    needs = {"POST": Permission.PAUSE}

    @documented(
        "pause",
        "Stop handing out messages of a topic; counts slots",
        answers={200: shown.ProgressAnswer},
        errors=[404, 409],
    )
    def post(self, request: Request, topic: str) -> Response:
        """Pause."""
        return Response(shown.progress(self.operations.pause(self.topic(topic).name).result()))


class ResumeView(RmqView):
    """``topics/{topic}/resume/``."""

    needs = {"POST": Permission.PAUSE}

    @documented(
        "resume",
        "Go on with a paused topic; counts slots",
        answers={200: shown.ProgressAnswer},
        errors=[404, 409],
    )
    def post(self, request: Request, topic: str) -> Response:
        """Resume."""
        return Response(shown.progress(self.operations.resume(self.topic(topic).name).result()))


# --- consuming


@method_decorator(transaction.non_atomic_requests, name="dispatch")
class PrepareView(RmqView):
    """``topics/{topic}/prepare/``."""

    needs = {"POST": Permission.CONSUME}

    @documented(
        "prepare",
        "Take messages, or answer what this consumer holds. What is not settled or extended in time comes back",
        takes=taken.PrepareFields,
        answers={200: shown.TakenAnswer},
        errors=[404, 409, 507],
        examples={
            "wait for up to ten": {"consumer": "6f9619ff-8b86-4d01-b42d-00cf4fc964ff", "max": 10, "wait": 20},
            "after a lost answer": {"consumer": "6f9619ff-8b86-4d01-b42d-00cf4fc964ff", "held": True},
        },
        answered={
            "one message": {
                "messages": [
                    {
                        "id": "3.eyJza3UiOjF9",
                        "slot": 3,
                        "receipt": "17.0b5c7c1f3e9d4a6f8b21",
                        "delivery": 17,
                        "body": {"sku": 1},
                        "encoding": "json",
                        "key": None,
                        "headers": {},
                        "retries_left": 16,
                    }
                ],
                "timeout": 30,
                "next_slot": None,
                "wait_refused": False,
            }
        },
    )
    def post(self, request: Request, topic: str) -> Response:
        """Take messages."""
        declared = self.topic(topic)
        asked = self.read(taken.PrepareFields, request.data)
        deliveries = self.operations.deliveries(declared.name)
        if asked["held"]:
            held = deliveries.held(asked["consumer"], asked["first"])
            return Response(shown.taken(deliveries, declared, held.messages, held.next_slot))
        if not asked["wait"]:
            messages = deliveries.take(asked["consumer"], asked["max"])
            return Response(shown.taken(deliveries, declared, messages, None))
        has_threads = request.META.get("wsgi.multithread", True)
        with seats.seat(self.operations.actor, *get_config().api.waiting(has_threads)) as may_wait:
            if may_wait:
                _let_go_of_databases()
            messages = deliveries.take(asked["consumer"], asked["max"], asked["wait"] if may_wait else 0)
        response = Response(shown.taken(deliveries, declared, messages, None))
        if not (may_wait or messages):
            response.data["wait_refused"] = True
            response["Retry-After"] = "1"
        return response


def _let_go_of_databases() -> None:
    """Close the database connections of a request that waits."""
    for database in databases.all(initialized_only=True):
        if not database.in_atomic_block:
            database.close()


class SettlingView(RmqView):
    """What ends deliveries, or lets them last."""

    needs = {"POST": Permission.CONSUME}

    def settle(self, request: Request, topic: str, verb: str) -> Response:
        """Settle what the request names."""
        name = self.topic(topic).name
        asked = self.read(taken.SettleFields, request.data)
        settled = [Settled(one["id"], one["receipt"]) for one in asked["deliveries"]]
        return Response(shown.settled(settled, getattr(self.operations.deliveries(name), verb)(settled)))


_SETTLED: dict[str, Any] = {
    "takes": taken.SettleFields,
    "answers": {200: shown.SettlementAnswer},
    "errors": [404, 409, 507],
    "examples": {"one": {"deliveries": [{"id": "3.eyJza3UiOjF9", "receipt": "17.0b5c7c1f3e9d4a6f8b21"}]}},
}


class CommitView(SettlingView):
    """``topics/{topic}/commit/``."""

    @documented("commit", "End deliveries with success", **_SETTLED)
    def post(self, request: Request, topic: str) -> Response:
        """Commit."""
        return self.settle(request, topic, "commit")


class ExtendView(SettlingView):
    """``topics/{topic}/extend/``."""

    @documented("extend", "Begin the time-out of deliveries anew", **_SETTLED)
    def post(self, request: Request, topic: str) -> Response:
        """Extend."""
        return self.settle(request, topic, "extend")


class ReleaseView(SettlingView):
    """``topics/{topic}/release/``."""

    @documented("release", "Give deliveries back that have not begun, with nothing spent", **_SETTLED)
    def post(self, request: Request, topic: str) -> Response:
        """Release."""
        return self.settle(request, topic, "release")


class RollbackView(SettlingView):
    """``topics/{topic}/rollback/``."""

    @documented(
        "rollback",
        "End deliveries with failure: they are tried again after a rest, or lie dead when no retries are left",
        takes=taken.RollbackFields,
        answers={200: shown.SettlementAnswer},
        errors=[404, 409, 507],
        examples={
            "one": {
                "deliveries": [
                    {
                        "id": "3.eyJza3UiOjF9",
                        "receipt": "17.0b5c7c1f3e9d4a6f8b21",
                        "error": "Timeout: no answer",
                    }
                ]
            }
        },
    )
    def post(self, request: Request, topic: str) -> Response:
        """Roll back."""
        name = self.topic(topic).name
        asked = self.read(taken.RollbackFields, request.data)["deliveries"]
        settled = [Settled(one["id"], one["receipt"]) for one in asked]
        outcomes = [
            Outcome(
                one.get("error", ""),
                round(one["delay"] * 1000) if "delay" in one else None,
                one["reject"],
            )
            for one in asked
        ]
        return Response(shown.settled(settled, self.operations.deliveries(name).rollback(settled, outcomes)))


# --- health


class PublicView(RmqView):
    """A route that anybody may ask, for probes."""

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Look at nothing but the size and what is accepted."""
        check_size(request.META.get("CONTENT_LENGTH"), request.META.get("HTTP_CONTENT_ENCODING", ""))
        APIView.initial(self, request, *args, **kwargs)

    def get_permissions(self) -> Any:
        """Return what asks for nothing."""
        return [AllowAny()]

    def get_throttles(self) -> Any:
        """Return nothing for a probe: one that is refused is a process that is killed."""
        known = getattr(self.request.user, "is_authenticated", False)
        return super().get_throttles() if known else []


class LiveView(PublicView):
    """``health/live``."""

    authentication_classes = ()

    @documented("live", "This process answers", answers={200: shown.LiveAnswer}, public=True)
    def get(self, request: Request) -> Response:
        """Say that we live."""
        return Response({"ok": True})


class _Ready:
    """What was found last, for those who may know no more than yes or no."""

    def __init__(self) -> None:
        self._config: Any = None
        self._until = 0.0
        self._found: Health | None = None

    def look(self) -> Health:
        """Return what was found within the last second, else look."""
        config = get_config()
        if self._found is None or self._config is not config or time.monotonic() >= self._until:
            probe = Operations(Actor("probe", "rest"))
            # Of no topic: anybody may ask, and shall not make us count all slots.
            self._found = probe.health(HealthLimits(needs_workers=False), ())
            self._config, self._until = config, time.monotonic() + READY_SECONDS
        return self._found


_ready = _Ready()


class ReadyView(PublicView):
    """``health/ready``."""

    @documented(
        "ready",
        "Whether Redis answers and slots are assigned; who may see topics is told what was found, and may set limits",
        query=taken.HealthQuery,
        answers={200: shown.ReadyAnswer, 503: shown.ReadyAnswer},
        errors=[401, 403],
        public=True,
    )
    def get(self, request: Request) -> Response:
        """Look whether all is well."""
        asked = self.read(taken.HealthQuery, request.query_params)
        operations = self.operations
        if operations.actor.may(Permission.VIEW):
            known = self.known()
            limits = HealthLimits(asked.get("max_age"), asked.get("max_dead"), asked["workers"])
            found = shown.ready(operations.health(limits, known), set(known))
        elif request.query_params:
            self.permission_denied(request, f"{operations.actor.name} may not see topics")
        else:
            found = shown.ready(_ready.look(), None)
        response = Response(found, status=200 if found["ok"] else 503)
        if not found["ok"]:
            response["Retry-After"] = "2"
        return response
