"""Trouble that repeats is logged at once, and then less and less."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from django_rmq.core import log
from django_rmq.core.log import LogThrottle
from django_rmq.exceptions import ServerRefused, ServerUnavailable

AWAY = ServerUnavailable("connection refused")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    class Clock:
        now = 100.0

        def monotonic(self) -> float:
            return self.now

    found = Clock()
    monkeypatch.setattr(log, "time", found)
    return found


@pytest.fixture
def complain() -> LogThrottle:
    return LogThrottle(logging.getLogger("tests.complaints"))


def test_ten_minutes_of_trouble_are_a_handful_of_lines_that_count_the_rest(
    complain: LogThrottle, clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(10 * 60 * 10):
        complain("redis", "Redis is unavailable: %s", AWAY)
        clock.now += 0.1
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "Redis is unavailable: connection refused"
    assert 5 <= len(lines) <= 8
    counted = [int(line.partition("(and ")[2].partition(" more")[0]) for line in lines[1:]]
    assert counted == sorted(counted) and sum(counted) + len(lines) <= 6000
    assert all(record.rmq_event == "trouble" for record in caplog.records)  # type: ignore[attr-defined]


def test_trouble_that_was_over_is_logged_at_once_when_it_comes_back(
    complain: LogThrottle, clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(300):
        complain("redis", "unavailable: %s", AWAY)
        clock.now += 0.1
    caplog.clear()
    clock.now += 2 * log.LONGEST_SECONDS
    complain("redis", "unavailable: %s", AWAY)  # stands for those that were still left out
    clock.now += 2 * log.LONGEST_SECONDS
    complain("redis", "unavailable: %s", AWAY)
    clock.now += log.FIRST_SECONDS + 0.1
    complain("redis", "unavailable: %s", AWAY)
    assert len(caplog.records) == 3
    assert caplog.messages[1:] == ["unavailable: connection refused"] * 2


def test_kinds_do_not_hide_each_other_and_are_not_remembered_without_end(
    complain: LogThrottle, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "KINDS", 3)
    assert [complain.admit(kind) for kind in "abcd"] == [0, 0, 0, 0]
    assert complain.admit("d") is None
    assert complain.admit("a") == 0


def test_what_passes_by_itself_is_a_warning_and_only_the_first_line_has_a_traceback(
    complain: LogThrottle, clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for error in (AWAY, ServerRefused("NOPERM"), ValueError("a bug")):
        for _ in range(3):
            complain(error.args, "failed: %s", error, exc_info=True)
        clock.now += log.FIRST_SECONDS
        complain(error.args, "failed: %s", error, exc_info=True)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2 + ["ERROR"] * 4
    assert [record.exc_info is not None for record in caplog.records] == [True, False] * 3


def test_threads_share_one_count(complain: LogThrottle) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(8) as pool:
        admitted = list(pool.map(lambda _: complain.admit("x"), range(800)))
    assert admitted.count(0) == 1 and admitted.count(None) == 799
