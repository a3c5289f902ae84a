"""`consume`: what is acknowledged is in the files or the table, once, whatever was killed and whichever checkpoint came."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from django_rmq import send_messages
from tests.spark.conftest import Run, Start, end, topic, unrecorded
from tests.support.brokers import Broker
from tests.support.preloaded import Program
from tests.support.workers import eventually, live, total


def stored(path: Path, *columns: str) -> Counter[Any]:
    """Return the rows of a folder, as a program without Spark reads them."""
    if not path.exists():
        return Counter()
    rows = pyarrow.parquet.read_table(path).to_pylist()
    return Counter(
        tuple(row[name] for name in columns) if len(columns) > 1 else row[columns[0]] for row in rows
    )


def test_a_new_checkpoint_writes_beside_what_another_has_written(
    run: Run, broker: Broker, spark: Any, tmp_path: Path
) -> None:
    out = tmp_path / "out"

    def consume(checkpoint: str, **how: Any) -> str:
        return run(
            *("consume", "events", "--parquet", out, "--checkpoint", tmp_path / checkpoint),
            *("--available-now", "--max-messages", 100),
            **how,
        )

    send_messages("events", [{"n": n} for n in range(150)], priority=40)
    assert "150 messages of events consumed" in consume("one")
    send_messages("events", [{"n": n} for n in range(150, 250)], priority=40)
    assert "100 messages of events consumed" in consume("two")
    send_messages("events", [{"n": 250}], priority=40)
    consume("one")
    wanted = Counter({f'{{"n":{n}}}': 1 for n in range(251)})
    assert stored(out, "value") == wanted
    assert total(broker, topic("events"), "acked") == 251 and live(broker, topic("events")) == 0
    # Spark and pandas read the same; a batch has a name of its own.
    assert spark.read.parquet(str(out)).count() == 251
    batches = stored(out, "query", "batch")
    assert len({query for query, _ in batches}) == 2
    assert sorted(batch for _, batch in batches)[:2] == [0, 0]
    # What Spark's own file sink has written, its readers would go on to read alone.
    (out / "_spark_metadata").mkdir()
    send_messages("events", ["kept"], priority=40)
    assert "Use another folder" in consume("three", code=2)
    assert live(broker, topic("events")) == 1


def test_a_batch_that_lost_its_claim_is_replaced_by_what_it_has_left(spark: Any, tmp_path: Path) -> None:
    from django_rmq.spark.foreach_batch import Files

    files = Files(str(tmp_path / "out"))
    rows = spark.createDataFrame([("a",), ("b",)], "value string")
    files.write(rows, "q", 0, may_repeat=True)
    files.write(rows, "q", 1, may_repeat=False)
    assert stored(tmp_path / "out", "value") == {"a": 2, "b": 2}
    files.write(rows.where("value = 'a'"), "q", 1, may_repeat=True)
    assert stored(tmp_path / "out", "value") == {"a": 2, "b": 1}
    files.write(rows.where("value = 'none'"), "q", 1, may_repeat=True)
    files.write(rows.where("value = 'none'"), "q", 7, may_repeat=True)
    assert stored(tmp_path / "out", "value") == {"a": 1, "b": 1}


def test_bodies_that_do_not_fit_are_counted_and_kept(
    run: Run, broker: Broker, spark: Any, tmp_path: Path
) -> None:
    bodies: list[Any] = [{"n": 1, "v": "a"}, {"n": "not a number", "v": "b"}, {"other": 3}, [1, 2, 3], "text"]
    bodies.append({"n": 9007199254740993000})
    raw = ['{"n":"not a number","v":"b"}', '{"other":3}', "[1,2,3]", '"text"', '{"n":9007199254740993000}']
    consume = ("consume", "events", "--schema", "n int, v string", "--available-now")
    send_messages("events", bodies, priority=40)
    kept = tmp_path / "kept"
    told = run(*consume, "--parquet", kept, "--checkpoint", tmp_path / "one")
    assert "batch 0: 5 bodies do not fit the schema" in told
    found = stored(kept, "n", "malformed")
    assert found[1, None] == 1 and found.total() == 6
    assert sorted(body for _, body in found if body is not None) == sorted(raw)

    send_messages("events", bodies, priority=40)
    fine, bad = tmp_path / "fine", tmp_path / "bad"
    arguments = ("--parquet", fine, "--bad", bad, "--checkpoint", tmp_path / "two")
    told = run(*consume, *arguments)
    assert "batch 0: 5 bodies do not fit the schema" in told and "6 messages of events consumed" in told
    assert stored(fine, "n", "v", "batch") == {(1, "a", 0): 1}
    assert stored(bad, "value") == Counter(raw)
    assert total(broker, topic("events"), "acked") == 12
    assert "--bad requires --schema" in run("consume", "events", *arguments, code=2)


def test_a_function_is_told_the_name_of_a_batch(
    run: Run, broker: Broker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    send_messages("events", [1, 2, 3], priority=40)
    consume = ("consume", "events", "--checkpoint", tmp_path / "checkpoint {a}", "--available-now", "--each")
    assert "must take a frame" in run(*consume, "tests.spark.project.pipelines.unnamed", code=2)
    run(*consume, "tests.spark.project.pipelines.noted")
    name = (tmp_path / "checkpoint {a}" / "metadata").read_text().split('"')[3]
    assert f"batch 0 of {name}: 3 rows" in capsys.readouterr().out


# --- kills


def below(process: int) -> dict[int, str]:
    """Return the processes that a process has started, directly or not: id -> command line."""
    parents: dict[int, int] = {}
    lines: dict[int, str] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with suppress(OSError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            lines[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    found: dict[int, str] = {}
    for child in parents:
        above: int | None = child
        while above is not None and above != process:
            above = parents.get(above)
        if above == process and child != process:
            found[child] = lines.get(child, "")
    return found


def victims(process: int, who: str) -> list[int]:
    """Return whom to kill: the driver with its Java, or the Python workers of tasks."""
    found = below(process)
    if who == "driver":
        return [process, *(child for child, line in found.items() if "deploy.SparkSubmit" in line)]
    # The first of them only starts the others.
    return [child for child, line in found.items() if "pyspark.daemon" in line and not below(child)]


def is_writing(out: Path) -> bool:
    """Whether a task has begun a file; its rows come bit by bit."""
    return any(out.glob(".spark-staging-*/**/part-*.parquet"))


def start_writing(begin: Callable[[], Program], out: Path, aside: Path) -> Program:
    """Return a process that is writing a file. Spark gives a Python worker 10 s to connect: the first one may end without it."""
    for _ in range(3):
        for path in out.glob(".spark-staging-*"):
            path.rename(aside / f"{len(list(aside.iterdir()))}{path.name}")
        process = begin()

        def is_decided(process: Program = process) -> bool:
            return is_writing(out) or process.poll() is not None

        eventually(is_decided, "a file that is being written", 400)
        if process.poll() is None:
            return process
        end(process)
    raise AssertionError("no process came to write a file")


@pytest.mark.usefixtures("proc")
def test_files_are_whole_and_exact_whoever_is_killed_while_they_are_written(
    start: Start, run: Run, broker: Broker, tmp_path: Path
) -> None:
    work, out = topic("work"), tmp_path / "out"
    broker.define(work)
    for n in range(2_000):
        broker.send_merge(work, n % 4, 0, [b"%d" % n])
    arguments = ["work", "--parquet", out, "--checkpoint", tmp_path / "checkpoint", "--available-now"]
    # Processes start slowly on a busy machine, and what a lease that ended has given back would rest first.
    arguments += ["--max-messages", 1_000, "--claim-timeout", "1h"]

    for who in ("workers", "driver"):
        process = start_writing(lambda: start("slowly", *arguments, "--master", "local[2]"), out, tmp_path)
        assert stored(out, "value") == {}
        found = victims(process.pid, who)
        assert found, below(process.pid)
        for victim in found:
            os.kill(victim, signal.SIGKILL)
        if who == "workers":
            # Without a task that is tried again the query fails.
            assert process.wait(150) == 1
        end(process)
        assert stored(out, "value") == {}
        assert total(broker, work, "acked") == 0
    run("consume", *arguments)
    assert stored(out, "value") == {str(n): 1 for n in range(2_000)}
    assert total(broker, work, "acked") == 2_000 and live(broker, work) == 0


def test_a_batch_that_is_in_the_files_but_not_recorded_is_there_once(
    run: Run, broker: Broker, tmp_path: Path
) -> None:
    work, out = topic("work"), tmp_path / "out"
    arguments = ["work", "--parquet", out, "--checkpoint", tmp_path / "checkpoint", "--available-now"]
    arguments += ["--claim-timeout", "1h"]
    broker.define(work)
    for n in range(40):
        broker.send_merge(work, n % 4, 0, [b"%d" % n])
    with unrecorded():
        assert "batch 0 is written" in run("consume", *arguments, code=1)
    assert stored(out, "value", "batch") == {(str(n), 0): 1 for n in range(40)}
    assert total(broker, work, "acked") == 0
    broker.send_merge(work, 0, 0, [b"later"])
    run("consume", *arguments)
    assert stored(out, "value", "batch") == {**{(str(n), 0): 1 for n in range(40)}, ("later", 1): 1}
    assert total(broker, work, "acked") == 41 and live(broker, work) == 0
