"""A type of bodies, as BODY and UPCAST name it. It is imported at its first use, because settings are read earlier.

The only importer of pydantic (extra ``typed``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import GenericAlias
from typing import TYPE_CHECKING, Any, Literal, get_origin

from django.utils.module_loading import import_string

from django_rmq.core.words.bodies import encode_json
from django_rmq.exceptions import ConfigurationError, InvalidBody, InvalidMessage

if TYPE_CHECKING:
    from pydantic import TypeAdapter

MOST_ERRORS = 20
"""The number of errors of one body that are reported."""


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

    def plain(self, body: object) -> Any:
        """Return an instance, or plain data, as the data to be stored as JSON. Raises ``InvalidBody``.

        It is read again before it is returned: instances inside a body are not validated otherwise, and what
        a listener could not read is not sent.
        """
        adapter = adapter_of(self.path)
        try:
            found = adapter.validate_json(encode_json(_dumped(adapter, self._instance(adapter, body))))
            return _dumped(adapter, found)
        except InvalidMessage:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a validator or a serializer of the project raises
            raise self._invalid(error) from None

    def read(self, raw: bytes) -> Any:
        """Return the instance from what is stored. Raises ``InvalidBody``."""
        adapter = adapter_of(self.path)
        upcast = None if self.upcast is None else function_of(self.upcast)
        try:
            return adapter.validate_json(raw if upcast is None else _upcasted(upcast, raw))
        except Exception as error:  # noqa: BLE001 - whatever a validator or UPCAST raises
            raise self._invalid(error) from None

    def schema(self, mode: Literal["validation", "serialization"] = "validation") -> dict[str, Any] | None:
        """Return the JSON schema of what may be sent, or of what is stored ("serialization").

        None: the type has parts that no schema can describe.
        """
        adapter = adapter_of(self.path)
        from pydantic.errors import PydanticInvalidForJsonSchema

        try:
            return adapter.json_schema(mode=mode)
        except PydanticInvalidForJsonSchema:
            return None

    def _instance(self, adapter: TypeAdapter[Any], body: object) -> Any:
        """Return the validated ``body``. JSON has texts for what strict types want as objects."""
        from pydantic import ValidationError

        try:
            return adapter.validate_python(body)
        except ValidationError as error:
            try:
                raw = encode_json(body)
            except InvalidMessage:
                raise error from None
            return adapter.validate_json(raw)

    def _invalid(self, error: Exception) -> InvalidBody:
        from pydantic import ValidationError

        if not isinstance(error, ValidationError):
            what = f"{type(error).__name__}: {error}"
            return InvalidBody(f"body does not fit {self.path}: {what}", {"": [what]})
        fields: dict[str, list[str]] = {}
        # Without the values: errors are logged, and shown to people who must not see bodies.
        for each in error.errors(include_url=False, include_context=False, include_input=False)[:MOST_ERRORS]:
            fields.setdefault(place(each["loc"]), []).append(each["msg"])
        told = "; ".join(f"{at}: {', '.join(said)}" if at else ", ".join(said) for at, said in fields.items())
        more = error.error_count() - MOST_ERRORS
        text = f"body does not fit {self.path}: {told}{f'; and {more} more' if more > 0 else ''}"
        return InvalidBody(text, fields)


def _dumped(adapter: TypeAdapter[Any], instance: Any) -> Any:
    """Return the data of an instance under the names by which it is read."""
    return adapter.dump_python(instance, mode="json", by_alias=True, round_trip=True, warnings="none")


def _upcasted(upcast: Callable[[Any], Any], raw: bytes) -> bytes:
    """Return what UPCAST makes of stored data."""
    data = json.loads(raw)
    try:
        return encode_json(upcast(data))
    except Exception as error:
        raise UpcastFailed(f"{type(error).__name__}: {error}") from error


def place(path: Sequence[int | str]) -> str:
    """Return the place of a value in a body, such as ``lines[2].price``. Empty: the body itself."""
    found = ""
    for part in path:
        if isinstance(part, int):
            found += f"[{part}]"
        elif part.isidentifier():
            found += f".{part[:50]}"
        else:
            found += f"[{json.dumps(part[:50])}]"
    return found.removeprefix(".")


@lru_cache(None)
def adapter_of(path: str) -> TypeAdapter[Any]:
    """Return what validates the type at ``path``. Raises ``Unusable``."""
    try:
        import pydantic
    except ImportError:
        raise Unusable(
            "E100",
            f"{path!r} is the type of a body, and the package pydantic is not installed",
            'pip install "django-redis-rmq[typed]".',
        ) from None
    target = _imported("E101", path)
    if not isinstance(target, (type, GenericAlias)) and get_origin(target) is None:
        raise Unusable(
            "E102",
            f"{path!r} is a {type(target).__name__}: it must be a dataclass, a TypedDict, a pydantic model or "
            "another type that pydantic can validate",
        )
    try:
        adapter = pydantic.TypeAdapter(target)
        # A name that it refers to and nobody has defined is a mistake in the type, not in the first body.
        adapter.rebuild(raise_errors=True)
        return adapter
    except Exception as error:
        raise Unusable("E102", f"{path!r} cannot be the type of a body: {_first_line(error)}") from error


@lru_cache(None)
def function_of(path: str) -> Callable[[Any], Any]:
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
        raise Unusable(check, f"{path!r} cannot be imported: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


__all__ = ["DeclaredBody", "Unusable", "adapter_of", "function_of", "place"]
