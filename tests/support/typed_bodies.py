"""Types of bodies for tests, as a project would declare them: settings name them by their paths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from datetime import datetime
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Generic, Literal, NewType, NotRequired, TypeVar
from uuid import UUID

from annotated_types import Gt
from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    computed_field,
    field_validator,
    model_validator,
)
from typing_extensions import TypeAliasType, TypedDict


class Reason(Enum):
    """A plain Enum, which today's JSON does not take."""

    CAMPAIGN = "campaign"
    COST = "cost"


@dataclass(frozen=True)
class Line:
    """What is nested."""

    sku: int
    price: Annotated[Decimal, Gt(0)]


@dataclass
class PriceChanged:
    """A dataclass of the standard library."""

    shop: int
    lines: Sequence[Line]
    at: datetime
    reason: Reason = Reason.COST
    note: str | None = None
    batch: UUID | None = None
    extra: dict[str, float] = field(default_factory=dict)


class Viewed(TypedDict):
    """A TypedDict."""

    page: str
    ms: int
    user: NotRequired[int]


class Ordered(BaseModel):
    """A model with names of its own in JSON, which takes nothing else and converts nothing."""

    model_config = ConfigDict(extra="forbid", strict=True)

    number: int = Field(alias="orderNumber", gt=0)
    placed: datetime
    total: Decimal

    @computed_field
    def cents(self) -> int:
        """What is computed is not stored."""
        return int(self.total * 100)


class Counted(BaseModel):
    """A model with values of any type."""

    extra: dict[str, Any]


class Narrow(BaseModel):
    """A model whose validator raises an error of its own."""

    share: float

    @field_validator("share")
    @classmethod
    def invert(cls, value: float) -> float:
        return 1 / value


class Lopsided(BaseModel):
    """A model that cannot read what it writes."""

    number: int = Field(validation_alias="in", serialization_alias="out")


class Secretive(BaseModel):
    """A model with a secret, which is written as asterisks."""

    password: SecretStr


class Unfinished(BaseModel):
    """A model that refers to what is nowhere defined."""

    other: Missing  # type: ignore[name-defined] # noqa: F821


class Tagged(BaseModel):
    """A model with a set."""

    tags: frozenset[str]


Number = TypeVar("Number")


class Boxed(BaseModel, Generic[Number]):
    """Generic."""

    value: Number


Counts = dict[str, Annotated[int, Gt(0)]]
BoxedInt = Boxed[int]


class Opaque:
    """What pydantic cannot validate."""


def convert(value: Any) -> Any:
    """A function is no type."""
    return value


def upcast(data: Any) -> Any:
    """Version 1 of `PriceChanged` had one product, and no list of lines."""
    if "lines" in data:
        return data
    return {"shop": data["shop"], "at": data["at"], "lines": [{"sku": data["sku"], "price": data["price"]}]}


def exits(data: Any) -> Any:
    """What a library may do."""
    raise SystemExit(3)


class Aliased(BaseModel):
    """Fields that are written under names under which they are not read, or not written at all."""

    renamed: int = Field(validation_alias="in")
    optional: int = Field(default=3, serialization_alias="out")
    hidden: int = Field(exclude=True)
    choices: int = Field(validation_alias=AliasChoices("a", "b"), serialization_alias="b")
    same: int = Field(alias="one")


@dataclass
class Initialised:
    """A dataclass that wants at its start what it does not keep."""

    start: InitVar[int]
    kept: int = 0


class Renaming(BaseModel):
    """A model that reads what it writes by a function of its own."""

    value: int = Field(validation_alias="in")

    @model_validator(mode="before")
    @classmethod
    def renamed(cls, data: Any) -> Any:
        """Take the name under which the value is written."""
        return {"in": data["value"]} if isinstance(data, dict) and "value" in data else data


class ByName(BaseModel):
    """A model that takes names of fields, too."""

    model_config = ConfigDict(populate_by_name=True)

    value: int = Field(validation_alias="in")


NOT_A_FUNCTION = 7


class OneA(BaseModel):
    """One of two, by its kind."""

    kind: Literal["a"]


class OneB(BaseModel):
    """The other one."""

    kind: Literal["b"]


class Shapes(BaseModel):
    """What JSON Schema says in another way than OpenAPI 3.0."""

    const: Literal["x"]
    pair: tuple[int, str]
    share: float = Field(gt=0, le=1, examples=[0.5])
    nothing: None
    choice: OneA | OneB = Field(discriminator="kind")
    maybe: OneA | None


Pages = TypeAliasType("Pages", list[Viewed])
"""What the statement ``type Pages = list[Viewed]`` makes since Python 3.12."""

Sku = NewType("Sku", int)
Quantity = int | float
