"""The OpenAPI description of the API, if drf-spectacular (extra ``openapi``) is installed.

``documented`` describes a method of a view: its input, its output, and the statuses that it may return. ``view_schema`` makes the
class by which drf-spectacular reads this. ``components`` has a schema for each topic whose BODY is a type: JSON Schema, which
OpenAPI 3.1 takes as it is. For OpenAPI 3.0, what it does not have is rewritten or left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from inspect import getdoc
from typing import TYPE_CHECKING, Any, TypeVar

from rest_framework import serializers
from rest_framework.schemas.inspectors import ViewInspector

from django_rmq.conf import get_config
from django_rmq.core.model.topic import Topic
from django_rmq.operations.sends import body_schema

if TYPE_CHECKING:
    from drf_spectacular.plumbing import ComponentRegistry
    from drf_spectacular.utils import OpenApiExample, OpenApiParameter

_Schema = dict[str, Any]
_Serializer = type[serializers.Serializer[object]]

_Target = TypeVar("_Target", bound=Callable[..., Any])


class Problem(serializers.Serializer[Any]):
    """An error: a stable code, and a sentence for people."""

    code = serializers.CharField()
    detail = serializers.CharField()
    errors = serializers.DictField(  # type: ignore[assignment] # a field, which the class takes out of its body
        required=False, help_text="With the codes `invalid` and `invalid_body`: field → errors"
    )
    outcome = serializers.CharField(
        required=False, help_text="With the code `conflict`: the state of the message"
    )


MEANINGS = {
    400: "The request is not valid",
    401: "Authentication required",
    403: "Permission denied",
    404: "The topic, the message or the schedule does not exist",
    406: "The Accept header allows no format of the API",
    409: "Not possible in the present state of the message or the topic, or because of a value of another program in Redis",
    411: "The request body needs a Content-Length",
    413: "The request body or a message is too large",
    415: "The request body must be application/json",
    422: "The Idempotency-Key was used for another request",
    429: "A rate limit is exceeded; repeat the request after Retry-After",
    503: "Redis is unavailable; repeat the request after Retry-After",
    507: "Redis, the topic or the message is full; repeat the request after Retry-After",
}

SUCCESSES = {200: "Success", 202: "Accepted", 503: "A check failed"}

HAS_OPENAPI = find_spec("drf_spectacular") is not None


def shaped(schema: _Schema) -> Callable[[_Target], _Target]:
    """Set the schema of a field."""
    if not HAS_OPENAPI:
        return lambda target: target
    from drf_spectacular.utils import extend_schema_field

    return extend_schema_field(schema)


def documented(
    name: str,
    *,
    answers: Mapping[int, _Serializer],
    takes: _Serializer | tuple[str, list[type[serializers.Serializer[object]]]] | None = None,
    query: _Serializer | None = None,
    path: Mapping[str, _Schema] | None = None,
    errors: Iterable[int] = (),
    headers: Mapping[str, tuple[str, _Schema]] | None = None,
    examples: Mapping[str, object] | None = None,
    answered: Mapping[str, object] | None = None,
    public: bool = False,
) -> Callable[[_Target], _Target]:
    """Describe one method of a view. The first line of its docstring is the summary.

    ``takes``: the serializer of its body, or a name and several serializers; ``query``: that of its
    parameters; ``headers``: title → (purpose, schema); ``path``: name → schema of the part of the address;
    ``errors``: statuses in addition to the common ones; ``public``: it requires no user, and 406 is the
    only common status.
    """
    if not HAS_OPENAPI:
        return lambda target: target
    from drf_spectacular.utils import PolymorphicProxySerializer, extend_schema

    statuses = {406, *errors} if public else {401, 403, 406, 409, 429, 503, *errors}
    if takes is not None:
        statuses |= {400, 411, 413, 415}
    if query is not None or path is not None:
        statuses |= {400}

    def describe(target: _Target) -> _Target:
        text = getdoc(target) or name
        described = extend_schema(
            operation_id=f"rmq_{name}",
            summary=text.partition("\n")[0].rstrip("."),
            description=" ".join(text.split()),
            parameters=[*([] if query is None else [query]), *_parameters(headers or {}, path or {})],
            request=PolymorphicProxySerializer(takes[0], takes[1], None)
            if isinstance(takes, tuple)
            else takes,
            responses=_responses(answers, statuses),
            examples=_examples(examples or {}, answered or {}, min(answers)),
        )
        return described(target)

    return describe


def _responses(answers: Mapping[int, _Serializer], errors: set[int]) -> dict[int, object]:
    """Return the answers by status, those that succeed first."""
    from drf_spectacular.utils import OpenApiResponse

    problems = dict.fromkeys(sorted(errors - answers.keys()), Problem)
    return {
        status: OpenApiResponse(answer, description=(SUCCESSES if status in answers else MEANINGS)[status])
        for status, answer in {**answers, **problems}.items()
    }


def _parameters(
    headers: Mapping[str, tuple[str, _Schema]], path: Mapping[str, _Schema]
) -> list[OpenApiParameter]:
    from drf_spectacular.utils import OpenApiParameter

    in_headers = [
        OpenApiParameter(title, shape, OpenApiParameter.HEADER, description=description)
        for title, (description, shape) in headers.items()
    ]
    in_path = [
        OpenApiParameter(title, shape, OpenApiParameter.PATH, required=True) for title, shape in path.items()
    ]
    return in_headers + in_path


def _examples(
    requests: Mapping[str, object], answers: Mapping[str, object], status: int
) -> list[OpenApiExample]:
    from drf_spectacular.utils import OpenApiExample

    requested = [OpenApiExample(title, value=value, request_only=True) for title, value in requests.items()]
    answered = [
        OpenApiExample(title, value=value, response_only=True, status_codes=[str(status)])
        for title, value in answers.items()
    ]
    return requested + answered


def view_schema() -> ViewInspector:
    """Return what describes these views to drf-spectacular; without it, an inspector that describes nothing."""
    if not HAS_OPENAPI:
        return ViewInspector()
    from drf_spectacular.openapi import AutoSchema
    from drf_spectacular.utils import PolymorphicProxySerializer

    class Schema(AutoSchema):
        """A schema in which requests refuse unknown fields."""

        def _map_basic_serializer(self, serializer: object, direction: str) -> object:
            described = super()._map_basic_serializer(serializer, direction)  # type: ignore[no-untyped-call]
            if direction == "request":
                described["additionalProperties"] = False
            return described

        def _map_serializer_field(
            self, field: Any, direction: str, bypass_extensions: bool = False
        ) -> object:
            described = super()._map_serializer_field(field, direction, bypass_extensions)  # type: ignore[no-untyped-call]
            if direction == "request":
                described.update(_unsaid(field, described))
                # A body in an address is a text.
                if field.field_name == "body" and not isinstance(field, serializers.CharField):
                    described.update(_typed(self.registry))
            return described

        def _get_request_for_media_type(self, serializer: object, direction: str = "request") -> object:
            described, required = super()._get_request_for_media_type(serializer, direction)  # type: ignore[no-untyped-call]
            # A choice of serializers names no required field, so drf-spectacular would call the body optional.
            return described, required or isinstance(serializer, PolymorphicProxySerializer)

        def get_tags(self) -> list[str]:
            """Return the single tag of all routes."""
            return ["rmq"]

    return Schema()


def _unsaid(field: Any, schema: _Schema) -> _Schema:
    """Return the restrictions of a field that drf-spectacular does not describe."""
    is_text = isinstance(field, serializers.CharField) and schema.get("type") == "string"
    if is_text and not field.allow_blank:
        return {"pattern": r"^[^\u0000]*$", "minLength": schema.get("minLength", 1)}
    if isinstance(field, serializers.ListSerializer):
        bounds = {"minItems": "min_length", "maxItems": "max_length"}
        return {name: bound for name, of in bounds.items() if (bound := getattr(field, of, None)) is not None}
    return {}


_DATA = ("const", "default", "enum", "examples")
"""Keywords whose values are no schemas."""
_LATER = ("$schema", "contentEncoding", "contentMediaType", "patternProperties", "propertyNames")
"""Keywords that OpenAPI 3.0 does not have."""


def _typed(registry: ComponentRegistry) -> _Schema:
    """Add the types of bodies to the components, and return what a body may be. Empty: anything."""
    from drf_spectacular.plumbing import ResolvedComponent
    from drf_spectacular.settings import spectacular_settings

    topics = get_config().topics
    schemas = components(topics, is_3_0=str(spectacular_settings.OAS_VERSION).startswith("3.0"))
    for name, schema in schemas.items():
        component: Any = ResolvedComponent
        registry.register_on_missing(component(name, ResolvedComponent.SCHEMA, schema, name))
    names = [f"Body_{name}" for name in topics if f"Body_{name}" in schemas]
    return one_of_them(names) if names else {}


def components(topics: Mapping[str, Topic], *, is_3_0: bool) -> dict[str, _Schema]:
    """Return name → schema: for each topic with a type `Body_` and its name, and what that refers to."""
    schemas: dict[str, _Schema] = {}
    for name, topic in topics.items():
        schema = body_schema(topic)
        if schema is None:
            continue
        key = f"Body_{name}"
        parts = {f"{key}_{part}": each for part, each in schema.pop("$defs", {}).items()}
        for part, each in {key: schema, **parts}.items():
            before = _walked(each, _before_3_1) if is_3_0 else each
            schemas[part] = _walked(before, lambda one, key=key: _moved(one, key))  # type: ignore[misc]
    return schemas


def one_of_them(names: list[str]) -> _Schema:
    """Return the schema of a field that is a body of any topic, ``names`` being the components of typed ones."""
    refs: list[_Schema] = [{"$ref": f"#/components/schemas/{name}"} for name in names]
    other = {"description": "The body of another topic"}
    return {"anyOf": [*refs, other], "description": "Of a topic whose BODY is a type: Body_ and its name"}


def _walked(schema: object, change: Callable[[_Schema], _Schema]) -> Any:
    """Return ``schema`` with ``change`` applied to all schemas in it, from within, and to itself."""
    if isinstance(schema, list):
        return [_walked(each, change) for each in schema]
    if not isinstance(schema, dict):
        return schema
    parts: _Schema = {}
    for name, value in schema.items():
        if name == "properties":
            parts[name] = {field: _walked(each, change) for field, each in value.items()}
        else:
            parts[name] = value if name in _DATA else _walked(value, change)
    return change(parts)


def _moved(schema: _Schema, key: str) -> _Schema:
    """Return a schema that refers to components instead of the definitions that came with it."""
    place = f"#/components/schemas/{key}_"
    if "$ref" in schema:
        schema["$ref"] = schema["$ref"].replace("#/$defs/", place)
    if "mapping" in schema and "propertyName" in schema:
        schema["mapping"] = {tag: ref.replace("#/$defs/", place) for tag, ref in schema["mapping"].items()}
    return schema


def _before_3_1(schema: _Schema) -> _Schema:
    older = {name: value for name, value in schema.items() if name not in _LATER}
    if "const" in older:
        older["enum"] = [older.pop("const")]
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if exclusive in older:
            older[bound], older[exclusive] = older[exclusive], True
    if "prefixItems" in older:
        older["items"] = {"anyOf": older.pop("prefixItems")}
    if "examples" in older:
        older["example"] = older.pop("examples")[0]
    if older.get("type") == "null":
        del older["type"]
        older["nullable"] = True
    return _nullable(older) if "anyOf" in older else older


def _nullable(choice: _Schema) -> _Schema:
    """Return a choice without null; it may be null if that was one."""
    others = [each for each in choice["anyOf"] if each != {"nullable": True}]
    if len(others) < len(choice["anyOf"]):
        choice |= {"nullable": True, "anyOf": others}
        if len(others) == 1 and "$ref" not in others[0]:
            del choice["anyOf"]
            choice = {**others[0], **choice}
    return choice
