"""Strict fifo topics keep the order of each entity through failures, kills and take-overs."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.in_order import InOrder
from tests.e2e.in_order_checker import check
from tests.e2e.processes import Start
from tests.support.brokers import Broker


def test_each_entity_is_served_in_order_while_workers_are_killed(
    start: Start, broker: Broker, tmp_path: Path
) -> None:
    verdict = InOrder(start, broker, tmp_path, messages=60_000).run(seconds=8)
    print(verdict)
    assert verdict["in order"], verdict
    assert verdict["failed"] >= 100
    assert verdict["kills"].get("processes", 0) >= 1
    assert verdict["died"] == 0


def test_the_checker_finds_what_is_out_of_order(tmp_path: Path) -> None:
    log = tmp_path / "log"

    def found(*lines: str) -> bool:
        log.write_text("".join(f"{line}\n" for line in lines))
        return bool(check(log, 1, 2)["in order"])

    assert found("begins 0 1", "succeeds 0 1", "begins 0 2", "succeeds 0 2")
    assert found("begins 0 1", "begins 0 1", "succeeds 0 1", "begins 0 2", "succeeds 0 2", "succeeds 0 1")
    assert not found("begins 0 1", "succeeds 0 1")
    assert not found("begins 0 1", "begins 0 2", "succeeds 0 1", "succeeds 0 2")
    assert not found("succeeds 0 2", "succeeds 0 1")
