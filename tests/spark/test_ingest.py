"""`ingest`: what becomes of rows, and how they are sent in pieces."""

from __future__ import annotations

import json
import shutil
import time
from ast import literal_eval
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from pyspark.sql.readwriter import DataFrameWriter

from django_rmq.core.model.body_codec import encode_json
from django_rmq.core.model.topic import TopicType
from django_rmq.core.producer.placement import slot_of
from django_rmq.exceptions import LostRace
from django_rmq.spark.json_bodies import encode_rows
from django_rmq.spark.pipelines.ingest import Pieces, fingerprint, without_password
from tests.spark.conftest import MakeQueue, Run, bury, refused_in, topic, waiting
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


def test_files_are_ingested_merged_and_by_rule(run: Run, broker: Broker, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("sku,price\na,1.5\nb,2\na,1.5\nc,\n")
    foretold = run("ingest", "notes", tmp_path / "rows.csv", "--dry-run")
    assert "4 rows, 3 messages" in foretold and '"sku":"c"' in foretold and "nothing was sent" in foretold
    assert waiting(broker, "notes") == {}
    unmerged = run("ingest", "notes", tmp_path / "rows.csv", "--dry-run", "--no-merge")
    assert "4 rows, 4 messages" in unmerged and "merging" not in unmerged
    assert "0 rows, 0 messages" in run("ingest", "notes", tmp_path / "rows.csv", "--limit", 0)
    assert "1 rows, 1 messages" in run("ingest", "notes", tmp_path / "rows.csv", "--limit", 1, "--dry-run")
    assert waiting(broker, "notes") == {}
    run("ingest", "notes", tmp_path / "rows.csv", "--where", "double(price) > 1")
    assert set(waiting(broker, "notes")) == {'{"price":"1.5","sku":"a"}', '{"price":"2","sku":"b"}'}
    (tmp_path / "events.json").write_text(
        "\n".join(json.dumps(row) for row in [{"n": 1, "p": 30}, {"n": 1, "p": 90}, {"n": 2, "p": 20}])
    )
    run("ingest", "events", tmp_path / "events.json", "--select", "n as item", "--priority", "p")
    assert waiting(broker, "events") == {'{"item":1}': 90.0, '{"item":2}': 20.0}
    assert "--priority is missing" in run("ingest", "events", tmp_path / "events.json", code=2)
    run("ingest", "usual", tmp_path / "events.json", "--select", "n as item")
    assert waiting(broker, "usual") == {'{"item":1}': 500.0, '{"item":2}': 500.0}
    assert "use --format" in run("ingest", "notes", tmp_path, code=2)
    assert run("ingest", "notes", tmp_path / "none.csv", code=1).startswith("[PATH_NOT_FOUND]")
    bad = run("ingest", "events", tmp_path / "events.json", "--priority", "3", code=2)
    assert "priority must be from 17" in bad and "\n" not in bad.splitlines()[-1]


def test_equal_rows_with_two_slot_bases_are_two_messages(run: Run, broker: Broker, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("city,shop\nBonn,1\nBonn,4\nBonn,1\n")
    chosen = (tmp_path / "rows.csv", "--select", "city", "--slot-basis", "shop")
    for name, more in (
        ("notes", ()),
        ("keyed", ("--key", "city", "--fixed-time", "timestamp '2100-01-01 00:00:00Z'")),
    ):
        assert "3 rows, 2 messages after merging" in run("ingest", name, *chosen, *more)
        slots = [slot for slot in range(topic(name).slots) if broker.count(topic(name), slot).store]
        assert slots == sorted({slot_of(basis, topic(name).slots) for basis in (b"1", b"4")}), name
        assert sum(broker.count(topic(name), slot).store for slot in slots) == 2


def test_rows_of_csv_keep_their_text_whatever_else_is_in_the_file(
    run: Run, broker: Broker, tmp_path: Path
) -> None:
    (tmp_path / "rows.csv").write_text("sku,zip,price\n00123,01234,10.50\n")
    run("ingest", "notes", tmp_path / "rows.csv")
    (tmp_path / "more.csv").write_text("sku,zip,price\n00123,01234,10.50\nx1,a,b\n")
    run("ingest", "notes", tmp_path / "more.csv")
    kept = '{"price":"10.50","sku":"00123","zip":"01234"}'
    assert set(waiting(broker, "notes")) == {kept, '{"price":"b","sku":"x1","zip":"a"}'}
    run("ingest", "doubled", tmp_path / "rows.csv", "--priority", "50", "--option", "inferSchema=true")
    assert set(waiting(broker, "doubled")) == {'{"price":10.5,"sku":123,"zip":1234}'}


def test_ingest_keeps_decimals_and_microseconds(run: Run, broker: Broker, spark: Any, tmp_path: Path) -> None:
    """Rows that differ in the seventeenth digit, or in a microsecond, stay different messages."""
    path = tmp_path / "amounts.parquet"
    spark.sql(
        "select * from values ('a', 12345678901234567.89BD, timestamp '2024-01-01 00:00:00.123456'),"
        " ('a', 12345678901234567.88BD, timestamp '2024-01-01 00:00:00.123456'),"
        " ('b', 10.50BD, timestamp '2024-01-01 00:00:00.123789'),"
        " ('b', 10.50BD, timestamp '2024-01-01 00:00:00.123788'),"
        " ('b', 10.50BD, timestamp '2024-01-01 00:00:00.123788') as t(account, amount, at)"
    ).selectExpr("*", "array(amount) as `all of it`").write.parquet(str(path))
    told = run("ingest", "notes", path)
    assert "5 rows, 4 messages after merging equal bodies" in told and "4 messages sent to notes" in told
    stored = [json.loads(body) for body in waiting(broker, "notes")]
    assert sorted((row["account"], row["amount"], row["all of it"], row["at"]) for row in stored) == [
        ("a", "12345678901234567.88", ["12345678901234567.88"], "2024-01-01T00:00:00.123456+00:00"),
        ("a", "12345678901234567.89", ["12345678901234567.89"], "2024-01-01T00:00:00.123456+00:00"),
        ("b", "10.50", ["10.50"], "2024-01-01T00:00:00.123788+00:00"),
        ("b", "10.50", ["10.50"], "2024-01-01T00:00:00.123789+00:00"),
    ]
    assert "two columns of the body have one name" in run(
        "ingest", "notes", path, "--select", "account as a", "--select", "amount as a", code=2
    )


@pytest.mark.parametrize("zone", ["UTC", "Asia/Shanghai", "America/St_Johns"])
def test_values_are_written_as_every_other_send_writes_them(spark: Any, queue: MakeQueue, zone: str) -> None:
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", zone)
    try:
        times = """(timestamp '1900-01-01 00:00:00Z'), (timestamp '2024-03-10 02:30:00.5Z'), (null),
            (timestamp '2024-11-03 09:05:00.000001Z'), (timestamp '9999-12-30 23:59:59.999999Z')"""
        moments = spark.sql(f"""
            select at, cast(at as timestamp_ntz) as local, cast(at as date) as day,
                at - timestamp '2024-11-03 09:05:00.000002Z' as since, map('at', at) as map,
                array(named_struct('z', at, 'a', '2024-01-01 00:00:00')) as list
            from values {times} as t(at)
        """)
        texts = """'1e7', '9999999.9', '1e16', '1e15', '-0.0', '0', '1e-4', '1e-5', '1.7976931348623157e308', '0.1',
            '4.9e-324', '2e23', '123456789.125', '3', null"""
        numbers = spark.sql(f"""
            select cast(text as double) as double, cast(text as double) is null as `is none`, text,
                array(cast(text as double), null) as list, map('1.0E7', cast(text as double)) as `map "of"`,
                cast(if(abs(double(text)) < 1e30, text, '1.5') as float) as float
            from values ({"), (".join(texts.split(","))}) as t(text)
        """)
        for frame in (moments, numbers):
            topic = queue(TopicType.RANGE_MERGE)
            topic.write(frame, bodyColumns=",".join(frame.columns), timeRange="1h")
            stored = set(topic.scores())
            assert len(stored) == frame.count()
            topic.write(encode_rows(frame, {}, value=None, select=[]), timeRange="1h")
            assert set(topic.scores()) == stored
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)


def test_what_json_cannot_represent_is_refused(run: Run, spark: Any, tmp_path: Path) -> None:
    spark.sql("select 1 as n, double('NaN') as x, x'00' as raw").write.parquet(str(tmp_path / "rows.parquet"))
    arguments = ("ingest", "notes", tmp_path / "rows.parquet")
    assert "the column raw has the type binary" in run(*arguments, code=2)
    told = run(*arguments, "--select", "n", "--select", "x", "--bad", tmp_path / "bad")
    assert "0 messages sent to notes; 1 could not be sent" in told
    assert "body contains NaN or infinity" in refused_in(tmp_path / "bad")[0]["refused"]


@pytest.mark.parametrize(
    ("url", "harmless"),
    [
        ("jdbc:postgresql://h/db?user=ann&password=S3CR3T&ssl=true", True),
        ("jdbc:postgresql://h/db?user=ann&sslpassword = S3CR3T", True),
        ("jdbc:sqlserver://h:1433;databaseName=db;user=ann;Pwd={S3;CR}}3T};encrypt=true", True),
        ("jdbc:mysql://ann:S3CR3T@h:3306/db", True),
        ("jdbc:mysql://address=(host=h)(user=ann)(password=S3CR3T)/db", True),
        ('jdbc:oracle:thin:ann/"S3@CR3T"@//h:1521/db', True),
        ("jdbc:derby:/S3CR3T;create=true", False),
        ("jdbc:postgresql://h/db?user=S3CR3T", False),
        ("jdbc:oracle:thin:@//h:1521/S3CR3T", False),
    ],
)
def test_an_ingest_is_the_same_with_another_password_and_stores_none(url: str, harmless: bool) -> None:
    arguments: dict[str, Any] = {"source": url, "option": ["password=S3;CR3T", "dbtable=t"], "where": None}
    other = {name: repr(value).replace("S3", "S4") for name, value in arguments.items()}
    other = {name: literal_eval(text) for name, text in other.items()}
    assert (fingerprint("notes", arguments) == fingerprint("notes", other)) is harmless
    assert fingerprint("notes", arguments) != fingerprint("notes", {**arguments, "where": "n > 3"})
    assert harmless == ("CR" not in without_password(url))


def test_an_address_that_is_not_understood_is_shown_without_its_password(run: Run) -> None:
    told = run("ingest", "notes", "jdbc:mysql://ann:S3CR3T@h/db", code=2)
    assert "the format of jdbc:mysql://ann@h/db is unknown" in told


@pytest.mark.parametrize("ansi", ["true", "false"])
def test_decimals_are_the_text_that_every_other_send_writes(spark: Any, ansi: str) -> None:
    rows = spark.sql("""
        select id, cast(id as decimal(20, 10)) as `a.b`, array(cast(id * 1e-7 as decimal(20, 10)), null) as b,
            map('k', cast(id * 1e20 as decimal(38, 0)), 'n', null) as c,
            if(id = 1, null, named_struct('d', cast(1.5 as decimal(10, 2)), 'n', cast(null as decimal(10, 2)))) as d
        from range(3)
    """).cache()
    before = spark.conf.get("spark.sql.ansi.enabled")
    spark.conf.set("spark.sql.ansi.enabled", ansi)
    try:
        bodies = [row.value for row in encode_rows(rows, {}, value=None, select=[]).collect()]
    finally:
        spark.conf.set("spark.sql.ansi.enabled", before)
    assert bodies == [encode_json(row.asDict(recursive=True)).decode() for row in rows.collect()]
    assert '["0E-10",null]' in bodies[0] and '["1.000E-7",null]' in bodies[1]


@pytest.mark.parametrize("in_pieces", [False, True])
def test_ingest_leaves_bad_rows_out_on_request(
    run: Run, broker: Broker, tmp_path: Path, in_pieces: bool
) -> None:
    (tmp_path / "rows.csv").write_text("n,p\n1,40\n2,\n3,3\n4,50\n")
    arguments = ["ingest", "events", tmp_path / "rows.csv", "--select", "n", "--priority", "int(p)"]
    arguments += ["--checkpoint", tmp_path / "pieces"] if in_pieces else []
    told = run(*arguments, "--bad", tmp_path / "bad")
    assert f"2 messages sent to events; 2 could not be sent and are in {tmp_path / 'bad'}" in told
    assert waiting(broker, "events") == {'{"n":"1"}': 40, '{"n":"4"}': 50}
    rows = refused_in(tmp_path / "bad")
    assert {row["value"]: row["refused"].partition(" (")[0] for row in rows} == {
        '{"n":"2"}': "column priority is null",
        '{"n":"3"}': "priority must be from 17",
    }


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


# --- with a checkpoint: at a rate, while there is room, and on from where it has failed


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
    events, seen = topic("events"), [0]
    count = Pieces._waiting

    def counted(pieces: Pieces) -> int:
        seen.append(count(pieces))
        if seen[-1] and seen[-1] == seen[-2]:
            # No piece was sent since the last look, because there is no room.
            bury(broker, "events", "taken")
        return seen[-1]

    monkeypatch.setattr(Pieces, "_waiting", counted)
    told = run(
        *("ingest", "events", rows(tmp_path / "rows.csv", 400), "--priority", "50"),
        *("--max-backlog", 100, "--checkpoint", tmp_path / "checkpoint"),
    )
    assert "Waiting: " in told and "400 messages sent to events" in told
    assert 60 < max(seen) <= 100
    assert total(broker, events, "sent") == 400


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("notes", "--rate", "10"), "--rate needs --checkpoint"),
        (("notes", "--max-backlog", "10"), "--max-backlog needs --checkpoint"),
        (("notes", "--rate", "0", "--checkpoint", "x"), "--rate must be a number greater than 0, got 0.0"),
        (("notes", "--rate", "inf", "--checkpoint", "x"), "--rate must be a number greater than 0, got inf"),
        (("queue", "--checkpoint", "x"), "topic queue is fifo"),
    ],
)
def test_a_pace_that_cannot_be_kept_is_refused(
    run: Run, tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    name, *others = arguments
    assert said in run("ingest", name, rows(tmp_path / "rows.csv", 1), *others, code=2)
