"""A log call that cannot raise logs what any other does, from the line that it is on."""

from __future__ import annotations

import logging

import pytest

from django_rmq import WorkerFilter
from django_rmq.core import log
from django_rmq.core.log import safe_logger

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
