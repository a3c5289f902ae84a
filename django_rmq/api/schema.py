"""The OpenAPI description of the API, if drf-spectacular (extra ``openapi``) is installed.

Views describe their input and output with ``documented``; the statuses that any view may return are added
here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from typing import Any, TypeVar, cast

from rest_framework import serializers
from rest_framework.schemas.inspectors import ViewInspector

_Target = TypeVar("_Target")


class Problem(serializers.Serializer[Any]):
    """What went wrong: a stable code, and a sentence for people."""

    code = serializers.CharField()
    detail = serializers.CharField()
    errors = serializers.DictField(  # type: ignore[assignment] # a field, which the class takes out of its body
        required=False, help_text="code `invalid`: what is wrong with which field"
    )
    outcome = serializers.CharField(required=False, help_text="What the message is instead")


MEANINGS = {
    400: "The request is not valid",
    401: "Nobody is logged in",
    403: "The user may not do this",
    404: "There is no such topic, or no such message (any more)",
    406: "Only application/json is answered",
    409: "The message or the topic is in a state that this is not for",
    413: "The body has too many bytes",
    415: "Only application/json is taken",
    422: "The Idempotency-Key was used for another request",
    429: "More requests, messages or bytes than the rates allow; Retry-After says when there is room",
    503: "Redis does not answer; Retry-After says when to ask again",
    507: "Redis, or the topic, is full",
}

HAS_OPENAPI = find_spec("drf_spectacular") is not None


def view_schema() -> ViewInspector:
    """Return the schema of these views; None without drf-spectacular."""
    if not HAS_OPENAPI:
        return ViewInspector()
    from drf_spectacular.openapi import AutoSchema

    class Schema(AutoSchema):
        """A schema in which requests refuse unknown fields."""

        def _map_basic_serializer(self, serializer: Any, direction: Any) -> Any:
            found = super()._map_basic_serializer(serializer, direction)  # type: ignore[no-untyped-call]
            if direction == "request":
                found["additionalProperties"] = False
            return found

        def _map_serializer_field(self, field: Any, direction: Any, bypass_extensions: bool = False) -> Any:
            found = super()._map_serializer_field(field, direction, bypass_extensions)  # type: ignore[no-untyped-call]
            if direction == "request":
                found.update(_unsaid(field, found))
            return found

        def get_tags(self) -> list[str]:
            """Return the single tag of all routes."""
            return ["rmq"]

    return Schema()


def _unsaid(field: Any, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the restrictions of a field that drf-spectacular does not describe."""
    is_text = isinstance(field, serializers.CharField) and found.get("type") == "string"
    if is_text and not field.allow_blank:
        return {"pattern": r"^[^\u0000]*$", "minLength": found.get("minLength", 1)}
    if isinstance(field, serializers.ListSerializer):
        bounds = {"minItems": "min_length", "maxItems": "max_length"}
        return {name: bound for name, of in bounds.items() if (bound := getattr(field, of, None)) is not None}
    return {}


def shaped(schema: dict[str, Any]) -> Callable[[_Target], _Target]:
    """Set the schema of a field."""
    if not HAS_OPENAPI:
        return lambda target: target
    from drf_spectacular.utils import extend_schema_field

    return cast("Callable[[_Target], _Target]", extend_schema_field(schema))


def documented(
    name: str,
    summary: str,
    *,
    answers: Mapping[int, Any],
    takes: Any = None,
    query: Any = None,
    path: Mapping[str, dict[str, Any]] | None = None,
    errors: Iterable[int] = (),
    headers: Mapping[str, tuple[str, dict[str, Any]]] | None = None,
    examples: Mapping[str, Any] | None = None,
    answered: Mapping[str, Any] | None = None,
    public: bool = False,
) -> Callable[[_Target], _Target]:
    """Describe one method of a view.

    ``takes``: the serializer of its body, or a name and several serializers; ``query``: that of its
    parameters; ``headers``: title → (purpose, schema); ``path``: name → schema of the part of the address;
    ``errors``: statuses in addition to the common ones; ``public``: without those of authentication.
    """
    if not HAS_OPENAPI:
        return lambda target: target
    from drf_spectacular.utils import OpenApiResponse, PolymorphicProxySerializer, extend_schema

    statuses = {406, *errors} if public else {401, 403, 406, 429, 503, *errors}
    if takes is not None:
        statuses |= {400, 413, 415}
    if query is not None:
        statuses |= {400}
    responses: dict[int, Any] = {
        status: OpenApiResponse(Problem, description=MEANINGS[status]) for status in sorted(statuses)
    }
    responses |= {status: OpenApiResponse(found, description="Done") for status, found in answers.items()}
    described = extend_schema(
        operation_id=f"rmq_{name}",
        summary=summary,
        description=summary,
        parameters=([] if query is None else [query]) + _parameters(headers or {}, path or {}),
        request=PolymorphicProxySerializer(takes[0], takes[1], None) if isinstance(takes, tuple) else takes,
        responses=responses,
        examples=_examples(examples or {}, answered or {}, min(answers)),
    )
    return cast("Callable[[_Target], _Target]", described)


def _parameters(
    headers: Mapping[str, tuple[str, dict[str, Any]]], path: Mapping[str, dict[str, Any]]
) -> list[Any]:
    from drf_spectacular.utils import OpenApiParameter

    in_headers = [
        OpenApiParameter(title, shape, OpenApiParameter.HEADER, description=told)
        for title, (told, shape) in headers.items()
    ]
    in_path = [
        OpenApiParameter(title, shape, OpenApiParameter.PATH, required=True) for title, shape in path.items()
    ]
    return in_headers + in_path


def _examples(requests: Mapping[str, Any], answers: Mapping[str, Any], status: int) -> list[Any]:
    from drf_spectacular.utils import OpenApiExample

    taken = [OpenApiExample(title, value=value, request_only=True) for title, value in requests.items()]
    answered = [
        OpenApiExample(title, value=value, response_only=True, status_codes=[str(status)])
        for title, value in answers.items()
    ]
    return taken + answered


__all__ = ["documented", "shaped", "view_schema"]
