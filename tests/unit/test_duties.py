"""Duties take turns in one thread, whatever becomes of one of them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Generator

import pytest

from django_rmq.core import duties as module
from django_rmq.core.duties import DutyThread
from django_rmq.exceptions import ServerUnavailable
from tests.support.workers import LONG, eventually


def test_each_duty_gets_its_turn_and_is_closed_in_the_end() -> None:
    steps = {"a": 0, "b": 0}
    closed: list[str] = []

    def duty(name: str) -> Generator[float, None, None]:
        try:
            while True:
                steps[name] += 1
                yield 0.001
        finally:
            closed.append(name)

    duties = DutyThread([lambda: duty("a"), lambda: duty("b")])
    duties.start()
    eventually(lambda: min(steps.values()) >= 5)
    duties.stop()
    duties.join(LONG)
    assert not duties.is_alive()
    assert sorted(closed) == ["a", "b"]


def test_a_duty_that_wants_no_turn_soon_does_not_hold_up_the_end() -> None:
    begun = threading.Event()

    def duty() -> Generator[float, None, None]:
        begun.set()
        yield 3600

    duties = DutyThread([duty])
    duties.start()
    assert begun.wait(LONG)
    duties.stop()
    duties.join(LONG)
    assert not duties.is_alive()


@pytest.mark.parametrize("error", [ServerUnavailable("away"), ZeroDivisionError()], ids=["redis", "bug"])
def test_a_duty_that_fails_is_begun_anew_and_the_others_go_on(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "AGAIN_SECONDS", 0.01)
    tries: list[int] = []
    others: list[int] = []

    def failing() -> Generator[float, None, None]:
        tries.append(1)
        if len(tries) < 3:
            raise error
        yield 3600

    def other() -> Generator[float, None, None]:
        while True:
            others.append(1)
            yield 0.001

    duties = DutyThread([failing, other])
    with caplog.at_level(logging.WARNING):
        duties.start()
        eventually(lambda: len(tries) == 3 and len(others) > 10)
        duties.stop()
        duties.join(LONG)
    (line,) = [record for record in caplog.records if "restarts in" in record.message]
    assert str(error) in line.message and (line.exc_info is not None) == isinstance(error, ZeroDivisionError)


def test_a_duty_that_ends_is_done() -> None:
    def duty() -> Generator[float, None, None]:
        yield 0.0

    duties = DutyThread([duty])
    duties.start()
    duties.join(LONG)
    assert not duties.is_alive()
