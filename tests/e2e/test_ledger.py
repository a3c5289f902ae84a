"""The checker of histories is itself shown histories, good and bad ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.ledger import Line, examine, read, write

DUE = {"a": 1000, "b": 1000}


def run(name: str, start: int, end: int | None, slot: int = 0, pid: int = 1, receipt: int = 1) -> list[Line]:
    """A run of a message from one instant to another; None: it never ended."""
    lines = [Line("start", start, 1000 + start, pid, pid, slot, receipt, name)]
    if end is not None:
        lines.append(Line("end", end, 1000 + end, pid, pid, slot, receipt, name))
    return lines


def history(*runs: list[Line]) -> list[Line]:
    return sorted((line for one in runs for line in one), key=lambda line: line.at)


KILLING = Line("killing", 3, 1003, 1)
KILLED = [Line("killed", 5, 1005, 1)]

GOOD = {
    "one after the other": history(run("a", 1, 2), run("b", 3, 4, receipt=2)),
    "at once in two slots": history(run("a", 1, 5), run("b", 2, 4, slot=1, pid=2)),
    "again after its process was killed": history(
        run("a", 1, None), KILLED, run("a", 6, 7, pid=2, receipt=2), run("b", 8, 9, pid=2, receipt=3)
    ),
    "again as soon as its process was dead": history(
        run("a", 1, None),
        [KILLING, *KILLED],
        run("a", 4, 6, pid=2, receipt=2),
        run("b", 8, 9, pid=2, receipt=3),
    ),
    "doubled": history(run("a", 1, 2), run("a", 3, 4, receipt=2), run("b", 5, 6, receipt=3)),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_good_history_is_clean(name: str) -> None:
    assert examine(GOOD[name], DUE).clean()


def test_a_message_that_never_ended_is_lost() -> None:
    assert examine(run("a", 1, 2), DUE).lost == {"b"}
    assert examine(history(run("a", 1, 2), run("b", 3, None, receipt=2)), DUE).lost == {"b"}
    assert examine(run("a", 1, 2), DUE, poison=["b"]).clean()


def test_a_run_that_failed_is_over_but_is_no_end() -> None:
    failed = [Line("start", 1, 1001, 1, 1, 0, 1, "a"), Line("fail", 2, 1002, 1, 1, 0, 1, "a")]
    assert examine(history(failed, run("b", 3, 4, receipt=2)), DUE).lost == {"a"}
    assert examine(history(failed, run("a", 3, 4, receipt=2), run("b", 5, 6, receipt=3)), DUE).clean()


def test_a_message_that_nobody_sent_is_unexpected() -> None:
    assert examine(history(run("a", 1, 2), run("b", 3, 4), run("c", 5, 6)), DUE).unexpected == {"c"}


def test_a_run_before_its_time_is_early() -> None:
    found = examine(history(run("a", 1, 2), run("b", 3, 4)), {"a": 1000, "b": 1004})
    assert [line.name for line in found.early] == ["b"]
    assert not found.clean()


@pytest.mark.parametrize(
    "lines",
    [
        history(run("a", 1, 5), run("b", 3, 8, pid=2, receipt=2)),
        history(run("a", 1, 9), run("b", 3, 4, pid=2, receipt=2)),
        history(run("a", 1, None), run("b", 3, 4, pid=2, receipt=2), run("a", 5, 6, pid=2, receipt=3)),
        history(run("a", 1, 9), KILLED[:0], run("a", 6, 7, pid=2, receipt=2), run("b", 10, 11, receipt=3)),
        history(run("a", 1, None), run("b", 2, 4, pid=2, receipt=2), [KILLING], run("a", 8, 9, receipt=3)),
        history(run("a", 1, 7, pid=3), KILLED, run("b", 6, 8, pid=2, receipt=2), run("a", 9, 10, receipt=3)),
    ],
    ids=[
        "crossing", "within", "never ended and not killed", "the same message", "before it was killed",
        "another one was killed",
    ],
)  # fmt: skip
def test_two_runs_at_once_in_one_slot_overlap(lines: list[Line]) -> None:
    found = examine(lines, DUE)
    assert found.overlapping
    assert not found.clean()


def test_an_older_receipt_after_a_newer_one_is_out_of_order() -> None:
    found = examine(history(run("a", 1, 2, receipt=5), run("b", 3, 4, receipt=4)), DUE)
    assert [line.name for line in found.disordered] == ["b"]


def test_an_end_without_a_start_is_out_of_order() -> None:
    lines = [Line("end", 1, 1001, 1, 1, 0, 1, "a"), *run("b", 2, 3)]
    assert [line.name for line in examine(lines, DUE).disordered] == ["a"]


def test_doubles_are_counted() -> None:
    assert examine(GOOD["doubled"], DUE).doubled == {"a": 2}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    assert read(path) == []
    write(path, "start", 7, 8, 9, 10, "name")
    write(path, "killed", 7)
    with path.open("a") as file:
        file.write("start 1 2 3 4")
    first, second = read(path)
    assert first == Line("start", first.at, first.wall_ms, 7, 8, 9, 10, "name")
    assert (second.word, second.pid) == ("killed", 7)
    assert 0 < first.at <= second.at
