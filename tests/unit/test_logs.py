"""What is logged: from its own line, each event as the docs list it, and trouble that repeats less and less."""

from __future__ import annotations

import ast
import logging
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from django_rmq import WorkerFilter
from django_rmq.core import log
from django_rmq.core.log import LogThrottle, safe_logger
from django_rmq.exceptions import ServerRefused, ServerUnavailable

logger = safe_logger("django_rmq.test")


class Raising(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise RuntimeError("nothing is logged here")


def test_a_line_is_logged_with_its_fields_and_its_place(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "django_rmq.test"):
        logger.info("%d of %s", 3, "four", extra={"rmq_topic": "prices"})
        logger.debug("nothing")
    [record] = caplog.records
    assert record.getMessage() == "3 of four"
    assert (record.rmq_topic, record.funcName, record.filename) == (  # type: ignore[attr-defined]
        "prices",
        "test_a_line_is_logged_with_its_fields_and_its_place",
        "test_logs.py",
    )


def test_a_handler_that_raises_is_reported_and_harms_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    handler = Raising()
    logging.getLogger("django_rmq.test").addHandler(handler)
    try:
        raise ValueError("what went wrong")
    except ValueError:
        logger.exception("It went wrong")
    finally:
        logging.getLogger("django_rmq.test").removeHandler(handler)
    said = capsys.readouterr().err
    assert "django_rmq.test: cannot write this log record: It went wrong" in said
    assert "nothing is logged here" in said
    assert "what went wrong" in said


def test_without_a_standard_error_it_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", None)
    handler = Raising()
    logging.getLogger("django_rmq.test").addHandler(handler)
    try:
        logger.error("It went wrong")
    finally:
        logging.getLogger("django_rmq.test").removeHandler(handler)


def test_each_line_of_a_handler_names_the_worker_of_its_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(log, "_worker", "-")
    caplog.handler.addFilter(worker_filter := WorkerFilter())
    try:
        with caplog.at_level(logging.INFO):
            logging.getLogger("of.somebody.else").info("before")
            log.name_worker("0123456789abcdef0123456789abcdef")
            logger.info("after")
    finally:
        caplog.handler.removeFilter(worker_filter)
    assert [record.rmq_worker for record in caplog.records] == ["-", "01234567"]  # type: ignore[attr-defined]


ROOT = Path(__file__).parents[2]
OF_FAILURES = {"failed", "undecodable", "overran", "rejected"}


def logged() -> dict[str, set[str]]:
    """Return event → fields, as the code says."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for path in (ROOT / "django_rmq").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                not isinstance(node, ast.keyword)
                or node.arg != "extra"
                or not isinstance(node.value, ast.Dict)
            ):
                continue
            fields = {
                str(key.value): value
                for key, value in zip(node.value.keys, node.value.values, strict=True)
                if isinstance(key, ast.Constant)
            }
            event = fields.pop("rmq_event")
            for name in {str(event.value)} if isinstance(event, ast.Constant) else OF_FAILURES:
                found[name] |= fields.keys()
    return dict(found)


def documented() -> dict[str, set[str]]:
    """Return event → fields, as the docs say."""
    found: dict[str, set[str]] = {}
    for line in (ROOT / "docs" / "reference" / "logging.md").read_text().splitlines():
        cells = line.split("|")
        if len(cells) == 6 and (events := re.findall(r"`([a-z_]+)`", cells[1])) != ["rmq_event"]:
            found |= {event: set(re.findall(r"`(\w+)`", cells[3])) for event in events}
    return found


def test_the_docs_name_every_event_with_its_fields() -> None:
    events, shown = logged(), documented()
    assert len(events) > 20
    # Two events share a line where the second has a field more.
    shown["process_started"] -= {"rmq_exit_code"}
    assert shown == events


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
