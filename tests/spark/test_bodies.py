"""Bodies that do not fit a schema: none of them becomes a row of NULLs and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from django_rmq.exceptions import InvalidRequest

FITTING = {
    '{"n":1,"v":"a"}': (1, "a"),
    '{"n":2}': (2, None),
    '{"v":null}': (None, None),
    '{"n":3,"other":{"x":1}}': (3, None),
}
MALFORMED = [
    '{"n":"not a number","v":"b"}',
    '{"other":3}',
    "[1,2,3]",
    '"text"',
    '{"n":9007199254740993000}',
    "null",
    "{",
    '[{"n":1}]',
    '{"n":1.5}',
]


@pytest.mark.parametrize("kind", ["string", "binary"])
def test_a_body_that_does_not_fit_is_kept_as_it_is(spark: Any, kind: str) -> None:
    from django_rmq.spark.pipelines.consume import decoded

    bodies = [*FITTING, *MALFORMED]
    frame = spark.createDataFrame([(body, "t", 3) for body in bodies], "value string, topic string, slot int")
    found = decoded(frame.withColumn("value", frame["value"].cast(kind)), "n int, v string")
    assert found.columns == ["n", "v", "topic", "slot", "malformed"]
    rows = found.collect()
    read = [(row.n, row.v) for row in rows if row.malformed is None]
    assert read == list(FITTING.values())
    kept = [row.malformed for row in rows if row.malformed is not None]
    assert [bytes(body).decode() if kind == "binary" else body for body in kept] == MALFORMED
    assert {(row.topic, row.slot) for row in rows} == {("t", 3)}


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ("array<int>", "list of columns"),
        ("n int, slot int", "column slot"),
        ("Malformed string", "column malformed"),
        ("n int, batch int", "column batch"),
    ],
)
def test_a_schema_names_columns_that_are_not_there_already(spark: Any, schema: str, said: str) -> None:
    from django_rmq.spark.pipelines.consume import decoded

    frame = spark.createDataFrame([("1", "t", 0)], "value string, topic string, slot int")
    with pytest.raises(InvalidRequest, match=said):
        decoded(frame, schema)
