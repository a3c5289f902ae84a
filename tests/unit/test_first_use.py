"""What a process makes when it first needs it is one object, also if two threads are the first to need it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event
from typing import Any

import pytest
from django.test import override_settings

from django_rmq import connections, tasks
from django_rmq.conf import get_config, settings_reader
from django_rmq.connections import brokers
from django_rmq.core.commands import inspect
from django_rmq.operations import authorization
from django_rmq.sending import send_message
from django_rmq.worker import listener_registry
from tests.support.workers import LONG

RMQ = {"BROKER": "memory", "TOPICS": {"a": {"TYPE": "priority", "SLOTS": 1}}}


def by_two_threads(call: Callable[[], Any]) -> list[Any]:
    """Make a call in two threads at the same time; return what each has got."""
    with ThreadPoolExecutor(2) as threads:
        return [each.result(LONG) for each in [threads.submit(call) for _ in range(2)]]


@pytest.fixture
def meeting(monkeypatch: pytest.MonkeyPatch) -> Callable[[object, str], None]:
    """Make two threads that call a function meet in it, before either of them gets its answer."""

    def meet(owner: object, name: str) -> None:
        function, both = getattr(owner, name), Barrier(2, timeout=LONG)

        def called(*args: Any, **kwargs: Any) -> Any:
            answer = function(*args, **kwargs)
            both.wait()
            return answer

        monkeypatch.setattr(owner, name, called)

    return meet


def test_two_threads_that_are_first_get_one_configuration(meeting: Callable[[object, str], None]) -> None:
    with override_settings(RMQ=RMQ):
        meeting(settings_reader, "read_settings")
        first, second = by_two_threads(get_config)
        assert first is second is get_config()


def test_two_threads_that_are_first_send_into_one_memory(meeting: Callable[[object, str], None]) -> None:
    with override_settings(RMQ=RMQ):
        meeting(brokers, "ProcessState")
        bodies = iter([1, 2])
        by_two_threads(lambda: send_message("a", next(bodies), priority=100, on_commit=False))
        ledger = connections.get_broker().run(inspect.audit_ledger(get_config().topic("a"), 0))
        assert ledger.store == 2


def test_settings_that_change_while_a_thread_reads_them_are_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = settings_reader.read_settings

    def change_meanwhile() -> Any:
        answer = read()
        monkeypatch.setattr(settings_reader, "read_settings", read)
        settings_reader.set_schedule_topics(["nightly"])
        return answer

    with override_settings(RMQ=RMQ):
        monkeypatch.setattr(settings_reader, "read_settings", change_meanwhile)
        try:
            assert "nightly" not in get_config().topics
            assert "nightly" in get_config().topics
        finally:
            settings_reader.set_schedule_topics([])


def test_a_thread_that_comes_second_knows_the_topics_that_the_first_one_discovers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, may_end = Event(), Event()
    discovered: list[bool] = []

    def discover() -> None:
        begun.set()
        discovered.append(may_end.wait(LONG))

    monkeypatch.setattr(listener_registry, "discover", discover)
    with override_settings(RMQ=RMQ), ThreadPoolExecutor(2) as threads:
        first = threads.submit(authorization.known_settings)
        assert begun.wait(LONG)
        begun.clear()
        second = threads.submit(authorization.known_settings)
        assert begun.wait(LONG), "the second one looks for them as well"
        may_end.set()
        assert first.result(LONG) is second.result(LONG)
        assert authorization.known_settings() is get_config()
    assert discovered == [True, True]


def test_two_threads_that_are_first_get_one_class_of_the_backend(
    monkeypatch: pytest.MonkeyPatch, meeting: Callable[[object, str], None]
) -> None:
    from django_rmq.tasks import backend

    monkeypatch.delitem(vars(tasks), "RMQBackend", raising=False)
    meeting(backend, "backend_of")
    first, second = by_two_threads(lambda: tasks.RMQBackend)
    assert first is second is tasks.RMQBackend
