"""The backend of tasks: the cases that Django and django-tasks have for theirs, and what is RMQ's own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.contrib.auth.models import Group
from django.core import checks, mail
from django.db import transaction
from django.test import override_settings
from django.utils import timezone
from django.utils.module_loading import import_string

from django_rmq import connections, remove_message
from django_rmq.conf import get_config
from django_rmq.core.commands import fetch, inspect, stored_results
from django_rmq.core.model.delivered_message import Message
from django_rmq.core.model.keys import slot_keys
from django_rmq.core.model.topic import Topic
from django_rmq.core.producer.placement import slot_of
from django_rmq.exceptions import ConfigurationError, InvalidMessage, TopicFull
from django_rmq.models import OutboxMessage
from django_rmq.tasks import framework, is_installed
from django_rmq.tasks.execution import Attempt, release, run
from django_rmq.tasks.jobs import Job
from django_rmq.tasks.priority import message_priority
from django_rmq.testing import Clock, drain, memory_broker
from django_rmq.worker import listener_registry, startup
from tests.newsletter.tasks import count, publish
from tests.support import tasks as errands
from tests.support.sends import receiving
from tests.support.servers import absent

FRAMEWORK = framework()
TaskResult, Status = FRAMEWORK.base.TaskResult, FRAMEWORK.base.TaskResultStatus
exceptions, signals, task_backends = FRAMEWORK.exceptions, FRAMEWORK.signals, FRAMEWORK.backends
InvalidTask = getattr(exceptions, "InvalidTask", None) or exceptions.InvalidTaskError

pytestmark = pytest.mark.django_db(transaction=True)

ONE_SLOT = {"SLOTS": 1, "MAX_RETRIES": 0, "BACKOFF": 0}


def tasks(backend: str = "RMQBackend", queues: Any = ("default", "mail"), **options: Any) -> dict[str, Any]:
    named = queues if isinstance(queues, str) else list(queues)
    found = {"BACKEND": f"django_rmq.tasks.{backend}", "QUEUES": named, "OPTIONS": options}
    return {"default": found}


@contextmanager
def settings(rmq: dict[str, Any] | None = None, declared: dict[str, Any] | None = None) -> Iterator[None]:
    declared = tasks(TOPIC=ONE_SLOT) if declared is None else declared
    with override_settings(RMQ={"AUTODISCOVER": None, "TOPICS": {}, **(rmq or {})}, TASKS=declared):
        yield


@pytest.fixture
def using(redis_url: str, prefix: str) -> Iterator[Callable[..., None]]:
    """Use these settings until the test ends."""
    with ExitStack() as stack:
        stack.enter_context(listener_registry.isolated())

        def use(declared: dict[str, Any] | None = None, **rmq: Any) -> None:
            stack.enter_context(settings({"REDIS": redis_url, "KEY_PREFIX": prefix, **rmq}, declared))
            stack.callback(connections.close)

        yield use


@pytest.fixture
def backend(using: Callable[..., None]) -> Any:
    using()
    return task_backends["default"]


def work() -> int:
    """Run what is due; return the number of deliveries."""
    return drain(raise_errors=False, live=True)


def ended(result: Any) -> Any:
    """Run what is due, and return the result as it is then."""
    work()
    result.refresh()
    return result


def topic(name: str = "tasks.default") -> Topic:
    return get_config().topics[name]


def looked(key: str, name: str = "tasks.default") -> Any:
    return connections.get_broker().run(inspect.describe_messages(topic(name), 0, [key.encode()]))[0]


def test_what_the_backend_supports(backend: Any) -> None:
    assert backend.supports_defer
    assert backend.supports_async_task
    assert backend.supports_get_result
    assert backend.supports_priority
    assert isinstance(backend, FRAMEWORK.backend)


@pytest.mark.parametrize("name", ["RMQBackend", "PackageBackend"])
def test_a_backend_is_called_what_settings_call_it(name: str) -> None:
    backend = import_string(f"django_rmq.tasks.{name}")
    assert f"{backend.__module__}.{backend.__qualname__}" == f"django_rmq.tasks.{name}"


@pytest.mark.parametrize("name", ["noop", "returns", "areturns"])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_task_is_enqueued_with_a_result_that_is_ready(backend: Any, name: str, is_async: bool) -> None:
    task = getattr(errands, name)
    result = async_to_sync(task.aenqueue)(1) if is_async else task.enqueue(1)
    assert isinstance(result, TaskResult)
    assert result.status == Status.READY
    assert not result.is_finished
    assert result.task == task
    assert result.enqueued_at <= timezone.now()
    assert (result.started_at, result.last_attempted_at, result.finished_at) == (None, None, None)
    assert (result.args, result.kwargs) == ([1], {})
    assert (result.attempts, result.errors, result.worker_ids) == (0, [], [])
    assert result.backend == "default"
    assert len(result.id) <= 64
    with pytest.raises(ValueError, match="Task has not finished yet"):
        assert result.return_value


def test_args_and_kwargs_are_as_json_has_them(backend: Any) -> None:
    result = errands.noop.enqueue((1, 2), key=(3,), text=b"bytes")
    assert (result.args, result.kwargs) == ([[1, 2]], {"key": [3], "text": "bytes"})
    found = errands.noop.get_result(result.id)
    assert found == result
    with pytest.raises(TypeError, match="Unsupported type"):
        errands.noop.enqueue(object())
    with pytest.raises(InvalidMessage, match="JSON keys must be str"):
        errands.noop.enqueue({1: 2})


def test_a_result_is_read_before_the_task_runs(backend: Any) -> None:
    result = errands.returns.enqueue({"a": [1]})
    assert backend.get_result(result.id) == errands.returns.get_result(result.id) == result
    assert async_to_sync(backend.aget_result)(result.id) == result
    assert async_to_sync(errands.returns.aget_result)(result.id) == result


@pytest.mark.parametrize("unknown", ["123", "0" * 32, "", "{x}", "a" * 65, "a b"])
def test_an_unknown_result_does_not_exist(backend: Any, unknown: str) -> None:
    with pytest.raises(exceptions.TaskResultDoesNotExist):
        errands.noop.get_result(unknown)
    with pytest.raises(exceptions.TaskResultDoesNotExist):
        async_to_sync(backend.aget_result)(unknown)


def test_the_result_of_another_task_is_refused(backend: Any) -> None:
    result = errands.noop.enqueue()
    with pytest.raises(exceptions.TaskResultMismatch):
        errands.returns.get_result(result.id)
    with pytest.raises(exceptions.TaskResultMismatch):
        async_to_sync(errands.returns.aget_result)(result.id)


@pytest.mark.parametrize("priority", [-101, 101, 3.1])
def test_a_priority_out_of_bounds_is_refused(backend: Any, priority: Any) -> None:
    with pytest.raises(InvalidTask, match="priority must be a whole number between -100 and 100"):
        errands.noop.using(priority=priority)


def test_what_is_no_function_of_a_module_is_refused(backend: Any) -> None:
    def inner() -> None:
        pass

    for function in (inner, lambda: True, len):
        with pytest.raises(InvalidTask, match="must be defined at a module level"):
            backend.validate_task(_as_task(function))


def _as_task(function: Any) -> Any:
    task = errands.noop.using()
    object.__setattr__(task, "func", function)
    return task


def test_an_unknown_queue_a_naive_time_and_a_wrong_context_are_refused(backend: Any) -> None:
    with pytest.raises(InvalidTask, match="Queue 'unknown' is not valid"):
        errands.noop.using(queue_name="unknown")
    with pytest.raises(InvalidTask, match="run_after must be an aware datetime"):
        errands.noop.using(run_after=datetime(2100, 1, 1))  # noqa: DTZ001 - on purpose
    without = _as_task(errands.plain)
    object.__setattr__(without, "takes_context", True)
    with pytest.raises(InvalidTask, match="does not have a first argument of 'context'"):
        backend.validate_task(without)
    with pytest.raises(exceptions.InvalidTaskError if FRAMEWORK.package == "django_tasks" else InvalidTask):
        backend.enqueue(without, [], {})


def test_a_backend_is_checked_without_problems(backend: Any) -> None:
    assert list(backend.check()) == []


def test_a_task_runs_and_its_result_says_so(backend: Any) -> None:
    result = errands.returns.enqueue({"a": [1, None, "é"]})
    before = timezone.now()
    assert work() == 1
    assert result.status == Status.READY, "as it was"
    result.refresh()
    assert result.status == Status.SUCCESSFUL
    assert result.is_finished
    assert result.return_value == {"a": [1, None, "é"]}
    assert result.enqueued_at <= before <= result.started_at <= result.finished_at
    assert result.last_attempted_at == result.started_at
    assert (result.attempts, result.errors) == (1, [])
    assert result == errands.returns.get_result(result.id)
    async_to_sync(result.arefresh)()
    assert work() == 0, "it runs once"


@pytest.mark.parametrize("queue", ["default", "mail"])
@pytest.mark.parametrize("task", [errands.returns, errands.areturns, errands.prior])
def test_tasks_of_each_kind_and_queue_run(backend: Any, task: Any, queue: str) -> None:
    result = task.using(queue_name=queue).enqueue(42)
    work()
    assert task.get_result(result.id).return_value == 42


def test_functions_and_coroutine_functions_have_topics_of_their_own(backend: Any) -> None:
    names = ["tasks.default", "tasks-async.default", "tasks.mail", "tasks-async.mail", "tasks-later"]
    assert sorted(get_config().topics) == sorted(names)
    one, other = errands.returns.enqueue(1), errands.areturns.enqueue(1)
    assert looked(one.id).store is not None
    assert looked(other.id, "tasks-async.default").store is not None
    listener_registry.autodiscover()
    listeners = listener_registry.listeners()
    assert {name for name, each in listeners.items() if each.coroutine} == {n for n in names if "async" in n}


@pytest.mark.parametrize(
    ("task", "path", "text"),
    [
        (errands.fails, "builtins.ValueError", "this task failed"),
        (errands.afails, "builtins.ValueError", "this task failed"),
        (errands.fails_oddly, "tests.support.tasks.Odd", "this task failed oddly"),
        (errands.exits, "builtins.SystemExit", "SystemExit: 1"),
        (errands.aexits, "builtins.SystemExit", "SystemExit: 1"),
        (errands.rejects, "django_rmq.exceptions.Reject", "no"),
        (errands.returns_what_json_cannot_hold, "builtins.TypeError", "Unsupported type"),
    ],
)
def test_a_task_that_fails_says_why(backend: Any, task: Any, path: str, text: str) -> None:
    result = ended(task.enqueue())
    assert result.status == Status.FAILED
    assert result.is_finished
    assert result.finished_at >= result.started_at
    with pytest.raises(ValueError, match="Task failed"):
        assert result.return_value
    (error,) = result.errors
    assert error.exception_class_path == path
    assert issubclass(error.exception_class, BaseException)
    assert text in error.traceback
    assert "Traceback" in error.traceback
    name = "tasks-async.default" if task in (errands.afails, errands.aexits) else "tasks.default"
    assert looked(result.id, name).dead is not None


def test_a_value_that_is_no_json_number_fails_the_task(backend: Any) -> None:
    result = ended(errands.attempt.using().enqueue())
    assert result.return_value == 1
    infinite = errands.returns.enqueue("x")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(errands.returns), "call", lambda self, *args: float("nan"))
        work()
    infinite.refresh()
    assert infinite.status == Status.FAILED
    assert "JSON" in infinite.errors[0].traceback


def test_a_task_gets_its_context(backend: Any) -> None:
    one, other = errands.own_id.enqueue(), errands.aattempt.enqueue()
    work()
    one.refresh()
    other.refresh()
    assert one.return_value == one.id
    assert other.return_value == 1


def test_a_higher_priority_runs_first_and_of_equal_ones_what_waits_longer(backend: Any) -> None:
    errands.ran.clear()
    start = timezone.now() - timedelta(days=2000)
    chosen = [(0, 3), (100, 1), (-100, 0), (0, 1), (100, 4), (0, 2), (1, 9), (-99, 0)]
    with pytest.MonkeyPatch.context() as patch:
        for priority, minutes in chosen:
            now = start + timedelta(days=2000, minutes=minutes)
            patch.setattr("django_rmq.tasks.backend.timezone.now", lambda now=now: now)
            errands.remembers.using(priority=priority).enqueue([priority, minutes])
    work()
    assert errands.ran == [[100, 1], [100, 4], [1, 9], [0, 1], [0, 2], [0, 3], [-99, 0], [-100, 0]]


def test_every_priority_and_time_has_a_place_that_topics_accept() -> None:
    days = [datetime(year, 1, 1, tzinfo=UTC) for year in (1990, 2026, 2030, 2047, 2100)]
    jobs = [
        Job("a.b", [], {}, "default", "default", priority, day, None, in_loop=False)
        for priority in (-100, 0, 100)
        for day in reversed(days)
    ]
    places = [message_priority(job) for job in jobs]
    assert places == sorted(places)
    assert min(places) > 1000
    assert max(places) < 1 << 43


def test_a_task_waits_for_its_time_and_then_runs_by_its_priority() -> None:
    # Whether a task is put off is decided by the time of the machine.
    clock = Clock(4_000_000_000_000)
    with settings({"BROKER": "memory"}), memory_broker(clock), listener_registry.isolated():
        errands.ran.clear()
        soon = datetime.fromtimestamp(clock() / 1e6, UTC) + timedelta(hours=1)
        low = errands.remembers.using(run_after=soon, priority=-5).enqueue("low")
        high = errands.remembers.using(run_after=soon, priority=5).enqueue("high")
        early = errands.remembers.using(run_after=soon - timedelta(hours=2)).enqueue("past")
        work()
        assert errands.ran == ["past"]
        for result in (low, high):
            found = errands.remembers.get_result(result.id)
            assert (found.status, found.task.run_after) == (Status.READY, soon)
            assert found == result
        clock.advance(59 * 60 + 59)
        assert work() == 0
        clock.advance(2)
        # First all whose time has come are released, and then they run.
        assert drain("tasks-later") == 2
        assert errands.remembers.get_result(low.id).status == Status.READY
        work()
        assert errands.ran == ["past", "high", "low"]
        high.refresh()
        early.refresh()
        assert (high.status, early.status) == (Status.SUCCESSFUL, Status.SUCCESSFUL)
        assert (high.task.priority, high.task.run_after) == (5, soon)


def test_a_task_whose_time_comes_while_it_is_enqueued_runs(backend: Any) -> None:
    before = timezone.now() - timedelta(hours=1)
    with pytest.MonkeyPatch.context() as patch:
        clock = iter([before - timedelta(seconds=1), timezone.now()])
        patch.setattr("django_rmq.tasks.backend.timezone.now", lambda: next(clock))
        result = errands.returns.using(run_after=before).enqueue(1)
    assert looked(result.id).store is not None
    ended(result)
    assert result.return_value == 1


def test_a_time_that_no_message_can_have_is_refused(backend: Any) -> None:
    with pytest.raises(InvalidMessage, match="2100"):
        errands.noop.using(run_after=datetime(2200, 1, 1, tzinfo=UTC)).enqueue()


def test_a_task_that_was_released_twice_runs_once(backend: Any) -> None:
    errands.ran.clear()
    result = errands.remembers.using(run_after=timezone.now() + timedelta(milliseconds=300)).enqueue("x")
    broker = connections.get_broker()
    later = topic("tasks-later")
    slot = slot_of(result.id.encode(), later.slots)
    deadline = timezone.now() + timedelta(seconds=10)
    while (prepared := broker.run(fetch.prepare(later, slot, "dying", None, 1))).status != "ok":
        assert timezone.now() < deadline
    (delivery,) = prepared.deliveries
    release(Message(later, slot, prepared.receipt, delivery))
    assert drain("tasks.default", live=True) == 1
    # Its worker has died before it could commit.
    again = delivery._replace(retries_left=delivery.retries_left - 1)
    release(Message(later, slot, prepared.receipt, again))
    assert drain("tasks.default", live=True) == 0
    assert errands.ran == ["x"]


def test_a_full_queue_holds_back_what_is_due(using: Callable[..., None]) -> None:
    using(tasks(TOPIC={**ONE_SLOT, "MAX_BACKLOG": 1}))
    errands.noop.enqueue()
    with pytest.raises(TopicFull):
        errands.noop.enqueue()
    result = errands.noop.using(run_after=timezone.now() + timedelta(milliseconds=300)).enqueue()
    deadline = timezone.now() + timedelta(seconds=10)
    while drain("tasks-later", live=True) == 0:
        assert timezone.now() < deadline
    assert looked(result.id, "tasks-later").retry is not None
    assert errands.noop.get_result(result.id).status == Status.READY


def test_a_task_that_fails_is_tried_again_and_its_result_tells_each_attempt(
    using: Callable[..., None],
) -> None:
    using(tasks(TOPIC={**ONE_SLOT, "MAX_RETRIES": 3, "BACKOFF": 3600}))
    for task, name in ((errands.attempt, "tasks.default"), (errands.aattempt, "tasks-async.default")):
        result = task.enqueue(until=3)
        work()
        found = task.get_result(result.id)
        assert found.status == Status.READY, "to be executed again"
        assert (found.attempts, len(found.errors), found.finished_at) == (1, 1, None)
        assert "attempt 1" in found.errors[0].traceback
        for _ in range(2):
            _wake(result.id, name)
            work()
        found.refresh()
        assert found.status == Status.SUCCESSFUL
        assert (found.return_value, found.attempts) == (3, 3)
        assert len(found.worker_ids) == 3
        assert "attempt 1" in found.errors[0].traceback and "attempt 2" in found.errors[1].traceback
        assert found.started_at < found.last_attempted_at <= found.finished_at


def _wake(key: str, name: str) -> None:
    """Let what rests be tried now."""
    broker: Any = connections.get_broker()
    rest = broker.run(inspect.describe_messages(topic(name), 0, [key.encode()]))[0].retry
    assert rest is not None
    broker.client.zadd(slot_keys(broker.prefix, name, 0).retry, {key: 1000 + rest % 1})


def test_after_the_last_attempt_the_task_has_failed_and_is_in_dead(using: Callable[..., None]) -> None:
    using(tasks(TOPIC={**ONE_SLOT, "MAX_RETRIES": 2}))
    result = errands.fails.enqueue()
    for _ in range(3):
        work()
    found = errands.fails.get_result(result.id)
    assert (found.status, found.attempts, len(found.errors)) == (Status.FAILED, 3, 3)
    assert looked(result.id).dead is not None


def test_a_queue_may_have_retries_of_its_own(using: Callable[..., None]) -> None:
    using(tasks(TOPIC=ONE_SLOT, QUEUES={"mail": {"MAX_RETRIES": 7, "TIMEOUT": 99, "SLOTS": 4}}))
    topics = get_config().topics
    retries = {name: found.max_retries for name, found in topics.items()}
    of_mail = {"tasks.mail": 7, "tasks-async.mail": 7}
    assert retries == {"tasks.default": 0, "tasks-async.default": 0, **of_mail, "tasks-later": 999}
    assert topics["tasks.mail"].timeout == 99
    assert topics["tasks.mail"].slots == 4
    assert not topics["tasks.mail"].serial


def test_a_task_asks_for_another_attempt_without_an_error(using: Callable[..., None], tmp_path: Any) -> None:
    using(tasks(TOPIC={**ONE_SLOT, "MAX_RETRIES": 1}))
    result = errands.waits_once.enqueue(str(tmp_path / "seen"))
    work()
    ended(result)
    assert (result.return_value, result.attempts, result.errors) == ("done", 2, [])


def test_a_task_that_cannot_be_found_fails(backend: Any) -> None:
    result = errands.returns.enqueue(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(errands, "returns")
        work()
    result.refresh()
    assert result.status == Status.FAILED
    assert result.errors[0].exception_class_path == "django_rmq.exceptions.UnknownTask"


def test_what_is_no_task_is_never_called(backend: Any) -> None:
    result = errands.returns.enqueue(1)
    called: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(errands, "returns", called.append)
        work()
    result.refresh()
    assert (called, result.status) == ([], Status.FAILED)
    assert "not a task" in result.errors[0].traceback


def test_a_task_in_the_hands_of_a_worker_is_ready_until_it_begins(backend: Any) -> None:
    result = errands.returns.enqueue(1)
    broker = connections.get_broker()
    prepared = broker.run(fetch.prepare(topic(), 0, "a worker", None, 1))
    assert prepared.status == "ok"
    assert errands.returns.get_result(result.id).status == Status.READY
    attempt = Attempt(Message(topic(), 0, prepared.receipt, prepared.deliveries[0]))
    attempt.begin()
    broker.run(attempt.start())
    found = errands.returns.get_result(result.id)
    assert (found.status, found.attempts) == (Status.RUNNING, 1)
    assert found.started_at is not None
    with pytest.raises(ValueError, match="Task has not finished yet"):
        assert found.return_value
    broker.run(attempt.succeed(1))
    assert errands.returns.get_result(result.id).status == Status.SUCCESSFUL


def test_a_task_that_was_removed_from_its_queue_has_failed(using: Callable[..., None]) -> None:
    using(tasks(TOPIC={**ONE_SLOT, "MAX_RETRIES": 3, "BACKOFF": 3600}))
    unborn, tried = errands.noop.enqueue(), errands.fails.enqueue()
    assert remove_message("tasks.default", key=unborn.id) == "waiting"
    with pytest.raises(exceptions.TaskResultDoesNotExist):
        errands.noop.get_result(unborn.id)
    work()
    assert remove_message("tasks.default", key=tried.id) == "resting"
    tried.refresh()
    assert tried.status == Status.FAILED
    assert tried.errors[-1].exception_class_path == "django_rmq.exceptions.MessageGone"
    assert tried.errors[-1].exception_class.__name__ == "MessageGone"


def test_a_task_that_succeeded_but_was_not_committed_does_not_run_again(using: Callable[..., None]) -> None:
    using(tasks(TOPIC={**ONE_SLOT, "MAX_RETRIES": 3}))
    errands.ran.clear()
    errands.remembers.enqueue("x")
    prepared = connections.get_broker().run(fetch.prepare(topic(), 0, "a worker", None, 1))
    (delivery,) = prepared.deliveries
    end = run(Message(topic(), 0, prepared.receipt, delivery))
    assert end is not None
    end.wait()
    assert run(Message(topic(), 0, prepared.receipt + 2, delivery._replace(retries_left=2))) is None
    assert errands.ran == ["x"]


def test_an_attempt_of_which_nothing_is_known_is_counted(using: Callable[..., None]) -> None:
    using(tasks(TOPIC={**ONE_SLOT, "MAX_RETRIES": 3}))
    result = errands.attempt.enqueue()
    prepared = connections.get_broker().run(fetch.prepare(topic(), 0, "a worker", None, 1))
    end = run(Message(topic(), 0, prepared.receipt, prepared.deliveries[0]._replace(retries_left=1)))
    assert end is not None
    end.wait()
    result.refresh()
    assert (result.return_value, result.worker_ids) == (3, ["lost", "lost", "-"])


def test_results_are_kept_for_their_time(using: Callable[..., None]) -> None:
    using(tasks(TOPIC=ONE_SLOT, RESULT_RETENTION=5))
    result = errands.returns.enqueue(1)
    work()
    kept = connections.get_broker().run(stored_results.result(result.id))
    assert kept is not None
    broker: Any = connections.get_broker()
    left = broker.client.pttl(f"result_{{{broker.prefix}rmq:result:{result.id}}}")
    assert 4_000 < left <= 5_000


def test_a_task_is_enqueued_at_the_commit(backend: Any) -> None:
    heard: list[Any] = []
    with receiving(lambda task_result, **_: heard.append(task_result.id), signals.task_enqueued):
        with transaction.atomic():
            result = errands.noop.enqueue()
            with pytest.raises(exceptions.TaskResultDoesNotExist):
                errands.noop.get_result(result.id)
            assert heard == []
        assert errands.noop.get_result(result.id).status == Status.READY
        assert heard == [result.id]
        with transaction.atomic():
            lost = errands.noop.enqueue()
            transaction.set_rollback(True)
        with pytest.raises(exceptions.TaskResultDoesNotExist):
            errands.noop.get_result(lost.id)
        assert heard == [result.id]


def test_a_backend_may_enqueue_at_once(using: Callable[..., None]) -> None:
    using(tasks(TOPIC=ONE_SLOT, ON_COMMIT=False))
    with transaction.atomic():
        result = errands.noop.enqueue()
        assert errands.noop.get_result(result.id).status == Status.READY
        transaction.set_rollback(True)


def test_with_the_outbox_a_task_is_a_row_of_its_transaction(using: Callable[..., None]) -> None:
    using(OUTBOX=True)
    with transaction.atomic():
        Group.objects.create(name="with it")
        now = errands.returns.enqueue(1)
        later = errands.returns.using(run_after=timezone.now() + timedelta(days=1)).enqueue(1)
        topics = OutboxMessage.objects.values_list("topic", flat=True)
        assert sorted(topics) == ["tasks-later", "tasks.default"]
    assert not OutboxMessage.objects.exists()
    assert errands.returns.get_result(now.id).status == Status.READY
    assert errands.returns.get_result(later.id).status == Status.READY


@pytest.mark.parametrize("name", ["returns", "areturns"])
def test_signals_tell_the_life_of_a_task(backend: Any, name: str) -> None:
    heard: list[Any] = []

    def note(signal: Any, sender: Any, task_result: Any, **_: Any) -> None:
        heard.append((signal, sender, task_result.id, task_result.status))

    with receiving(note, signals.task_enqueued, signals.task_started, signals.task_finished):
        result = getattr(errands, name).enqueue(1)
        work()
    kind = type(backend)
    assert heard == [
        (signals.task_enqueued, kind, result.id, Status.READY),
        (signals.task_started, kind, result.id, Status.RUNNING),
        (signals.task_finished, kind, result.id, Status.SUCCESSFUL),
    ]


def test_a_task_is_finished_once_however_often_it_was_tried(
    using: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    using(tasks(TOPIC={**ONE_SLOT, "MAX_RETRIES": 2}))
    heard: list[Any] = []
    finished = receiving(lambda task_result, **_: heard.append(task_result), signals.task_finished)
    with finished, caplog.at_level(logging.INFO):
        errands.fails.enqueue()
        for _ in range(3):
            work()
    assert [result.status for result in heard] == [Status.FAILED]
    (line,) = [each for each in caplog.records if "state=FAILED" in each.getMessage()]
    assert line.levelname == "ERROR"


def test_a_receiver_that_fails_does_not_fail_the_task(backend: Any, caplog: pytest.LogCaptureFixture) -> None:
    def fail(**_: Any) -> None:
        raise ValueError("a receiver")

    with receiving(fail, signals.task_started, signals.task_finished):
        result = errands.returns.enqueue(1)
        work()
    result.refresh()
    assert result.return_value == 1
    assert "a receiver" in caplog.text


def test_no_queue_named_means_one_topic_for_all(using: Callable[..., None]) -> None:
    using(tasks(queues=(), TOPIC=ONE_SLOT))
    assert sorted(get_config().topics) == ["tasks", "tasks-async", "tasks-later"]
    result = ended(errands.returns.using(queue_name="whatever it is").enqueue(5))
    assert (result.return_value, result.task.queue_name) == (5, "whatever it is")


def test_two_backends_share_nothing(using: Callable[..., None]) -> None:
    using({**tasks(TOPIC=ONE_SLOT), "other": tasks(TOPIC=ONE_SLOT)["default"]})
    result = errands.returns.using(backend="other").enqueue(5)
    assert looked(result.id, "tasks-other.default").store is not None
    with pytest.raises(exceptions.TaskResultDoesNotExist):
        errands.returns.get_result(result.id)
    ended(result)
    assert (result.return_value, result.backend) == (5, "other")


@pytest.mark.parametrize(
    ("declared", "number", "text"),
    [
        (tasks(RESULT_RETENTION=0), "E003", "RESULT_RETENTION"),
        (tasks(UNKNOWN=0), "E002", "UNKNOWN"),
        (tasks(TOPIC={"TYPE": "fifo"}), "E002", "TYPE"),
        (tasks(TOPIC={"MAX_RETRIES": -1}), "E003", "MAX_RETRIES"),
        (tasks(QUEUES={"nobody": {}}), "E088", "nobody"),
        (tasks(queues=["a queue"]), "E086", "a queue"),
        (tasks(queues=["declared"]), "E086", "tasks.declared"),
        (tasks(queues="default"), "E086", "QUEUES"),
        (tasks(DATABASE="nowhere"), "E087", "nowhere"),
        (tasks(PREFIX="a b"), "E003", "PREFIX"),
    ],
)
def test_mistakes_in_the_settings_are_reported(declared: Any, number: str, text: str) -> None:
    topics = {"tasks.declared": {"TYPE": "fifo", "LISTENER": False}}
    with settings({"BROKER": "memory", "TOPICS": topics}, declared), listener_registry.isolated():
        found = [each for each in checks.run_checks(tags=["rmq"]) if each.id != "django_rmq.W001"]
    assert {each.id for each in found} == {f"django_rmq.{number}"}
    assert any(text in each.msg for each in found)


def test_a_backend_without_a_framework_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("django_rmq.checks.system_checks.has_framework", lambda package: False)
    with settings({"BROKER": "memory"}), listener_registry.isolated():
        (found,) = checks.run_checks(tags=["rmq"])
    assert found.id == "django_rmq.E085"
    assert "django-redis-rmq[tasks]" in str(found.hint)


def test_other_backends_are_none_of_our_business() -> None:
    other = {"default": {"BACKEND": "somewhere.else.Backend", "QUEUES": 3}}
    with settings({"BROKER": "memory"}, other), listener_registry.isolated():
        assert get_config().topics == {}
        listener_registry.autodiscover()
        assert listener_registry.listeners() == {}


def test_a_subclass_of_the_backend_is_refused_when_it_is_used(using: Callable[..., None]) -> None:
    using({"default": {"BACKEND": "tests.support.tasks.Backend"}})
    with pytest.raises(ConfigurationError, match="and not a subclass"):
        errands.noop.enqueue()


def test_workers_find_the_topics_of_tasks_with_nothing_else_declared(using: Callable[..., None]) -> None:
    using()
    names = {found.name for found in startup.chosen_topics()}
    assert names == {"tasks.default", "tasks-async.default", "tasks.mail", "tasks-async.mail", "tasks-later"}
    assert [found.name for found in startup.chosen_topics(["tasks.mail"])] == ["tasks.mail"]
    with override_settings(TASKS={}), pytest.raises(ConfigurationError, match="nothing to consume"):
        startup.chosen_topics()


def test_an_app_that_knows_nothing_of_rmq_works_unchanged(backend: Any) -> None:
    published = publish.using(priority=20).enqueue(7, addresses=["a@example.com", "b@example.com"])
    work()
    published.refresh()
    assert sorted(sent.to[0] for sent in mail.outbox) == ["a@example.com", "b@example.com"]
    counted: Any = count.enqueue(published.return_value)
    work()
    counted.refresh()
    told: object = counted.return_value
    assert told == {"sent": 2, "of": 2}


def test_the_package_has_a_backend_on_every_version_of_django(using: Callable[..., None]) -> None:
    if not is_installed("django_tasks"):
        absent("django-tasks is not installed")
    using(tasks("PackageBackend", TOPIC=ONE_SLOT))
    import django_tasks

    found = django_tasks.task_backends["default"]
    task = django_tasks.task()(errands.plain)
    assert type(task).__module__ == "django_tasks.base"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(errands, "plain", task)
        result = task.enqueue()
        work()
        assert found.get_result(result.id).status == "SUCCESSFUL"
        assert type(found.get_result(result.id)).__module__ == "django_tasks.base"


def test_one_backend_takes_the_tasks_of_both_packages(backend: Any) -> None:
    if not is_installed("django_tasks"):
        absent("django-tasks is not installed")
    import django_tasks

    for package in {django_tasks, FRAMEWORK.base}:
        task = package.task()(errands.plain)
        assert type(task).__module__ == f"{FRAMEWORK.package}.base"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(errands, "plain", task)
            result = task.enqueue()
            work()
            assert backend.get_result(result.id).status == "SUCCESSFUL"
