"""The common part of all routes: each translates a request, calls ``operations``, and translates the answer, as JSON.

``route`` makes a method of a view, and names the permission that it requires; a method without one is refused. Requests are
limited in size before they are parsed. In answers, times are milliseconds since the epoch, and bodies have the form of their
topic. The fields of an answer are beside its route (``messages``, ``topics`` and others), those of a request in ``requests``.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from copy import copy
from datetime import datetime
from functools import cache, partial, wraps
from inspect import getdoc
from operator import attrgetter
from typing import IO, Any, ClassVar, cast

from django.apps import apps
from django.contrib.auth.models import AnonymousUser
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest
from django.utils.functional import cached_property
from rest_framework import serializers
from rest_framework.exceptions import ParseError, UnsupportedMediaType
from rest_framework.metadata import SimpleMetadata
from rest_framework.negotiation import DefaultContentNegotiation
from rest_framework.parsers import BaseParser
from rest_framework.permissions import BasePermission
from rest_framework.renderers import AdminRenderer, BaseRenderer, BrowsableAPIRenderer
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.serializers import BaseSerializer
from rest_framework.settings import api_settings
from rest_framework.throttling import BaseThrottle
from rest_framework.views import APIView

from django_rmq.api import errors, requests
from django_rmq.api.errors import BodyTooLarge, LengthRequired
from django_rmq.api.permissions import TopicPermission
from django_rmq.api.requests import Fields, RequestSerializer, body_for
from django_rmq.api.schema import documented, view_schema
from django_rmq.conf import get_config
from django_rmq.core.model import body_codec
from django_rmq.core.model.body_codec import exact_json
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import MessageGone, NotPermitted, OperationRefused, UnknownTopic
from django_rmq.operations import (
    ActionResult,
    Actor,
    Operations,
    Permission,
    TopicRule,
    not_found,
    topic_permission,
)

logger = logging.getLogger("django_rmq.api")


DEEPEST = body_codec.DEEPEST + 4
"""How many lists and objects of a request may stand within one another: those of a body, and what stands around it."""


def check_size(meta: Mapping[str, Any]) -> None:
    """Raise ``BodyTooLarge`` for a request whose declared size exceeds MAX_BYTES, before any of it is read.

    Raises ``LengthRequired`` for a body whose size is not declared, because the framework would read nothing of it, and
    ``UnsupportedMediaType`` for a compressed body, because its size is known only after unpacking it. ``meta``: the headers as
    Django has them.
    """
    encoding, length = meta.get("HTTP_CONTENT_ENCODING", ""), meta.get("CONTENT_LENGTH")
    if encoding not in ("", "identity"):
        raise UnsupportedMediaType(encoding, f"Content-Encoding {encoding[:40]!r} is not supported.")
    if not length and "HTTP_TRANSFER_ENCODING" in meta:
        raise LengthRequired("Send the body with a Content-Length. Transfer-Encoding is not supported.")
    most = get_config().api.max_bytes
    try:
        stated = int(str(length or 0))
    except ValueError:
        raise ParseError("Content-Length is not a number.", "invalid_request") from None
    if stated > most:
        raise BodyTooLarge(f"The body has {stated} bytes; {most} are allowed.")


class Parser(BaseParser):
    """JSON in UTF-8: no NaN, no lone surrogates, no duplicate keys, at most MAX_BYTES."""

    media_type = "application/json"

    def parse(self, stream: IO[bytes], media_type: str | None = None, parser_context: object = None) -> Any:
        """Return the value of the body."""
        most = get_config().api.max_bytes
        raw = stream.read(most + 1)
        if len(raw) > most:
            raise BodyTooLarge(f"The body has more than {most} bytes.")
        try:
            text = raw.decode()
            value = json.loads(
                text,
                parse_constant=_refuse,
                object_pairs_hook=body_codec.unique_keys,
                parse_float=body_codec.exact_number,
            )
            # UTF-8 holds no lone surrogates, so only an escape can make one; nothing else pays for this check.
            if "\\ud" in text or "\\uD" in text:
                body_codec.dumps(value, ensure_ascii=False).encode()
            if body_codec.is_deeper(value, DEEPEST):
                raise RecursionError
            value = body_codec.floats_beside_bodies(value)
        except (ValueError, RecursionError) as error:
            reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
            raise ParseError(f"The body is not JSON: {reason[:200]}.", "invalid_json") from None
        return value


def _refuse(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


class Renderer(BaseRenderer):
    """JSON in UTF-8, whatever the project's settings for JSON."""

    media_type = "application/json"
    format = "json"
    # JSON is UTF-8 by definition, and the framework would write a charset into the content type.
    charset = None

    def render(
        self,
        data: object,
        accepted_media_type: str | None = None,
        renderer_context: Mapping[str, object] | None = None,
    ) -> bytes:
        if data is None:
            return b""
        # The browsable API asks for an indentation.
        indent = (renderer_context or {}).get("indent")
        form: dict[str, object] = {"indent": indent} if indent else {"separators": (",", ":")}
        try:
            return body_codec.dumps(data, ensure_ascii=False, allow_nan=False, **form).encode()
        except UnicodeEncodeError:
            # Foreign programs may have put lone surrogates into headers.
            return body_codec.dumps(data, allow_nan=False, **form).encode()


# --- answers

AnyField = serializers.Field[Any, Any, Any, Any]

Json = dict[str, object]
"""An object of JSON."""


class ResponseSerializer(serializers.Serializer[object]):
    """An answer. A field has the value of the attribute that is its ``source``, or is named like it."""

    @classmethod
    def of(cls, shown: object, **values: object) -> Json:
        """Return the answer about ``shown``. ``values``: those of fields that are no attributes of it.

        It is faster than ``to_representation``, which converts each value: attributes are as JSON takes them.
        """
        return {
            name: values[name] if name in values else read(shown)
            for name, (read, is_required) in _readers(cls).items()
            if is_required or name in values
        }


@cache
def _readers(kind: type[ResponseSerializer]) -> dict[str, tuple[Callable[[object], object], bool]]:
    """Return how each field is read, and whether every answer has it."""
    return {
        name: (_reader(field, field.source or name), field.required) for name, field in kind().fields.items()
    }


def _reader(field: AnyField, source: str) -> Callable[[object], object]:
    read = attrgetter(source)
    if isinstance(field, ResponseSerializer):
        return lambda shown: None if (value := read(shown)) is None else field.of(value)
    if isinstance(field, serializers.ListSerializer):
        child: Any = field.child
        return lambda shown: [child.of(value) for value in read(shown)]
    if isinstance(field, InstantField):
        return lambda shown: None if (value := read(shown)) is None else milliseconds(value)
    return read


class InstantField(serializers.IntegerField):
    """A time, of which the answer has the milliseconds."""


def milliseconds(when: datetime) -> int:
    """Return the milliseconds since the epoch."""
    return int(when.timestamp() * 1000)


def maybe(field: type[AnyField] = serializers.IntegerField, **how: Any) -> object:
    """Return a field that may be null."""
    return field(allow_null=True, **how)


class RmqView(APIView):
    """The base of all routes."""

    needs: ClassVar[Mapping[str, Permission]] = {}
    """Method → the permission that it requires, as its ``route`` says."""
    needed = Permission.VIEW
    """The permission that the present request requires."""

    http_method_names = ("get", "post", "delete", "head", "options")
    parser_classes = (Parser,)
    renderer_classes = (Renderer,)
    content_negotiation_class = DefaultContentNegotiation
    # The version is in the path: see ``urls``.
    versioning_class = None
    metadata_class = SimpleMetadata
    schema = view_schema()

    def __init_subclass__(cls) -> None:
        methods = {name.upper(): getattr(cls, name, None) for name in cls.http_method_names}
        routed = {name: needed for name, of in methods.items() if (needed := getattr(of, "needed", None))}
        cls.needs = {**cls.needs, **routed}

    def initialize_request(self, request: HttpRequest, *args: object, **kwargs: object) -> Request:
        """Return the request. Addresses and bodies are UTF-8, whatever encoding it declares."""
        request.encoding = "utf-8"
        return super().initialize_request(request, *args, **kwargs)

    def initial(self, request: Request, *args: object, **kwargs: object) -> None:
        """Check the size, then the authentication, then the permission."""
        # The size comes first, because the CSRF check of a session may read the body.
        check_size(request.META)
        super().initial(request, *args, **kwargs)
        method = "GET" if request.method == "HEAD" else str(request.method)
        if method == "OPTIONS" or not self._has(method):
            return  # Its answer has no data, or is a 405.
        permission = self.needs.get(method)
        try:
            if permission is None:
                raise NotPermitted("not permitted")
            self.needed = permission
            self.operations.actor.require(permission)
        except NotPermitted as error:
            self.permission_denied(request, str(error))

    def finalize_response(
        self, request: Request, response: Response, *args: object, **kwargs: object
    ) -> Response:
        """Return the response, with headers that forbid caching it."""
        response["Cache-Control"] = "no-store"
        return super().finalize_response(request, response, *args, **kwargs)

    def _has(self, method: str) -> bool:
        return method.lower() in self.http_method_names and hasattr(self, method.lower())

    @property
    def description(self) -> str:
        """What each method of this route does and requires, for OPTIONS and for the browsable API."""
        texts = {
            name: getdoc(getattr(self, name.lower())) for name in ("GET", "POST", "DELETE") if self._has(name)
        }
        return "\n\n".join(
            f"{name}: {text}"
            + (f" Requires the permission {self.needs[name].full_name}." if name in self.needs else "")
            for name, text in texts.items()
        )

    def get_renderers(self) -> list[BaseRenderer]:
        """Return the renderer of JSON, and the project's browsable ones (DEFAULT_RENDERER_CLASSES) for browsers."""
        # Their templates are those of the app.
        if not apps.is_installed("rest_framework"):
            return [Renderer()]
        # They are already imported, whatever the type of the setting says.
        classes = cast("list[type[BaseRenderer]]", api_settings.DEFAULT_RENDERER_CLASSES)
        # The admin renderer shows the errors of a POST on the page of its GET, and most of these views have none.
        browsable = [
            kind()
            for kind in classes
            if issubclass(kind, BrowsableAPIRenderer) and not issubclass(kind, AdminRenderer)
        ]
        return [Renderer(), *browsable]

    def get_permissions(self) -> list[BasePermission]:
        return [topic_permission() or TopicPermission()]

    def get_throttles(self) -> list[BaseThrottle]:
        """Return the throttles that ``REST_FRAMEWORK`` sets for all views; one without a rate throttles nothing."""
        throttles = []
        # They are already imported, whatever the type of the setting says.
        for kind in cast("list[type[BaseThrottle]]", api_settings.DEFAULT_THROTTLE_CLASSES):
            try:
                throttles.append(kind())
            except ImproperlyConfigured as error:
                _log_throttle_once(f"{kind.__module__}.{kind.__qualname__}", str(error))
        return throttles

    def get_exception_handler(self) -> Callable[[Exception, object], Response | None]:
        """Return this package's handler, whatever the project has."""
        return errors.answer

    # --- for views

    @cached_property
    def operations(self) -> Operations:
        """The operations of the user of this request, with the topics that the user may know of for what it does."""
        permission = topic_permission()
        rule = None
        if permission is not None:

            def ask(topic: Topic, needed: Permission) -> bool:
                # An action may require more than its route, for example that which a request undoes.
                view = copy(self)
                view.needed = needed
                return bool(permission.has_object_permission(self.request, view, topic))

            rule = TopicRule(ask)
        # A project may have None in place of Django's anonymous user.
        user: object = self.request.user
        return Operations(Actor.of_user(user or AnonymousUser(), "rest", rule))

    def known(self) -> list[str]:
        """Return the names of all topics that the user may know of."""
        return list(self.operations.topics())

    def topic(self, name: str) -> Topic:
        """Return a topic; one that the user must not know of gets the same error as one that does not exist."""
        try:
            return self.operations.declared(name, self.needed)
        except UnknownTopic:
            raise errors.NotFound(f"There is no topic {name[:100]!r}.") from None

    @staticmethod
    def read(kind: type[BaseSerializer[object]], data: object) -> Fields:
        """Return the validated values of a request. Raises ``ValidationError``."""
        fields = kind(data=data)
        fields.is_valid(raise_exception=True)
        return dict(fields.validated_data)


@cache
def _log_throttle_once(name: str, error: str) -> None:
    logger.error("The throttle %s does not limit the API of RMQ: %s", name, error)


def route(
    name: str,
    needed: Permission | None = None,
    *,
    answers: Mapping[int, type[ResponseSerializer]],
    takes: Any = None,
    query: type[RequestSerializer] | None = None,
    **described: Any,
) -> Callable[[Callable[..., Json | Response]], Callable[..., Response]]:
    """Make a method of a view, which requires a permission and is described as ``documented`` says.

    The method gets what is in the address: a ``topic`` that the user may know of, and a ``message_id``. If ``query`` or
    ``takes`` is a serializer, it gets the validated ``query`` and ``fields``. JSON that it returns has the lowest status of
    ``answers``.
    """

    def decorate(method: Callable[..., Json | Response]) -> Callable[..., Response]:
        @wraps(method)
        def handle(view: RmqView, request: Request, **address: Any) -> Response:
            if "topic" in address:
                address["topic"] = view.topic(address["topic"])
            if "id" in address:
                address["message_id"] = address.pop("id")
            if query is not None:
                address["query"] = view.read(query, request.query_params)
            if isinstance(takes, type):
                address["fields"] = view.read(takes, request.data)
            answer = method(view, **address)
            return answer if isinstance(answer, Response) else Response(answer, status=min(answers))

        handle.needed = needed  # type: ignore[attr-defined]
        return documented(name, answers=answers, takes=takes, query=query, **described)(handle)

    return decorate


MESSAGE_ID = {"id": {"type": "string", "pattern": "^([0-9]{1,7}[.~].+|-)$"}}
"""A slot, and the part that names a message there; or ``-`` if the query names it."""

message_route = partial(route, path=MESSAGE_ID, query=requests.NameQuery)
"""Make a method of a ``MessageRoute``."""


class MessageRoute(RmqView):
    """A route of one message. The address has its id, or ``-`` if the query names it by its key or body."""

    def named(self, topic: Topic, message_id: str, query: Fields) -> Fields:
        """Return how the message is named: ``id``, or the arguments ``key``, ``body`` and ``slot_basis``."""
        arguments: Fields = {name: query[name] for name in ("key", "body", "slot_basis") if name in query}
        if message_id != "-":
            if arguments:
                raise errors.Invalid("An id is the whole name of a message: give no key, body or slot_basis.")
            return {"id": message_id}
        if not arguments.keys() & {"key", "body"}:
            raise errors.Invalid("Name the message by an id in the address, or by ?key= or ?body=.")
        if "body" in arguments and topic.body == "json":
            try:
                arguments["body"] = exact_json(arguments["body"])
            except (ValueError, RecursionError) as error:
                raise errors.Invalid(f"body is not JSON: {error}") from None
        elif "body" in arguments:
            arguments["body"] = body_for(topic, arguments["body"])
        return arguments

    def id_of(self, topic: Topic, message_id: str, query: Fields) -> str:
        """Return the id of the message, which may not exist."""
        arguments = self.named(topic, message_id, query)
        return str(arguments["id"]) if "id" in arguments else self.operations.id_of(topic.name, **arguments)


def outcome(done: ActionResult, message_id: str, good: Mapping[str, int]) -> Response:
    """Return the response to the outcome of an action on one message. ``good``: outcome → status."""
    (word,) = done.found.values()
    if word == "gone":
        raise MessageGone(f"The message {message_id[:80]} does not exist.")
    if word == "not_found":
        raise OperationRefused(not_found(message_id))
    if word not in good:
        raise errors.Conflict(f"Not possible: the message is {word.replace('_', ' ')}.", word)
    undo_fields = {"undo": done.undo} if done.undo else {}
    return Response({"id": message_id, "outcome": word, **undo_fields}, status=good[word])
