"""Types of bodies: what is stored, what is read, and what errors say. No server, no settings."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_rmq import ConfigurationError, InvalidBody, InvalidMessage, Message, typed_bodies
from django_rmq.core.consumer.batch_run import CallGroup, call_all
from django_rmq.core.model.body_codec import decode_body, encode_body, exact_json
from django_rmq.core.model.replies import Delivery
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.core.producer.bulk_send import _each
from django_rmq.core.producer.placement import basis_of
from django_rmq.typed_bodies import MOST_ERRORS, DeclaredBody, Unusable, adapter_of, place
from tests.support.commands import printed_by
from tests.support.typed_bodies import Line, Narrow, Ordered, PriceChanged, Reason, Tagged

ROOT = Path(__file__).parents[2]
NOON = datetime(2026, 11, 23, 12, tzinfo=UTC)


def typed(name: str, upcast: str | None = None, **options: Any) -> Topic:
    """A topic whose bodies have a type of `tests.support.typed_bodies`."""
    body = DeclaredBody(
        f"tests.support.typed_bodies.{name}", upcast and f"tests.support.typed_bodies.{upcast}"
    )
    return Topic("prices", TopicType.RANGE_MERGE, typed=body, **options)


def message(topic: Topic, raw: bytes) -> Message[Any]:
    return Message(topic, 0, 1, Delivery(raw, 0.0, 16))


PRICES = typed("PriceChanged")
CHANGED = PriceChanged(7, [Line(1, Decimal("9.90"))], NOON, Reason.CAMPAIGN)
STORED = (
    b'{"at":"2026-11-23T12:00:00Z","batch":null,"extra":{},"lines":[{"price":"9.90","sku":1}],"note":null,'
    b'"reason":"campaign","shop":7}'
)

moments = st.datetimes(timezones=st.just(UTC)) | st.datetimes(
    min_value=datetime(1900, 1, 1),  # noqa: DTZ001 - hypothesis wants it naive
    timezones=st.integers(-14 * 60, 14 * 60).map(lambda minutes: timezone(timedelta(minutes=minutes))),
)
prices = st.decimals(min_value="0.01", max_value="1e12", allow_nan=False, places=2)
changes = st.builds(
    PriceChanged,
    shop=st.integers(-(2**70), 2**70),
    lines=st.lists(st.builds(Line, sku=st.integers(), price=prices), max_size=4),
    at=moments,
    reason=st.sampled_from(Reason),
    note=st.none() | st.text(),
    batch=st.none() | st.uuids(),
    extra=st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False, allow_infinity=False), max_size=3),
)


def test_an_instance_is_stored_as_canonical_json() -> None:
    assert encode_body(PRICES, CHANGED) == STORED


def test_plain_data_is_stored_as_its_instance_is() -> None:
    plain = {"shop": "7", "lines": ({"sku": 1, "price": Decimal("9.90")},), "at": NOON, "reason": "campaign"}
    assert encode_body(PRICES, plain) == STORED
    assert encode_body(PRICES, json.loads(STORED)) == STORED


@given(changes)
def test_what_is_stored_is_read_as_it_was(change: PriceChanged) -> None:
    raw = encode_body(PRICES, change)
    found: PriceChanged = message(PRICES, raw).body
    assert found == change
    assert encode_body(PRICES, found) == raw
    assert encode_body(PRICES, decode_body(PRICES, raw)) == raw


@given(changes)
def test_equal_instances_are_equal_bytes(change: PriceChanged) -> None:
    twin = replace(change, extra=dict(reversed(change.extra.items())), lines=tuple(change.lines))
    assert encode_body(PRICES, twin) == encode_body(PRICES, change)


def test_what_a_dataclass_does_not_enforce_is_converted_or_refused() -> None:
    loose: Any = replace(CHANGED, lines=[Line("1", "9.90")], reason="campaign")  # type: ignore[arg-type]
    assert encode_body(PRICES, loose) == STORED
    with pytest.raises(InvalidBody) as error:
        encode_body(PRICES, replace(CHANGED, lines=[Line(1, Decimal(-3))]))
    assert error.value.fields == {"lines[0].price": ["Input should be greater than 0"]}


def test_an_error_names_every_place_and_no_value() -> None:
    with pytest.raises(InvalidBody) as error:
        encode_body(
            PRICES, {"lines": [{"sku": "secret", "price": "1"}], "at": NOON, "extra": {"a b": "secret"}}
        )
    assert str(error.value) == (
        "body does not fit tests.support.typed_bodies.PriceChanged: shop: Field required; "
        "lines[0].sku: Input should be a valid integer, unable to parse string as an integer; "
        'extra["a b"]: Input should be a valid number, unable to parse string as a number'
    )
    assert list(error.value.fields) == ["shop", "lines[0].sku", 'extra["a b"]']


def test_an_error_reports_a_limited_number_of_places() -> None:
    with pytest.raises(InvalidBody, match=r"; and 980 more$") as error:
        encode_body(PRICES, {"shop": 1, "at": NOON, "lines": [{"sku": "x", "price": 1}] * 1_000})
    assert len(error.value.fields) == MOST_ERRORS


@pytest.mark.parametrize("body", [None, 7, "x", [], b"\xff", object(), float("nan"), Line(1, Decimal(1))])
def test_what_is_no_instance_is_refused_at_the_body_itself(body: Any) -> None:
    with pytest.raises(InvalidBody) as error:
        encode_body(PRICES, body)
    assert list(error.value.fields) == [""]


def test_what_json_has_no_number_for_is_refused() -> None:
    with pytest.raises(InvalidMessage, match="NaN or infinity"):
        encode_body(PRICES, replace(CHANGED, extra={"a": float("nan")}))


def test_a_model_is_stored_under_its_aliases_and_without_what_it_computes() -> None:
    topic = typed("Ordered")
    ordered = Ordered(orderNumber=9, placed=NOON, total=Decimal("1.50"))
    raw = encode_body(topic, ordered)
    assert raw == b'{"orderNumber":9,"placed":"2026-11-23T12:00:00Z","total":"1.50"}'
    assert message(topic, raw).body == ordered


def test_a_strict_model_takes_what_json_has_for_its_types() -> None:
    topic = typed("Ordered")
    plain = {"orderNumber": 9, "placed": "2026-11-23T12:00:00Z", "total": "1.50"}
    assert encode_body(topic, plain) == encode_body(
        topic, {**plain, "placed": NOON, "total": Decimal("1.50")}
    )
    with pytest.raises(InvalidBody, match="orderNumber: Input should be a valid integer"):
        encode_body(topic, {**plain, "orderNumber": "9"})


def test_a_typed_dict_a_generic_and_a_list_are_types() -> None:
    assert message(typed("Viewed"), b'{"page":"/","ms":"3"}').body == {"page": "/", "ms": 3}
    assert encode_body(typed("Counts"), {"b": 1, "a": "2"}) == b'{"a":2,"b":1}'
    assert message(typed("BoxedInt"), b'{"value":3}').body.value == 3
    with pytest.raises(InvalidBody, match=r"\bb: Input should be greater than 0"):
        encode_body(typed("Counts"), {"b": 0})


def test_what_could_not_be_read_is_not_sent() -> None:
    with pytest.raises(InvalidBody, match="in: Field required"):
        encode_body(typed("Lopsided"), {"in": 3})


def test_an_error_of_a_validator_is_one_of_the_body() -> None:
    with pytest.raises(InvalidBody, match="Narrow: ZeroDivisionError"):
        encode_body(typed("Narrow"), {"share": 0})
    with pytest.raises(InvalidBody, match="Narrow: ZeroDivisionError"):
        message(typed("Narrow"), b'{"share":0}').body  # noqa: B018
    assert message(typed("Narrow"), b'{"share":4}').body == Narrow(share=4)


@pytest.mark.parametrize("raw", [b"{", b"\xff", b"", b"[" * 100_000, b'{"shop":NaN}', b'"\\ud800"'])
def test_bytes_that_are_no_json_do_not_fit(raw: bytes) -> None:
    for topic in (PRICES, typed("PriceChanged", "upcast")):
        with pytest.raises(InvalidBody):
            message(topic, raw).body  # noqa: B018


def test_a_body_that_does_not_fit_is_dead_at_once_and_reaches_no_listener() -> None:
    called: list[Any] = []

    class Listener:
        function = called.append
        batch_size: int | None = None

    old = message(PRICES, b'{"shop":7}')
    (failure,) = call_all(Listener, [old])  # type: ignore[arg-type]
    assert failure is not None
    assert (failure.kind, failure.delay_ms) == ("rejected", None)
    assert failure.error == (
        "django_rmq.exceptions.InvalidBody: body does not fit tests.support.typed_bodies.PriceChanged: "
        "lines: Field required; at: Field required"
    )
    Listener.batch_size = 10
    outcomes = call_all(Listener, [message(PRICES, STORED), old])  # type: ignore[arg-type]
    assert [outcome and outcome.kind for outcome in outcomes] == [None, "rejected"]
    assert [[one.body for one in group] for group in called] == [[CHANGED]]


def test_an_invalid_send_within_a_listener_is_a_failure_like_any_other() -> None:
    class Listener:
        batch_size: int | None = None

        @staticmethod
        def function(_: Message[Any]) -> None:
            encode_body(PRICES, {})

    (failure,) = call_all(Listener, [message(PRICES, STORED)])  # type: ignore[arg-type]
    assert failure is not None
    assert failure.kind == "failed"


def test_old_data_is_upcast_before_it_is_validated() -> None:
    topic = typed("PriceChanged", "upcast")
    old = b'{"shop": 7, "at": "2026-11-23T12:00:00Z", "sku": 1, "price": "9.90"}'
    assert message(topic, old).body == replace(CHANGED, reason=Reason.COST)
    assert message(topic, STORED).body == CHANGED
    with pytest.raises(InvalidBody, match="PriceChanged: UpcastFailed: KeyError: 'at'"):
        message(topic, b'{"shop":7}').body  # noqa: B018


LONG = "12345678901234567.89"
"""A number of more digits than a float has."""


@pytest.mark.parametrize("upcast", [None, "convert"])
@pytest.mark.parametrize("digits", [LONG, "0.1234567890123456789", "1.5e-310", "1.50"])
def test_a_number_keeps_its_digits_in_a_decimal(upcast: str | None, digits: str) -> None:
    raw = b'{"orderNumber":9,"placed":"2026-11-23T12:00:00Z","total":%s}' % digits.encode()
    topic = typed("Ordered", upcast)
    assert message(topic, raw).body.total == Decimal(digits)
    # As REST, rmqsend and the admin read it, and send it.
    stored = encode_body(topic, exact_json(raw.decode()))
    assert Decimal(json.loads(stored)["total"]) == Decimal(digits)
    assert message(topic, stored).body.total == Decimal(digits)


def test_upcast_gets_the_decimal_of_a_long_number_and_gives_it_back_as_a_number() -> None:
    topic = typed("Counted", "convert")
    raw = b'{"extra":{"a":%s,"b":1.50,"c":123456789012345678901234567890}}' % LONG.encode()
    extra = {"a": float(LONG), "b": 1.5, "c": 123456789012345678901234567890}
    assert message(topic, raw).body.extra == message(typed("Counted"), raw).body.extra == extra


def test_a_long_number_in_a_field_of_any_type_is_refused_and_a_short_one_is_sent() -> None:
    topic = typed("Counted")
    assert encode_body(topic, exact_json('{"extra":{"a":1.50}}')) == b'{"extra":{"a":1.5}}'
    with pytest.raises(InvalidBody, match=f"the number {LONG} has more digits than a float: only a field of"):
        encode_body(topic, exact_json(f'{{"extra":{{"a":{LONG}}}}}'))


def test_a_send_is_not_upcast() -> None:
    with pytest.raises(InvalidBody, match="lines: Field required"):
        encode_body(typed("PriceChanged", "upcast"), {"shop": 7, "at": NOON, "sku": 1, "price": 3})


def test_the_slot_follows_from_what_is_stored() -> None:
    topic = typed("PriceChanged", slot_basis="reason")
    assert basis_of(topic, CHANGED, None) == b"campaign"
    assert basis_of(topic, decode_body(topic, STORED), None) == b"campaign"


def test_an_item_of_a_list_is_named_and_keeps_its_fields() -> None:
    with pytest.raises(InvalidBody, match=r"^item 11: body does not fit") as error:
        _each(encode_body, PRICES, [CHANGED, {}], 10)
    assert "shop" in error.value.fields


TYPED = [
    typed(name) for name in ("PriceChanged", "Viewed", "Ordered", "Counts", "BoxedInt", "Shapes", "Tagged")
]
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=()))
    | st.sampled_from(["campaign", "2026-11-23T12:00:00Z", "9.90", "a", float("inf"), 1 << 4000])
)
names = st.sampled_from([
    "shop", "lines", "at", "sku", "price", "page", "ms", "orderNumber", "placed", "total", "share", "value", "tags", "kind",
])  # fmt: skip
anything = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(names | st.text(max_size=3), inner, max_size=5)
    ),
    max_leaves=12,
)


@given(anything, st.sampled_from(TYPED))
def test_any_data_is_stored_and_read_again_or_refused(body: Any, topic: Topic) -> None:
    try:
        raw = encode_body(topic, body)
    except InvalidMessage as error:
        str(error).encode("utf-8", "backslashreplace")
    else:
        found = message(topic, raw).body
        assert encode_body(topic, found) == raw
        assert encode_body(topic, decode_body(topic, raw)) == raw


@given(st.binary(max_size=60) | anything.map(lambda body: json.dumps(body).encode()), st.sampled_from(TYPED))
def test_any_bytes_are_an_instance_or_do_not_fit(raw: bytes, topic: Topic) -> None:
    try:
        found = message(topic, raw).body
        again = encode_body(topic, found)
    except InvalidMessage as error:
        # Other programs may write NaN, which is read, and never sent.
        assert isinstance(error, InvalidBody) or "NaN" in str(error)  # noqa: PT017
    else:
        assert message(topic, again).body == found


def test_places_are_written_as_in_python() -> None:
    assert place(("lines", 2, "price")) == "lines[2].price"
    assert place((3, "a b", "c")) == '[3]["a b"].c'
    assert place(("x" * 999,)) == "x" * 50
    assert place(()) == ""


@pytest.mark.parametrize(
    ("path", "check", "why"),
    [
        ("tests.support.typed_bodies.Missing", "E101", "ImportError"),
        ("tests.nowhere.Missing", "E101", "ModuleNotFoundError"),
        ("tests.support.typed_bodies.convert", "E102", "is a function: it must be a dataclass"),
        ("tests.support.typed_bodies.NOT_A_FUNCTION", "E102", "is a int"),
        ("tests.support.typed_bodies.Opaque", "E102", "PydanticSchemaGenerationError"),
        (
            "tests.support.typed_bodies.Unfinished",
            "E102",
            "PydanticUndefinedAnnotation: name 'Missing' is not defined",
        ),
    ],
)
def test_a_type_that_cannot_be_used_says_why(path: str, check: str, why: str) -> None:
    with pytest.raises(Unusable, match=why) as error:
        adapter_of(path)
    assert error.value.check == check
    assert isinstance(error.value, ConfigurationError)
    with pytest.raises(Unusable):
        encode_body(replace(PRICES, typed=DeclaredBody(path)), {})


@pytest.mark.parametrize(
    ("name", "body"), [("Pages", [{"page": "/", "ms": 5}]), ("Sku", 7), ("Quantity", 0.5)]
)
def test_another_name_of_a_type_is_a_type(name: str, body: object) -> None:
    topic = typed(name)
    assert list(typed_bodies.problems(topic)) == []
    assert message(topic, encode_body(topic, body)).body == body
    with pytest.raises(InvalidBody):
        encode_body(topic, "text")


@pytest.mark.parametrize("name", ["missing", "NOT_A_FUNCTION"])
def test_an_upcast_that_is_no_function_is_a_problem(name: str) -> None:
    (found,) = typed_bodies.problems(typed("Viewed", name))
    assert found.id == "E103"


def test_options_that_do_not_fit_the_type_are_problems() -> None:
    assert not list(typed_bodies.problems(typed("PriceChanged", "upcast", slot_basis="shop")))
    (basis,) = typed_bodies.problems(typed("PriceChanged", slot_basis="store"))
    assert basis.id == "E104"
    assert "It has: at, batch, extra, lines, note, reason, shop." in basis.message
    (tags,) = typed_bodies.problems(typed("Tagged"))
    assert tags.id == "E104"
    assert not list(typed_bodies.problems(typed("Tagged", identity="key")))
    (secret,) = typed_bodies.problems(typed("Secretive", identity="key"))
    assert secret.id == "E104"
    assert encode_body(typed("Tagged"), Tagged(tags=frozenset({"a"}))) == b'{"tags":["a"]}'
    assert not list(typed_bodies.problems(Topic("plain", TopicType.FIXED_TIME)))


def test_a_type_that_does_not_read_what_it_writes_is_a_problem() -> None:
    (found,) = typed_bodies.problems(typed("Aliased", identity="key"))
    assert found.id == "E104"
    assert found.message.endswith(
        "does not read what it writes, so no body could be sent: hidden is required, and not written; "
        "optional is written as 'out' and read as 'optional'; renamed is written as 'renamed' and read as 'in'."
    )
    (found,) = typed_bodies.problems(typed("Initialised"))
    assert "start is required, and not written" in found.message


@pytest.mark.parametrize(("name", "stored"), [("Renaming", b'{"value":7}'), ("ByName", b'{"value":7}')])
def test_a_type_that_reads_its_own_names_is_none(name: str, stored: bytes) -> None:
    topic = typed(name)
    assert not list(typed_bodies.problems(topic))
    assert encode_body(topic, {"in": 7}) == stored
    assert message(topic, stored).body.value == 7


def test_the_error_of_a_body_that_the_type_cannot_read_again_says_so() -> None:
    with pytest.raises(
        InvalidBody, match=r"body as the type writes it does not fit .*Aliased: .*in: Field required"
    ):
        encode_body(typed("Aliased"), {"in": 1, "hidden": 2, "a": 3, "one": 4})


def test_a_type_is_not_part_of_the_registered_definition() -> None:
    assert PRICES.definition() == replace(PRICES, typed=None).definition()
    assert hash(PRICES) == hash(typed("PriceChanged"))


WITHOUT = """
import sys
sys.modules["pydantic"] = None
import django
from django.conf import settings
settings.configure(RMQ={"BROKER": "memory", "TOPICS": {
    "prices": {"TYPE": "fixed_time", "BODY": "tests.support.typed_bodies.PriceChanged", "LISTENER": False}
}}, INSTALLED_APPS=["django.contrib.contenttypes", "django.contrib.auth", "django_rmq"])
django.setup()
from django.core.checks import run_checks
(found,) = [each for each in run_checks() if each.id.startswith("django_rmq")]
print(found.id, found.hint)
"""


def test_without_pydantic_a_check_says_what_to_install() -> None:
    assert printed_by(WITHOUT) == 'django_rmq.E100 pip install "django-redis-rmq[typed]".'


def test_an_untyped_topic_needs_no_pydantic() -> None:
    assert printed_by("import sys; import django_rmq.conf; print('pydantic' in sys.modules)") == "False"


def test_a_body_whose_upcast_exits_fails_alone() -> None:
    topic = typed("PriceChanged", "exits")
    group = CallGroup([message(topic, b"{}"), message(PRICES, STORED)])
    assert [each.body for each in group.readable] == [CHANGED]
    ((_, failure),) = group.rest()
    assert failure is not None
    assert "body is not json" in failure.error
