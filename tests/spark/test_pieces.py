"""`ingest` with a checkpoint: at a rate, while there is room, and on from where it has failed."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from pyspark.sql.readwriter import DataFrameWriter

from django_rmq.exceptions import LostRace
from django_rmq.spark.pipelines.ingest import Pieces
from tests.spark.conftest import Run, topic, waiting
from tests.support.brokers import Broker
from tests.support.workers import total


def rows(path: Path, count: int) -> Path:
    path.write_text("n\n" + "\n".join(map(str, range(count))))
    return path


def wanted(count: int) -> set[str]:
    return {f'{{"n":"{n}"}}' for n in range(count)}


def plan(checkpoint: Path) -> dict[int, int]:
    table = pyarrow.parquet.read_table(checkpoint / "plan").to_pylist()
    return {row["piece"]: row["messages"] for row in table}


def pieces_sent(checkpoint: Path) -> int:
    return len(list((checkpoint / "sent").glob("part-*.parquet")))


def test_no_more_messages_are_sent_per_second_than_was_said(run: Run, broker: Broker, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    began = time.monotonic()
    told = run("ingest", "notes", rows(tmp_path / "rows.csv", 120), "--rate", 20, "--checkpoint", checkpoint)
    took = time.monotonic() - began
    assert "120 of 120 messages sent" in told and "120 messages sent to notes" in told
    planned = plan(checkpoint)
    assert sum(planned.values()) == 120 and len(planned) == 3
    # All but the last piece have to wait for their time.
    assert took >= (120 - planned[max(planned)]) / 20
    assert set(waiting(broker, "notes")) == wanted(120)
    assert total(broker, topic("notes"), "sent") == 120


def test_what_failed_goes_on_with_the_piece_that_was_not_recorded(
    run: Run, broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, checkpoint = topic("work"), tmp_path / "checkpoint"
    arguments = ["ingest", "work", str(rows(tmp_path / "rows.csv", 2_000)), "--checkpoint", str(checkpoint)]
    write = DataFrameWriter.parquet

    def write_one_record(writer: DataFrameWriter, path: str, **options: Any) -> None:
        if path.endswith("/sent") and pieces_sent(checkpoint):
            raise LostRace("a piece is sent and not recorded")
        write(writer, path, **options)

    with monkeypatch.context() as patched:
        patched.setattr(DataFrameWriter, "parquet", write_one_record)
        assert "a piece is sent and not recorded" in run(*arguments, "--rate", 100, code=1)
    shutil.move(tmp_path / "rows.csv", tmp_path / "gone.csv")
    planned = [messages for _, messages in sorted(plan(checkpoint).items())]
    assert len(planned) > 2 and pieces_sent(checkpoint) == 1
    assert total(broker, work, "sent") == planned[0] + planned[1]
    told = run(*arguments, "--rate", 20_000)
    assert f"{planned[0]} of 2000 messages were sent before" in told and "2000 of 2000 messages sent" in told
    assert set(waiting(broker, "work")) == wanted(2_000)
    sent = total(broker, work, "sent")
    assert sent == 2_000 + planned[1]
    assert "2000 messages sent to work" in run(*arguments)
    assert total(broker, work, "sent") == sent
    assert "other arguments" in run(*arguments, "--where", "n > 3", code=2)


def test_what_was_stored_without_its_plan_is_stored_again(run: Run, broker: Broker, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    arguments = ("ingest", "notes", rows(tmp_path / "rows.csv", 50), "--checkpoint", checkpoint)
    run(*arguments)
    for name in ("plan", "sent"):
        shutil.rmtree(checkpoint / name)
    assert "0 messages sent" in run(*arguments[:-1], tmp_path / "none", "--where", "n < 0")
    rows(tmp_path / "rows.csv", 60)
    assert "60 messages are stored" in run(*arguments)
    assert set(waiting(broker, "notes")) == wanted(60)


def test_no_more_messages_wait_than_was_said(
    run: Run, broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events, seen, done, full = topic("events"), [0], threading.Event(), threading.Event()
    broker.define(events)
    count, counts = Pieces._waiting, [0]

    def counted(pieces: Pieces) -> int:
        found = count(pieces)
        if found and found == counts[-1]:
            # No piece was sent since the last look: there is no room.
            full.set()
        counts.append(found)
        return found

    monkeypatch.setattr(Pieces, "_waiting", counted)

    def consume() -> None:
        while not done.wait(0.2):
            found = sum(broker.count(events, slot).store for slot in range(events.slots))
            seen.append(found)
            # Only once the sender has seen that there is no room.
            if full.is_set() and seen[-3:] == [found] * 3:
                for slot in range(events.slots):
                    names = [
                        entry.member
                        for entry in broker.list_messages(events, slot, "store", limit=100).entries
                    ]
                    broker.bury(events, slot, names, "taken")

    consumer = threading.Thread(target=consume)
    consumer.start()
    try:
        told = run(
            *("ingest", "events", rows(tmp_path / "rows.csv", 400), "--priority", "50"),
            *("--max-backlog", 100, "--checkpoint", tmp_path / "checkpoint"),
        )
    finally:
        done.set()
        consumer.join()
    assert "Waiting: " in told and "400 messages sent to events" in told
    assert 60 < max(seen) <= 100
    assert total(broker, events, "sent") == 400


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("notes", "--rate", "10"), "--rate needs --checkpoint"),
        (("notes", "--max-backlog", "10"), "--max-backlog needs --checkpoint"),
        (("notes", "--rate", "0", "--checkpoint", "x"), "--rate must be greater than 0"),
        (("queue", "--checkpoint", "x"), "topic queue is fifo"),
    ],
)
def test_a_pace_that_cannot_be_kept_is_refused(
    run: Run, tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    name, *others = arguments
    assert said in run("ingest", name, rows(tmp_path / "rows.csv", 1), *others, code=2)
