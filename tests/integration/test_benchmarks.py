"""The benchmarks run and say what they found; the figures themselves are for a quiet machine, and not tested."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report
from benchmarks.harness import TITLES, Row, cells, cores_apart, markdown, read_rows, server, text, write
from benchmarks.lateness import EDGES_MS, histogram, part
from benchmarks.peers.__main__ import COMPARISONS, compared
from benchmarks.peers.environments import requirements, version
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


# What these measure with, the two before have tried.
@pytest.mark.slow
@pytest.mark.deep
@pytest.mark.parametrize(
    ("name", "values", "points"),
    [
        ("backlog", ("--backlog", "2000", "4000"), [2000, 4000]),
        ("processes", ("--largest", "1"), [1]),
        ("drain", ("--largest", "1024"), [1024]),
    ],
)
def test_growth_is_measured(tmp_path: Path, name: str, values: tuple[str, ...], points: list[int]) -> None:
    found = run(tmp_path, "benchmarks.scale", "--only", name, *values)
    assert [point[0] for point in found["series"][name]] == points


@pytest.mark.slow
@pytest.mark.deep
def test_the_cost_of_single_messages_is_measured(tmp_path: Path) -> None:
    few = ("--only", "--messages", "50", "--rounds", "1", "--rate", "100")
    ours = run(tmp_path, "benchmarks.peers", "lone", *few)["queues"]["rmq"]
    assert "error" not in ours, ours
    assert min(ours[cost] for cost in ("redis", "sender", "commands", "p50", "p99")) > 0


@pytest.mark.slow
@pytest.mark.deep
def test_tasks_are_measured_as_those_of_other_backends_are(tmp_path: Path) -> None:
    some = ("--only", "--messages", "1000", "--singles", "20", "--rounds", "1")
    found = run(tmp_path, "benchmarks.peers", "tasks", *some)
    ours = found["queues"]["tasks_rmq"]
    assert "error" not in ours, ours
    assert min(ours["single"], ours["consume"]) > 0
    assert found["rows"] == []


@pytest.mark.parametrize("name", [peer for name in ("queues", "tasks") for peer in COMPARISONS[name].peers])
def test_what_a_peer_needs_is_pinned_with_hashes(name: str) -> None:
    found = pins(requirements(name))
    assert all("==" in line and hashes for line, hashes in found.items())
    assert version(name) != "?"


def test_the_best_peer_is_what_we_are_compared_with() -> None:
    def rates(bulk: float, single: float, consume: float) -> dict[str, Any]:
        return {"bulk": bulk, "single": single, "consume": consume}

    def found(ours: dict[str, Any]) -> dict[str, dict[str, Any]]:
        return {"rmq": ours, "rq": rates(9, 11, 1), "huey": rates(5, 2, 4), "arq": {"error": "x"}}

    rows = compared(
        COMPARISONS["queues"], [found(rates(100, 10, 30)), found(rates(100, 13, 90)), found(rates(9, 10, 90))]
    )
    assert [(row.values["best"], row.met) for row in rows] == [("rq", True), ("rq", False), ("huey", True)]
    assert rows[1].values["ratio"] == 10 / 11
    assert rows[1].ours == "10/s"
    assert compared(COMPARISONS["queues"], [{"rmq": {"error": "x"}, "rq": rates(1, 1, 1)}]) == []


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
    report.write({"works": r"new \1", "scale": "newer"})
    assert "new \\1\n" in first.read_text() and "newer\n" in second.read_text()
    with pytest.raises(ValueError, match="no place for peers"):
        report.write({"peers": "x"})
