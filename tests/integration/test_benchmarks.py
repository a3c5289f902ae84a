"""The benchmarks run and say what they found; the figures themselves are for a quiet machine, and not tested."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import report
from benchmarks.lateness import EDGES_MS, histogram, part
from benchmarks.peers import order, tasks
from benchmarks.peers.__main__ import PEERS, compared
from benchmarks.peers.harness import FOLDER, requirements, version
from benchmarks.table import TITLES, Row, cells, cores_apart, markdown, read_rows, server, text, write
from tests.unit.test_repository import pins

ROOT = Path(__file__).parents[2]
ROW = Row("sending", "20/s", "10/s", "× 2.00", "≥ × 1", True, {"ratio": 2.0})


def run(tmp_path: Path, module: str, *arguments: str) -> dict[str, Any]:
    """Run a benchmark and return what it wrote as JSON."""
    path = tmp_path / "found.json"
    subprocess.run(
        [sys.executable, "-m", module, *arguments, "--json", str(path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=120,
    )
    return json.loads(path.read_text())


@pytest.mark.slow
def test_overlapping_listeners_are_measured_beside_their_ideal(tmp_path: Path) -> None:
    few = ("--only", "--rounds", "1", "--concurrency", "40", "--seconds", "3")
    rows = run(tmp_path, "benchmarks.overlap", *few)["rows"]
    assert [row["work"].partition(",")[0] for row in rows] == ["sleeping 50 ms", "a call of 50 ms"]
    for row in rows:
        # Listeners that do not overlap would reach a fortieth.
        assert 0.1 < row["values"]["share"] < 1.2


@pytest.mark.slow
def test_threads_are_measured_beside_a_bare_pool(tmp_path: Path) -> None:
    [found] = run(tmp_path, "benchmarks.threads", "--rounds", "1", "--threads", "4", "--seconds", "2")[
        "threads"
    ]
    assert 0.1 < found["rmq"] / found["ideal"] < 1.2
    assert found["pool"] > 0


def cores_of(process: int = 0) -> set[int]:
    """The cores that a process may use; on systems that have no say in that, one."""
    return os.sched_getaffinity(process) if hasattr(os, "sched_getaffinity") else {0}


def test_the_server_has_a_core_of_its_own_and_afterwards_all_is_as_it_was() -> None:
    before = cores_of()
    with server() as (client, _), cores_apart(client) as cores:
        theirs, ours = cores_of(client.info("server")["process_id"]), cores_of()
    if len(before) > 1:
        assert (cores, len(theirs), theirs & ours, theirs | ours) == ("one for the server", 1, set(), before)
    else:
        assert (cores, ours) == ("shared with the server", before)
    assert cores_of() == before


def test_works_are_measured_beside_their_bare_limits(tmp_path: Path) -> None:
    few = ("--rounds", "1", "--single-rounds", "1", "--messages", "4000", "--singles", "50")
    found = run(tmp_path, "benchmarks", *few, "--only", "send")
    bulks = [f"bulk send, {kind}" for kind in ("bytes", "dicts", "debounced", "fifo")]
    assert [row["work"] for row in found["rows"]] == [*bulks, "single send"]
    for row in found["rows"]:
        assert row["values"]["ours"][0] > 0
        assert row["values"]["bare"][0] > 0
    assert {"machine", "server", "Python", "redis-py"} <= set(found["conditions"])


@pytest.mark.slow
def test_this_queue_is_measured_as_the_others_are(tmp_path: Path) -> None:
    found = run(
        tmp_path, "benchmarks.peers", "--only", "--messages", "500", "--singles", "20", "--rounds", "2"
    )
    ours = found["queues"]["rmq"]
    assert "error" not in ours, ours
    assert min(ours["bulk"], ours["single"], ours["consume"]) > 0
    assert found["rows"] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "values", "points"),
    [("backlog", ("--backlog", "2000", "4000"), [2000, 4000]), ("processes", ("--largest", "1"), [1])],
)
def test_growth_is_measured_and_drawn(
    tmp_path: Path, name: str, values: tuple[str, ...], points: list[int]
) -> None:
    found = run(tmp_path, "benchmarks.scale", "--only", name, *values, "--plots", str(tmp_path))
    assert [point[0] for point in found["series"][name]] == points
    assert (tmp_path / f"{name}.svg").stat().st_size > 0


@pytest.mark.slow
def test_the_cost_of_single_messages_is_measured(tmp_path: Path) -> None:
    few = ("--only", "--messages", "50", "--rounds", "1", "--rate", "100")
    ours = run(tmp_path, "benchmarks.peers.lone", *few)["queues"]["rmq"]
    assert "error" not in ours, ours
    assert min(ours[cost] for cost in ("redis", "sender", "commands", "p50", "p99")) > 0


@pytest.mark.slow
def test_order_is_measured_and_kept_after_a_failure(tmp_path: Path) -> None:
    few = ("--only", "--messages", "2_500", "--rounds", "1")
    ours = run(tmp_path, "benchmarks.peers.order", *few)["queues"]["rmq"]
    assert "error" not in ours, ours
    assert min(ours["bulk"], ours["consume"]) > 0
    assert (ours["overtaken"], ours["out_of_order"]) == (0, 0)


def test_a_job_that_overtakes_one_that_has_failed_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    ordering = importlib.import_module("ordering")
    good = [f"{entity} {n} done" for n in range(10) for entity in range(100)]
    first = ["7 0 done", "7 1 done", "7 2 done", "7 3 failed"]
    rest = [line for line in good if line not in first]
    assert ordering.judged(first + rest) == {"overtaken": 0, "out_of_order": 0, "complete": True}
    rest.remove("7 4 done")
    early = [*first, "7 4 done", *rest]
    assert ordering.judged(early) == {"overtaken": 1, "out_of_order": 1, "complete": True}
    assert not ordering.judged(early[:-1])["complete"]


@pytest.mark.parametrize("number", [9, 10, 11])
def test_a_queue_whose_jobs_have_not_each_run_once_has_no_figure(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setenv("PEER_ENDED", "")
    jobs, measuring = map(importlib.import_module, ("jobs", "measuring"))
    for module in (jobs, measuring):
        monkeypatch.setattr(module, "SLEEP", 0.001)
    monkeypatch.setattr(jobs, "ran", lambda: None)
    jobs.ended.cache_clear()
    driver = SimpleNamespace(left=lambda client: 0)

    async def run_all() -> None:
        await asyncio.gather(*(jobs.job() for _ in range(number)))

    with measuring.counting() as ended:
        asyncio.run(run_all())
        if number == 10:
            measuring.check_each_ran_once(driver, None, 10, ended)
        else:
            with pytest.raises(RuntimeError, match=f"{number} jobs have run, 10 were sent"):
                measuring.check_each_ran_once(driver, None, 10, ended)


def test_the_table_of_orders_says_the_worst_of_all_rounds() -> None:
    one = {"bulk": 1.0, "consume": 2.0, "overtaken": 0, "out_of_order": 0, "complete": True}
    found = order.middle([one, {**one, "overtaken": 5, "consume": 9.0}, {**one, "consume": 3.0}])
    assert (found["consume"], found["overtaken"]) == (3.0, 5)
    assert order.line("rq", found)[2:] == ["1", "3", "5", "0 of 100"]
    assert order.middle([one, {**one, "complete": False}]) == {"error": "not all jobs succeeded"}
    assert order.line("rq", {"error": "x"})[1:] == ["-"] * 5


@pytest.mark.slow
def test_tasks_are_measured_as_those_of_other_backends_are(tmp_path: Path) -> None:
    some = ("--only", "--messages", "1000", "--singles", "20", "--rounds", "1")
    found = run(tmp_path, "benchmarks.peers.tasks", *some)
    ours = found["queues"]["tasks_rmq"]
    assert "error" not in ours, ours
    assert min(ours["single"], ours["consume"]) > 0
    assert found["rows"] == []


@pytest.mark.parametrize("name", sorted({*PEERS, *order.PEERS, *tasks.PEERS}))
def test_what_a_peer_needs_is_pinned_with_hashes(name: str) -> None:
    found = pins(requirements(name))
    assert all("==" in line and hashes for line, hashes in found.items())
    assert version(name) != "?"


def test_the_best_peer_is_what_we_are_compared_with() -> None:
    def rates(bulk: float, single: float, consume: float) -> dict[str, Any]:
        return {"bulk": bulk, "single": single, "consume": consume}

    def found(ours: dict[str, Any]) -> dict[str, dict[str, Any]]:
        return {"rmq": ours, "rq": rates(9, 11, 1), "huey": rates(5, 2, 4), "arq": {"error": "x"}}

    rows = compared([found(rates(100, 10, 30)), found(rates(100, 13, 90)), found(rates(9, 10, 90))])
    assert [(row.values["best"], row.met) for row in rows] == [("rq", True), ("rq", False), ("huey", True)]
    assert rows[1].values["ratio"] == 10 / 11
    assert rows[1].ours == "10/s"
    assert compared([{"rmq": {"error": "x"}, "rq": rates(1, 1, 1)}]) == []


def test_lateness_is_put_into_classes() -> None:
    values = [-0.5, 0.0, 0.9, 4.0, 2_000.0]
    counts = histogram(values)
    assert (counts[0], counts[1], counts[1 + EDGES_MS.index(3)], counts[-1]) == (1, 2, 1, 1)
    assert sum(counts) == len(values)
    assert (part(values, 0.5), part(values, 0.99)) == (0.9, 2_000.0)


def test_rows_are_written_and_read(tmp_path: Path) -> None:
    write(tmp_path / "rows.json", {"machine": "one"}, rows=[ROW])
    assert read_rows(tmp_path / "rows.json") == [ROW]
    assert markdown(TITLES, cells([ROW])).splitlines()[2].startswith("| sending | 20/s |")
    assert len(set(map(len, text(TITLES, cells([ROW])).splitlines()))) == 1


def test_tables_are_put_where_the_document_wants_them() -> None:
    document = "before\n<!-- works -->\nold\n<!-- end -->\nafter\n<!-- peers -->\nkept\n<!-- end -->\n"
    filled = report.filled(document, {"works": r"new \1"})
    assert filled == document.replace("old", r"new \1")
    with pytest.raises(ValueError, match="no place for scale"):
        report.filled(document, {"scale": "x"})


def test_the_documents_have_one_place_for_every_table() -> None:
    documents = [document.read_text() for document in report.DOCUMENTS]
    for name in ("lone", "works", "lateness", "peers", "scale"):
        assert sum(document.count(f"<!-- {name} -->\n") for document in documents) == 1, name


def test_tables_go_into_the_document_that_has_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first.md", tmp_path / "second.md"
    first.write_text("<!-- works -->\nold\n<!-- end -->\n")
    second.write_text("<!-- scale -->\nold\n<!-- end -->\n")
    monkeypatch.setattr(report, "DOCUMENTS", (first, second))
    report.write({"works": "new", "scale": "newer"})
    assert "new\n" in first.read_text() and "newer\n" in second.read_text()
    with pytest.raises(ValueError, match="no place for peers"):
        report.write({"peers": "x"})
