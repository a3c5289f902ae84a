"""The language of rules, as the example project evaluates it item by item."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from example_project.selection.rules import DEEPEST, LONGEST, RuleError, parse

MUG: dict[str, Any] = {
    "price": Decimal("19.99"),
    "stock": 5,
    "rating": Decimal("4.5"),
    "title": "amber tall mug",
}
NOTHING: dict[str, Any] = dict.fromkeys(MUG)


@pytest.mark.parametrize(
    "rule",
    [
        "price < 20",
        "PRICE <= 19.99 AND Stock = 5",
        "price > 100 or stock > 4",
        "price != 20",
        "rating >= 4.50",
        "rating between 4.5 and 4.5",
        "stock in (1, 5)",
        "not stock in (1, 2)",
        "stock not in (1, 2)",
        "price not between 20 and 30",
        'title contains "MUG"',
        "title starts with 'Amber'",
        'title not contains "lamp"',
        'title = "Amber Tall Mug"',
        'title in ("x", "amber tall mug")',
        "price is known",
        "not price is not known",
        "not not price < 20",
        "price > 100 and stock > 100 or rating > 4",
        "(price < 100 or stock > 100) and rating > 4",
        "price>-1 and(stock<6)",
        "\n price \t < \n 20 \n",
    ],
)
def test_a_rule_that_holds(rule: str) -> None:
    assert parse(rule).holds(MUG)
    assert not parse(f"not ({rule})").holds(MUG)


@pytest.mark.parametrize(
    "rule",
    [
        "price < 20",
        "price != 20",
        "rating between 0 and 9",
        "stock in (5)",
        'title contains "a"',
        "price is known",
    ],
)
def test_of_what_is_not_known_nothing_holds_but_its_opposite(rule: str) -> None:
    assert not parse(rule).holds(NOTHING)
    assert parse(f"not {rule}").holds(NOTHING)


def test_and_binds_closer_than_or_and_not_closer_than_and() -> None:
    rule = parse("stock = 5 or stock = 6 and price > 100")
    assert rule.holds(MUG) and not rule.holds({**MUG, "stock": 6})
    assert not parse("not stock = 6 and price > 100").holds(MUG)


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        ("", "empty"),
        ("  \n", "empty"),
        ("cost < 20", "Expected one of price, stock, rating, title, found 'cost' at character 1"),
        ("price << 20", "found '<' at character 8"),
        ("price < ", "found the end of the rule"),
        (
            "price 20",
            "After price, expected = != < <= > >=, 'between', 'in' or 'is known', found '20' at character 7",
        ),
        ('price < "20"', "compared with numbers"),
        ("title < 'a'", "After title, expected = !="),
        ("title = 5", "text in quotes"),
        ("title contains ''", "empty"),
        ("title contains 'mug", 'Cannot read "\'mug" at character 16'),
        (
            "price < 20 stock > 1",
            "Expected 'and', 'or' or the end of the rule, found 'stock' at character 12",
        ),
        ("(price < 20", "Expected ')', found the end of the rule"),
        ("price < 20)", "found ')' at character 11"),
        ("price not < 20", "After 'not', expected 'between', 'in'"),
        ("price between 5 and 4", "No number is between 5 and 4"),
        ("stock in ()", "found ')'"),
        ("price < 1e9", "Cannot read '1e9'"),
        ("price < 1.23456", "Cannot read '1.23456'"),
        ("price < 12345678901", "Cannot read"),
        ("__import__('os')", "found '__import__'"),
        ("__import__('os').system('true')", "Cannot read"),
        ("price < 20; drop table", "Cannot read '; drop table' at character 11"),
        ("price < stock", "compared with numbers"),
        ("not " * (DEEPEST + 1) + "price < 1", "at most"),
        ("(" * 400 + "price < 1" + ")" * 400, "at most"),
        ("price < 1 or " * 200 + "price < 1", f"at most {LONGEST} characters"),
    ],
)
def test_a_rule_that_cannot_be_read_says_why(rule: str, told: str) -> None:
    with pytest.raises(RuleError) as caught:
        parse(rule)
    assert told in str(caught.value)


words = st.sampled_from(
    [
        "price",
        "title",
        "stock",
        "<",
        "=",
        "20",
        "4.5",
        "'a'",
        "and",
        "or",
        "not",
        "(",
        ")",
        "in",
        ",",
        "between",
        "is",
        "known",
    ]
)


@given(st.one_of(st.text(max_size=60), st.lists(words, max_size=20).map(" ".join)))
def test_whatever_is_typed_is_a_rule_or_an_error_of_ours(text: str) -> None:
    try:
        rule = parse(text)
    except RuleError:
        return
    assert rule.holds(MUG) in (True, False)
    assert rule.holds(NOTHING) in (True, False)
