"""Rows whose time has passed are refused, or due at once: else a batch that is repeated later could never be sent."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from django_rmq.core.words.topics import TopicType
from django_rmq.exceptions import ConfigurationError
from django_rmq.spark.columns import MARGIN_MS, moved_up
from django_rmq.spark.options import WRITE, Options
from django_rmq.spark.writing import Writer
from tests.brokers import Broker
from tests.spark.conftest import Queue, Run, waiting

MakeQueue = Callable[..., Queue]
pytestmark = pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas:FutureWarning")
HOUR = 3_600_000


def moved(column: pa.Array, now: int = 1_800_000_000_000) -> list[Any]:
    found: list[Any] = moved_up(pa.record_batch({"fixed_time": column}), now).column("fixed_time").to_pylist()
    return found


@pytest.mark.parametrize("zone", [None, "UTC", "Asia/Shanghai"])
def test_only_what_has_passed_is_moved(zone: str | None) -> None:
    now = 1_800_000_000_000
    given = [now - HOUR, None, now + HOUR, now // 1000]
    early, empty, late, seconds = moved(pa.array(given, pa.int64()), now)
    assert early == now + MARGIN_MS
    # An instant in seconds is a mistake, which raises an error.
    assert (empty, late, seconds) == (None, now + HOUR, now // 1000)

    column = pa.array([None if at is None else at * 1000 for at in given[:3]], pa.timestamp("us", zone))
    batch = moved_up(pa.record_batch({"n": [1, 2, 3], "fixed_time": column}), now)
    found = batch.column("fixed_time")
    assert batch.schema.names == ["n", "fixed_time"] and found.type == column.type
    assert found[1:].equals(column[1:])
    at = found[0].cast(pa.int64()).as_py() // 1000
    assert at == now + MARGIN_MS


def test_what_is_no_time_stays_as_it_is() -> None:
    assert moved(pa.array(["tomorrow"])) == ["tomorrow"]


@pytest.mark.parametrize("given", ["", "always"])
def test_a_wrong_word_names_its_option(spark: Any, queue: MakeQueue, given: str) -> None:
    topic = queue(TopicType.FIXED_TIME)
    schema = spark.range(0).selectExpr("'' as value", "id as fixed_time").schema
    options = Options({**topic.options, "pastTimes": given}, WRITE, "a test")
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
    rows = spark.range(100).selectExpr("cast(id as string) as value", f"{now} + id * {HOUR} as fixed_time")
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
    scores = sorted(entry.score for page in topic.each("peek", "store") for entry in page.entries)
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
