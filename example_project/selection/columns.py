"""A rule as a column of Spark: the same answer, for many items at once."""

from __future__ import annotations

from functools import reduce
from operator import and_, or_

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - what every Spark program calls it

from example_project.selection.rules import (
    COMPARISONS,
    Comparison,
    Conjunction,
    Disjunction,
    Negation,
    Rule,
)


def column_of(rule: Rule) -> Column:
    """Return the rule over columns that are named like its fields, with texts folded as in `Facts`; never null."""
    match rule:
        case Conjunction(parts):
            return reduce(and_, map(column_of, parts))
        case Disjunction(parts):
            return reduce(or_, map(column_of, parts))
        case Negation(part):
            return ~column_of(part)
        case Comparison():
            return F.coalesce(_test(rule), F.lit(False))


def _test(one: Comparison) -> Column:
    fact = F.col(one.field)
    values = [F.lit(value) for value in one.values]
    match one.word:
        case "known":
            return fact.isNotNull()
        case "between":
            return fact.between(*values)
        case "in":
            return reduce(or_, [fact == value for value in values])
        case "contains":
            return F.contains(fact, values[0])
        case "starts":
            return F.startswith(fact, values[0])
    # The signs are those of Python, and a Column answers to them.
    test: Column = COMPARISONS[one.word](fact, values[0])  # type: ignore[arg-type,assignment]
    return test
