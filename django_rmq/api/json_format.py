"""The JSON of REST: how requests are parsed, and limited in size before, how answers are rendered, and the base of their
serializers.

Times are milliseconds since the epoch, bodies have the form of their topic. The fields of an answer are beside its route
(``messages``, ``topics`` and others), those of a request in ``requests``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import cache
from operator import attrgetter
from typing import IO, Any, cast

from django.apps import apps
from rest_framework import serializers
from rest_framework.exceptions import ParseError, UnsupportedMediaType
from rest_framework.parsers import BaseParser
from rest_framework.renderers import AdminRenderer, BaseRenderer, BrowsableAPIRenderer
from rest_framework.settings import api_settings

from django_rmq.api.errors import BodyTooLarge
from django_rmq.conf import get_config
from django_rmq.core.model import body_codec

DEEPEST = body_codec.DEEPEST + 4
"""How many lists and objects of a request may stand within one another: those of a body, and what stands around it."""


def check_size(length: object, encoding: str = "") -> None:
    """Raise ``BodyTooLarge`` for a request whose declared size exceeds MAX_BYTES, before any of it is read.

    Raises ``UnsupportedMediaType`` for a compressed body, because its size is known only after unpacking it.
    """
    if encoding not in ("", "identity"):
        raise UnsupportedMediaType(encoding, f"Content-Encoding {encoding[:40]!r} is not supported.")
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


def renderers() -> list[BaseRenderer]:
    """Return the renderer of JSON, and the project's browsable ones (DEFAULT_RENDERER_CLASSES) for browsers."""
    # They are already imported, whatever the type of the setting says.
    classes = cast("list[type[BaseRenderer]]", api_settings.DEFAULT_RENDERER_CLASSES)
    # Their templates are those of the app.
    browsable = [
        kind
        for kind in classes
        if issubclass(kind, BrowsableAPIRenderer) and not issubclass(kind, AdminRenderer)
    ]
    return [Renderer(), *(kind() for kind in browsable if apps.is_installed("rest_framework"))]


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
