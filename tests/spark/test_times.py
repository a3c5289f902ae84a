"""The columns of a write that are times: what they may hold, and what becomes of times that have passed.

Those are refused, or due at once: else a batch that is repeated later could never be sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from django_rmq.core.model.topic import TopicType
from django_rmq.exceptions import ConfigurationError, InvalidMessage
from django_rmq.spark.columns import MARGIN_MS, in_milliseconds
from django_rmq.spark.source_options import WRITE, SourceOptions
from django_rmq.spark.writer import Writer
from tests.spark.conftest import Queue, Run, waiting
from tests.support.brokers import Broker

MakeQueue = Callable[..., Queue]
pytestmark = pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas:FutureWarning")
HOUR = 3_600_000


def read(name: str, column: pa.Array, now_ms: int | None = None) -> list[Any]:
    """Return a column of a write as the core takes it."""
    batch = pa.record_batch({"n": pa.array(range(len(column))), name: column})
    found = in_milliseconds(batch, [name], now_ms)
    assert found.schema.names == batch.schema.names
    values: list[Any] = found.column(name).to_pylist()
    return values


@pytest.mark.parametrize("zone", [None, "UTC", "Asia/Shanghai"])
def test_only_what_has_passed_is_moved(zone: str | None) -> None:
    now = 1_800_000_000_000
    given = [now - HOUR, None, now + HOUR, now // 1000]
    column = pa.array(given, pa.timestamp("ms", zone))
    early, empty, late, seconds = read("fixed_time", column, now)
    assert early == now + MARGIN_MS
    # An instant that was given in seconds is a mistake, which raises an error.
    assert (empty, late, seconds) == (None, now + HOUR, now // 1000)
    assert read("fixed_time", column) == given


@pytest.mark.parametrize(
    ("column", "ms"),
    [
        (pa.array([2, None, 999]), [2_000, None, 999_000]),
        (pa.array([0.25, 1.5]), [250, 1_500]),
        (pa.array([Decimal("1.5")]), [1_500]),
        (pa.array([timedelta(hours=1), None]), [3_600_000, None]),
        (pa.array([1_500], pa.duration("ms")), [1_500]),
        (pa.array(["250ms", "15m", "5"]), [250, 900_000, 5_000]),
        (pa.array([None], pa.int32()), [None]),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["time_range", "delay"])
def test_a_wait_is_seconds_an_interval_or_text(name: str, column: pa.Array, ms: list[int | None]) -> None:
    assert read(name, column) == ms


def test_a_time_out_is_in_seconds() -> None:
    assert read("timeout", pa.array([20, None])) == [20, None]
    assert read("timeout", pa.array(["1h"])) == [3_600]
    # A time-out of a quarter of an hour is usual.
    assert read("timeout", pa.array([1_000])) == [1_000]


@pytest.mark.parametrize(
    ("column", "said"),
    [
        (
            pa.array([1, 5_000]),
            'column delay: delay .*In milliseconds. Say 5 or "5s". For 5000 seconds say "5000s"',
        ),
        (pa.array([1, -1]), "column delay: delay .*from 0s to 36525d, got -1"),
        (pa.array([math.nan]), "got nan"),
        (pa.array(["soon"]), "delay must be a duration such as 90, 250ms, .*got 'soon'"),
        (pa.array([True]), "got True"),
    ],
    ids=str,
)
def test_what_is_no_wait_names_its_column(column: pa.Array, said: str) -> None:
    with pytest.raises(InvalidMessage, match=said):
        read("delay", column)


@pytest.mark.parametrize("kind", ["bigint", "string", "date"])
def test_a_due_time_that_is_not_a_timestamp_is_refused_before_anything_is_sent(
    spark: Any, queue: MakeQueue, kind: str
) -> None:
    topic = queue(TopicType.FIXED_TIME)
    schema = spark.range(0).selectExpr("'' as value", f"cast(null as {kind}) as fixed_time").schema
    with pytest.raises(
        ConfigurationError, match=rf"has the type {kind}, it must be a timestamp, such as timestamp_millis"
    ):
        Writer(SourceOptions(topic.options, WRITE, "a test"), schema, overwrite=False)


@pytest.mark.parametrize("given", ["", "always"])
def test_a_wrong_word_names_its_option(spark: Any, queue: MakeQueue, given: str) -> None:
    topic = queue(TopicType.FIXED_TIME)
    schema = spark.range(0).selectExpr("'' as value", "timestamp_millis(id) as fixed_time").schema
    options = SourceOptions({**topic.options, "pastTimes": given}, WRITE, "a test")
    if given:
        with pytest.raises(ConfigurationError, match="option pastTimes must be refuse or now, got 'always'"):
            Writer(options, schema, overwrite=False)
    else:
        Writer(options, schema, overwrite=False)


def test_a_stream_goes_on_with_a_batch_whose_times_have_passed(
    spark: Any, queue: MakeQueue, tmp_path: Path
) -> None:
    topic = queue(TopicType.FIXED_TIME)
    now = topic.broker.now_ms() - 120_000
    rows = spark.range(100).selectExpr(
        "cast(id as string) as value", f"timestamp_millis({now} + id * {HOUR}) as fixed_time"
    )
    rows.write.parquet(str(tmp_path / "rows"))

    def run(**options: str) -> None:
        stream = spark.readStream.schema(rows.schema).parquet(str(tmp_path / "rows")).writeStream
        stream = stream.format("rmq").options(**topic.options, **options)
        stream = stream.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True)
        stream.start().awaitTermination(120)

    for _ in range(2):
        with pytest.raises(Exception, match="is not in the future"):
            run()
    run(pastTimes="now")
    scores = sorted(entry.score for page in topic.each("list_messages", "store") for entry in page.entries)
    assert len(scores) == 100
    assert now < scores[0] < now + HOUR
    assert scores[1:] == [now + n * HOUR for n in range(1, 100)]


def test_an_ingest_sends_what_was_due_while_it_waited(run: Run, broker: Broker, tmp_path: Path) -> None:
    before, later = (datetime.now(UTC) + timedelta(hours=n) for n in (-1, 1))
    source = tmp_path / "rows.csv"
    source.write_text(f"n,at\n1,{before:%Y-%m-%dT%H:%M:%SZ}\n2,{later:%Y-%m-%dT%H:%M:%SZ}\n")
    arguments = ("ingest", "keyed", source, "--fixed-time", "timestamp(at)", "--key", "n", "--select", "n")
    stored = ("--checkpoint", tmp_path / "checkpoint")
    for more in ((), stored):
        assert "is not in the future" in run(*arguments, *more, code=2)
    run(*arguments, "--past-times", "now", *stored)
    found = waiting(broker, "keyed")
    assert set(found) == {"1", "2"}
    assert abs(found["2"] / 1000 - later.timestamp()) <= 1
    assert found["1"] / 1000 > before.timestamp() + 3_600
    run(*arguments, "--past-times", "now")
    assert set(waiting(broker, "keyed")) == {"1", "2"}
