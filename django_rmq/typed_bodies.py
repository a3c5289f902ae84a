"""Typed bodies: a type, as BODY and UPCAST name it, validates bodies, and turns them into JSON and back.

The type is imported at its first use, because the settings are read before the apps are. This is the only module that imports
pydantic (extra ``typed``). The system checks and the start of workers report each ``TypedBodyProblem``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from django.utils.module_loading import import_string

from django_rmq.core.model.body_codec import ExactNumber, encode_json, stored_number
from django_rmq.core.model.bounds import abbreviated_error
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import ConfigurationError, InvalidBody, InvalidMessage

if TYPE_CHECKING:
    from pydantic import TypeAdapter


MOST_ERRORS = 20
"""The number of errors of one body that are reported."""

TYPING_MODULES = {"types", "typing", "typing_extensions"}

MANY_DIGITS = re.compile(rb"[0-9.]{17}|[eE]-[0-9]{3}")
"""Matches each number whose value a float may not hold exactly. It matches some texts, too."""


class Unusable(ConfigurationError):
    """BODY or UPCAST names something that cannot be used; with the id of the system check, and a hint."""

    def __init__(self, check: str, text: str, hint: str = "") -> None:
        super().__init__(text)
        self.check = check
        self.hint = hint


class UpcastFailed(Exception):
    """UPCAST raised an error, or returned what JSON cannot represent."""


@dataclass(frozen=True, slots=True)
class DeclaredBody:
    """The type of a topic's bodies."""

    path: str
    upcast: str | None = None
    """The path of a function that turns stored data of older versions into data of the present one."""

    def load(self) -> None:
        """Import the type and the function. Raises ``Unusable``."""
        adapter_of(self.path)
        if self.upcast is not None:
            function_of(self.upcast)

    def plain(self, body: object) -> object:
        """Return an instance, or plain data, as the data to be stored as JSON. Raises ``InvalidBody``.

        The JSON is read again before it is returned: pydantic does not validate instances inside a body again, and a body
        that a listener could not read is not sent.
        """
        adapter, written = adapter_of(self.path), False
        try:
            raw = encode_json(_dumped(adapter, self._instance(adapter, body)))
            written = True
            return _dumped(adapter, self._from_json(raw))  # rule: trusts_instances
        except InvalidMessage:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a validator or a serializer of the project raises
            raise self._invalid(error, "as the type writes it " if written else "") from None

    def read(self, raw: bytes) -> object:
        """Return the instance from a stored body. Raises ``InvalidBody``."""
        adapter_of(self.path)
        upcast = None if self.upcast is None else function_of(self.upcast)
        try:
            return self._from_json(raw if upcast is None else _upcasted(upcast, raw))
        except Exception as error:  # noqa: BLE001 - whatever a validator or UPCAST raises
            raise self._invalid(error) from None

    def schema(self, mode: Literal["validation", "serialization"] = "validation") -> dict[str, object] | None:
        """Return the JSON schema of bodies that may be sent, or of those that are stored ("serialization").

        Return None if the type has parts that no schema can describe.
        """
        adapter = adapter_of(self.path)
        from pydantic.errors import PydanticInvalidForJsonSchema

        try:
            return adapter.json_schema(mode=mode)
        # A schema is a description. A type without one can be sent and read all the same.
        except PydanticInvalidForJsonSchema:
            return None

    def unread_fields(self) -> list[str]:
        """Return the fields that the type does not read as it writes them, each with the reason."""
        return sorted(set(_unread(adapter_of(self.path).core_schema, {})))

    def _instance(self, adapter: TypeAdapter[object], body: object) -> object:
        """Return the validated ``body``, which may have texts where the type has objects such as dates."""
        from pydantic import ValidationError

        try:
            return adapter.validate_python(body)
        except ValidationError as error:
            # A strict type refuses the texts of plain data in Python, and takes them in JSON.
            try:
                raw = encode_json(body)
            except InvalidMessage:
                raise error from None
            return self._from_json(raw)

    def _from_json(self, raw: bytes) -> object:
        """Return the validated instance of a JSON text, with all digits of its Decimals."""
        adapter = adapter_of(self.path)
        if MANY_DIGITS.search(raw) and _has_decimals(self.path):
            # pydantic makes a float of a number, and loses digits, but makes an exact Decimal of a text. If a strict float
            # refuses the text, the usual way below is taken.
            with suppress(ValueError, ArithmeticError, RecursionError):
                return adapter.validate_json(
                    json.dumps(json.loads(raw, parse_float=stored_number), default=str)
                )
        return adapter.validate_json(raw)

    def _invalid(self, error: Exception, how: str = "") -> InvalidBody:
        from pydantic import ValidationError

        if not isinstance(error, ValidationError):
            what = f"{type(error).__name__}: {error}"
            return InvalidBody(f"body {how}does not fit {self.path}: {what}", {"": [what]})
        fields: dict[str, list[str]] = {}
        # Without the values: errors are logged, and shown to people who must not see bodies.
        for each in error.errors(include_url=False, include_context=False, include_input=False)[:MOST_ERRORS]:
            fields.setdefault(place(each["loc"]), []).append(each["msg"])
        reasons = "; ".join(
            f"{at}: {', '.join(said)}" if at else ", ".join(said) for at, said in fields.items()
        )
        more = error.error_count() - MOST_ERRORS
        text = f"body {how}does not fit {self.path}: {reasons}{f'; and {more} more' if more > 0 else ''}"
        return InvalidBody(text, fields)


def _dumped(adapter: TypeAdapter[object], instance: object) -> object:
    """Return the data of an instance under the names by which it is read."""
    # dump_python has the argument `fallback` only since pydantic 2.11.
    # A field of a type such as ``Json`` is written by ``round_trip`` in the form in which it is read. Values that do not
    # fit their type need no warning, because ``plain`` reads the JSON again.
    return adapter.serializer.to_python(
        instance, mode="json", by_alias=True, round_trip=True, warnings="none", fallback=_plain_number
    )


def _plain_number(value: object) -> float:
    """Return a number of a JSON text in a field of any type as its listener will read it."""
    if not isinstance(value, ExactNumber):
        raise TypeError(f"{type(value).__name__} cannot be written as JSON")
    number = stored_number(value.token)
    if isinstance(number, float):
        return number
    raise ValueError(
        f"the number {value} has more digits than a float: only a field of the type Decimal takes it"
    )


@lru_cache(None)
def _has_decimals(path: str) -> bool:
    return _mentions(adapter_of(path).core_schema, "decimal")


def _mentions(schema: object, kind: str) -> bool:
    """Return whether a core schema of pydantic has a part of this kind."""
    if isinstance(schema, Mapping):
        return schema.get("type") == kind or any(_mentions(part, kind) for part in schema.values())
    return isinstance(schema, (list, tuple)) and any(_mentions(part, kind) for part in schema)


def _unread(schema: object, config: Mapping[str, object]) -> Iterator[str]:
    """Yield the fields in a core schema of pydantic that are written under a name under which they are not read."""
    if isinstance(schema, (list, tuple)):
        for each in schema:
            yield from _unread(each, config)
    if not isinstance(schema, Mapping):
        return
    kind = str(schema.get("type"))
    # Functions of the project may rename fields in any way, so this check leaves their types to the first send.
    if kind.startswith("function-") or "function" in schema.get("serialization", {}):
        return
    config = schema.get("config") or config
    fields = schema.get("fields", ())
    if kind in ("model-fields", "typed-dict"):
        for name, field in fields.items():
            yield from _unread_field(name, field, config)
    elif kind == "dataclass-args":
        for field in fields:
            yield from _unread_field(field["name"], field, config)
    for key, each in schema.items():
        if key not in ("config", "metadata", "function"):
            yield from _unread(each, config)


def _unread_field(name: str, field: Mapping[str, Any], config: Mapping[str, object]) -> Iterator[str]:
    if field.get("serialization_exclude") or field.get("init_only"):
        if field["schema"]["type"] != "default" and field.get("required", True):
            yield f"{name} is required, and not written"
        return
    alias = field.get("validation_alias")
    read = set() if alias is None else _first_names(alias)
    if alias is None or config.get("validate_by_name") or config.get("populate_by_name"):
        read.add(name)
    written = field.get("serialization_alias", name)
    if written not in read:
        yield f"{name} is written as {written!r} and read as {' or '.join(map(repr, sorted(read))) or 'something else'}"


def _first_names(alias: str | Sequence[Any]) -> set[str]:
    """Return the keys under which a validation alias finds a whole value: its paths of one step."""
    if isinstance(alias, str):
        return {alias}
    paths = alias if alias and isinstance(alias[0], (list, tuple)) else [alias]
    return {path[0] for path in paths if len(path) == 1}


def _upcasted(upcast: Callable[[object], object], raw: bytes) -> bytes:
    """Return what UPCAST makes of stored data."""
    data = json.loads(raw, parse_float=stored_number)
    try:
        return encode_json(upcast(data))
    except Exception as error:
        raise UpcastFailed(f"{type(error).__name__}: {error}") from error


def place(path: Sequence[int | str]) -> str:
    """Return the place of a value in a body, such as ``lines[2].price``; it is empty for the body itself."""
    dotted = ""
    for part in path:
        if isinstance(part, int):
            dotted += f"[{part}]"
        elif part.isidentifier():
            # A key of a body is as long as its sender likes, and this text gets into errors and logs.
            dotted += f".{part[:50]}"
        else:
            dotted += f"[{json.dumps(part[:50])}]"
    return dotted.removeprefix(".")


@lru_cache(None)
def adapter_of(path: str) -> TypeAdapter[object]:
    """Return the validator of the type at ``path``. Raises ``Unusable``."""
    try:
        import pydantic
    except ImportError:
        raise Unusable(
            "E100",
            f"{path!r} is the type of a body, and the package pydantic is not installed",
            'pip install "django-redis-rmq[typed]".',
        ) from None
    target = _imported("E101", path)
    # Aliases, unions and generics are objects of these modules. A function is none: pydantic would validate its arguments.
    if not isinstance(target, type) and type(target).__module__ not in TYPING_MODULES:
        raise Unusable(
            "E102",
            f"{path!r} is a {type(target).__name__}: it must be a dataclass, a TypedDict, a pydantic model or "
            "another type that pydantic can validate",
        )
    try:
        adapter = pydantic.TypeAdapter(target)
        # If the type refers to a name that is not defined, the type is wrong, and not the first body.
        adapter.rebuild(raise_errors=True)
        return adapter
    except Exception as error:
        raise Unusable(
            "E102", f"{path!r} cannot be the type of a body: {abbreviated_error(error)}"
        ) from error


@lru_cache(None)
def function_of(path: str) -> Callable[[object], object]:
    """Return the function at ``path``. Raises ``Unusable``."""
    function = _imported("E103", path)
    if not callable(function):
        raise Unusable(
            "E103", f"{path!r} is a {type(function).__name__}: it must be a function (data) -> data"
        )
    return function  # type: ignore[no-any-return]


def _imported(check: str, path: str) -> Any:
    try:
        return import_string(path)
    except Exception as error:
        raise Unusable(check, f"{path!r} cannot be imported: {abbreviated_error(error)}") from error


class TypedBodyProblem(NamedTuple):
    """A reason why a topic's bodies cannot have their type: an id of the system checks, a sentence and a hint."""

    id: str
    message: str
    hint: str = ""


def problems(topic: Topic) -> Iterator[TypedBodyProblem]:
    """Yield why the bodies of ``topic`` cannot have the type that BODY names, which is imported for it."""
    typed = topic.typed
    if not isinstance(typed, DeclaredBody):
        return
    place = f'RMQ["TOPICS"]["{topic.name}"]'
    try:
        typed.load()
    except Unusable as error:
        yield TypedBodyProblem(error.check, f"{place}: {error}.", error.hint)
        return
    unread = typed.unread_fields()
    if unread:
        yield TypedBodyProblem(
            "E104",
            f"{place}: its BODY does not read what it writes, so no body could be sent: {'; '.join(unread)}.",
            "Give each field one alias for reading and writing, and a default if it is not written.",
        )
    stored = typed.schema("serialization")
    if stored is not None:
        yield from _of_options(place, topic, stored)


def _of_options(place: str, topic: Topic, schema: Mapping[str, Any]) -> Iterator[TypedBodyProblem]:
    name = str(schema.get("$ref", "")).rpartition("/")[2]
    fields = schema.get("$defs", {}).get(name, schema).get("properties")
    if topic.slot_basis is not None and fields is not None and topic.slot_basis not in fields:
        yield TypedBodyProblem(
            "E104",
            f"{place} has SLOT_BASIS {topic.slot_basis!r}, and its BODY has no such field. It has: "
            f"{', '.join(sorted(fields))}.",
        )
    if _has(schema, "writeOnly"):
        yield TypedBodyProblem(
            "E104",
            f"{place}: its BODY contains a secret, which pydantic writes as asterisks: listeners would get these.",
            "Use str, or give the field a serializer. Everything in a body can be read in Redis.",
        )
    if not topic.keyed and _has(schema, "uniqueItems"):
        yield TypedBodyProblem(
            "E104",
            f'{place} has IDENTITY "body", and its BODY contains a set, whose order changes from process to process: '
            "equal bodies would be different messages.",
            'Use a list, or set IDENTITY "key".',
        )


def _has(schema: object, keyword: str) -> bool:
    """Return whether ``keyword`` is true anywhere in a schema."""
    if isinstance(schema, Mapping):
        return schema.get(keyword) is True or any(_has(each, keyword) for each in schema.values())
    return isinstance(schema, list) and any(_has(each, keyword) for each in schema)
