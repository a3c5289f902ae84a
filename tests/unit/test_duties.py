"""Duties take turns in one thread, whatever becomes of one of them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Generator

import pytest
from django.db import Error, InterfaceError, InternalError, OperationalError

from django_rmq.core import duties as module
from django_rmq.core.duties import DutyThread
from django_rmq.database_access import DatabaseTrouble, threads_of_duties
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


def database_error(kind: type[Error], **codes: str) -> Error:
    """Return Django's error for one of a driver, which has these attributes."""
    error = kind("terminating connection due to idle-in-transaction timeout")
    error.__cause__ = type("ErrorOfDriver", (Exception,), codes)()
    return error


@pytest.mark.parametrize(
    ("error", "is_trouble"),
    [
        (database_error(OperationalError), True),
        (database_error(InterfaceError), True),
        (database_error(InternalError, sqlstate="25P03"), True),
        (database_error(InternalError, pgcode="25P03"), True),
        (database_error(InternalError, sqlstate="25P02"), False),
        (database_error(InternalError), False),
    ],
    ids=["operational", "interface", "psycopg", "psycopg2", "of the duty", "another driver"],
)
def test_a_duty_that_loses_its_database_is_told_from_one_that_is_wrong(
    error: Error, is_trouble: bool
) -> None:
    def fails() -> Generator[float, None, None]:
        yield 0.0
        raise error

    [thread] = threads_of_duties([("shop", fails)])
    [duty] = thread._duties
    steps = duty()
    next(steps)
    with pytest.raises(DatabaseTrouble if is_trouble else InternalError) as raised:
        next(steps)
    assert ("database shop: " in str(raised.value)) == is_trouble
