"""How tasks end whose messages were cancelled, removed, moved to other slots, or ended by Redis."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from typing import Any

import pytest
from django.test import override_settings
from django.utils import timezone

from django_rmq import cancel_message, connections, send_message, tasks
from django_rmq.conf import get_config
from django_rmq.core import reslotting
from django_rmq.core.clock import uptime
from django_rmq.core.commands import ack, fetch, inspect, operate
from django_rmq.core.commands.ack import BrokerDeliveryControl
from django_rmq.core.consumer.batch import Batch
from django_rmq.core.consumer.batch_run import NO_HOOKS, call_all
from django_rmq.core.consumer.executor_pool import ExecutorThread
from django_rmq.core.consumer.failures import failure_of
from django_rmq.core.consumer.slots import ConsumedSlot
from django_rmq.core.model.delivered_message import Message
from django_rmq.core.model.replies import Failure
from django_rmq.core.producer.placement import slot_of
from django_rmq.tasks import execution, record_writer, task_status
from django_rmq.tasks.execution import Attempt
from django_rmq.testing import drain
from django_rmq.worker import listener_registry
from tests.support import tasks as errands
from tests.support.sends import receiving
from tests.support.servers import RedisServer, ask

FRAMEWORK = tasks.framework()
Status, signals = FRAMEWORK.base.TaskResultStatus, FRAMEWORK.signals

pytestmark = pytest.mark.django_db(transaction=True)

Use = Callable[..., None]


@pytest.fixture
def using(redis_url: str, prefix: str) -> Iterator[Use]:
    """Use these options of the topics of tasks until the test ends."""
    with ExitStack() as stack:
        stack.enter_context(listener_registry.isolated())

        def use(rmq: dict[str, Any] | None = None, **topic: Any) -> None:
            options = {"TOPIC": {"SLOTS": 1, "MAX_RETRIES": 3, **topic}}
            declared = {"default": {"BACKEND": "django_rmq.tasks.RMQBackend", "OPTIONS": options}}
            where = {"REDIS": redis_url, "KEY_PREFIX": prefix}
            settings = {"AUTODISCOVER": None, "TOPICS": {}, **where, **(rmq or {})}
            stack.enter_context(override_settings(RMQ=settings, TASKS=declared))
            stack.callback(connections.close)

        yield use


@pytest.fixture
def told() -> Iterator[list[Any]]:
    """The status of each task of which `task_finished` tells."""
    found: list[Any] = []

    with receiving(lambda task_result, **_: found.append(task_result.status), signals.task_finished):
        yield found


def take(key: str, name: str = "tasks.default") -> Message:
    """Take the task as a worker does."""
    topic, broker = get_config().topics[name], connections.get_broker()
    slot = slot_of(key.encode(), topic.slots)
    prepared = broker.run(fetch.prepare(topic, slot, "a worker", None, 1))
    return Message(topic, slot, prepared.receipt, prepared.deliveries[0], BrokerDeliveryControl(broker))


def run_to_end(message: Message) -> None:
    """Run a task, and wait until its end is recorded."""
    end = execution.run(message)
    assert end is not None
    end.wait()


def fail(message: Message, error: BaseException) -> None:
    """End the delivery as a worker does whose listener has raised ``error``."""
    failure = failure_of(message, error)
    connections.get_broker().run(ack.rollback(message.topic, message.slot, message.receipt, [failure]))


@pytest.mark.parametrize("attempts_before", [0, 1])
def test_a_task_that_dies_while_its_result_is_read_has_all_its_attempts(
    using: Use, monkeypatch: pytest.MonkeyPatch, attempts_before: int
) -> None:
    using(MAX_RETRIES=1, BACKOFF=0)
    result = errands.fails.enqueue()

    def run_once() -> None:
        message = take(result.id)
        with pytest.raises(ValueError, match="this task failed") as raised:
            execution.run(message)
        fail(message, raised.value)

    search = task_status.describe_task

    def describe_task(*given: Any) -> Any:
        """Look at the message only after both attempts have failed; what is kept of them was read before."""
        monkeypatch.undo()
        for _ in range(2 - attempts_before):
            run_once()
        return search(*given)

    for _ in range(attempts_before):
        run_once()
    monkeypatch.setattr(task_status, "describe_task", describe_task)
    result.refresh()
    assert (result.status, result.attempts, len(result.errors)) == (Status.FAILED, 2, 2)
    assert {error.exception_class for error in result.errors} == {ValueError}


@pytest.mark.parametrize("worker_heard", [True, False])
def test_a_task_that_fails_after_it_was_cancelled_has_ended(
    using: Use, told: list[Any], caplog: pytest.LogCaptureFixture, worker_heard: bool
) -> None:
    caplog.set_level(logging.INFO)
    using()
    result = errands.fails.enqueue()
    message = take(result.id)
    assert cancel_message("tasks.default", key=result.id) == "running"
    if worker_heard:
        message.extend()
    with pytest.raises(ValueError, match="this task failed") as raised:
        execution.run(message)
    fail(message, raised.value)
    result.refresh()
    assert result.status == Status.FAILED and result.finished_at is not None
    if worker_heard:
        (error,) = result.errors
        assert (error.exception_class.__name__, told) == ("Cancelled", [Status.FAILED])
        assert "this task failed" in error.traceback
        (line,) = [each for each in caplog.records if getattr(each, "rmq_event", "") == "cancelled"]
        assert vars(line)["rmq_task"] == "tests.support.tasks.fails"
        assert f"(task tests.support.tasks.fails, result {result.id})" in line.getMessage()
    else:
        assert result.finished_at == result.last_attempted_at
        assert result.errors[-1].exception_class.__name__ == "MessageGone"


def test_a_coroutine_whose_signals_the_project_does_not_hear_needs_no_thread_for_them(
    using: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    using()
    in_thread: list[str] = []

    def sent(name: str, **_: Any) -> Any:
        in_thread.append(name)
        return asyncio.sleep(0)

    def run_one() -> list[str]:
        result = errands.areturns.enqueue(1)
        in_thread.clear()
        asyncio.run(execution.arun(take(result.id, "tasks-async.default")))
        result.refresh()
        assert result.status == Status.SUCCESSFUL
        return in_thread

    def heard(**_: Any) -> None:
        """A receiver of the project."""

    for name in ("task_started", "task_finished"):
        monkeypatch.setattr(getattr(signals, name), "asend_robust", partial(sent, name))
    assert run_one() == []
    with receiving(heard, signals.task_started):
        assert run_one() == ["task_started"]


@pytest.mark.parametrize(
    ("why", "status", "name"),
    [("cancelled", Status.FAILED, "Cancelled"), ("overran", Status.READY, "TimeoutError")],
)
def test_a_coroutine_is_stopped_and_its_result_says_why(
    using: Use, told: list[Any], tmp_path: Any, why: str, status: Any, name: str
) -> None:
    using()
    result = errands.gathers.enqueue(str(tmp_path), 2)
    message = take(result.id, "tasks-async.default")

    async def cancel() -> BaseException:
        call = asyncio.ensure_future(execution.arun(message))
        for _ in range(500):
            if str(tmp_path) in errands.together:
                break
            await asyncio.sleep(0.01)
        message.stopped = why
        call.cancel()
        (error,) = await asyncio.gather(call, return_exceptions=True)
        assert isinstance(error, asyncio.CancelledError)
        return error

    fail(message, asyncio.run(cancel()))
    result.refresh()
    assert (result.status, result.finished_at is not None) == (status, result.is_finished)
    assert told == [status] * result.is_finished
    assert [each.exception_class.__name__ for each in result.errors] == [name]


@pytest.mark.parametrize("stops", [1, 2])
@pytest.mark.parametrize("moment", ["begin", "end"])
def test_a_coroutine_that_is_stopped_beside_its_function_leaves_a_whole_record(
    using: Use, told: list[Any], monkeypatch: pytest.MonkeyPatch, moment: str, stops: int
) -> None:
    using()
    result = errands.areturns.enqueue(1)
    message = take(result.id, "tasks-async.default")
    slowed: tuple[Any, str] = {"begin": (Attempt, "_earlier"), "end": (execution, "_akeep")}[moment]
    real, reached = getattr(*slowed), False
    loop: Any = None
    call: Any = None

    def slow(*arguments: Any) -> Any:
        nonlocal reached
        reached = True
        message.stopped = "cancelled"
        loop.call_soon_threadsafe(stop, stops)
        return real(*arguments)

    def stop(times: int) -> None:
        call.cancel()
        if times > 1:
            # The task is awake before that, and Redis has not answered yet.
            loop.call_soon(stop, times - 1)

    async def run() -> None:
        nonlocal loop, call
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(*slowed, slow)
        call = asyncio.ensure_future(execution.arun(message))
        await asyncio.wait([call])

    asyncio.run(run())
    result.refresh()
    assert reached
    if moment == "begin":
        assert call.cancelled()
        assert (result.status, told) == (Status.FAILED, [Status.FAILED])
    else:
        assert call.done()
        assert not call.cancelled()
        assert (result.status, result.return_value, told) == (Status.SUCCESSFUL, 1, [Status.SUCCESSFUL])


@pytest.mark.parametrize("task", [errands.exits, errands.aexits])
def test_a_task_that_exits_has_failed_and_ends_nothing_else(using: Use, told: list[Any], task: Any) -> None:
    using(MAX_RETRIES=0)
    result, other = task.enqueue(), errands.returns.enqueue(1)
    assert drain(raise_errors=False, live=True) == 2
    result.refresh()
    other.refresh()
    assert (result.status, other.return_value) == (Status.FAILED, 1)
    assert sorted(told) == [Status.FAILED, Status.SUCCESSFUL]
    assert result.errors[0].exception_class is SystemExit


def test_a_task_that_exits_is_tried_again(using: Use, tmp_path: Any) -> None:
    using(BACKOFF=0)
    result = errands.exits_unless.enqueue(str(tmp_path / "seen"))
    drain(raise_errors=False, live=True)
    result.refresh()
    assert (result.return_value, result.attempts) == ("done", 2)
    assert [error.exception_class for error in result.errors] == [SystemExit]


@pytest.mark.parametrize("raise_errors", [True, False])
def test_ctrl_c_ends_a_drain_although_the_task_has_it(using: Use, raise_errors: bool) -> None:
    using(MAX_RETRIES=3, BACKOFF=600)
    result = errands.interrupts.enqueue()
    with pytest.raises(KeyboardInterrupt):
        drain(raise_errors=raise_errors, live=True)
    result.refresh()
    assert (result.status, result.attempts) == (Status.READY, 1)


@pytest.mark.parametrize("name", ["task_started", "task_finished"])
def test_a_receiver_that_exits_ends_nothing(using: Use, caplog: pytest.LogCaptureFixture, name: str) -> None:
    def leave(**_: Any) -> None:
        raise SystemExit(3)

    using()
    with receiving(leave, getattr(signals, name)):
        result = errands.returns.enqueue(1)
        drain(live=True)
    result.refresh()
    assert result.return_value == 1
    assert "A receiver of a signal of tasks asked the process to exit" in caplog.text


LOGGERS = ("django_rmq.consumer", FRAMEWORK.package)


def lines(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[Any]:
    return [each for each in caplog.records if each.levelno >= level and each.name in LOGGERS]


@pytest.mark.parametrize("task", [errands.fails, errands.afails])
def test_each_line_about_a_failed_task_names_it_and_its_result(
    using: Use, caplog: pytest.LogCaptureFixture, task: Any
) -> None:
    using(MAX_RETRIES=1, BACKOFF=0)
    result = task.enqueue("the text of the error")
    with caplog.at_level(logging.INFO):
        drain(raise_errors=False, live=True)
    retried, finished, dead = lines(caplog)
    assert (retried.levelname, finished.levelname, dead.levelname) == ("WARNING", "ERROR", "ERROR")
    topic = "tasks.default" if task is errands.fails else "tasks-async.default"
    for line in lines(caplog, logging.INFO):
        assert (line.rmq_task, line.rmq_result) == (task.module_path, result.id)
        assert (line.rmq_topic, line.rmq_slot) == (topic, 0)
        assert line.rmq_message.startswith("0~")
        assert task.module_path in line.getMessage()
        assert result.id in line.getMessage()
    assert f"of topic {topic} (task {task.module_path}, result {result.id}) failed" in dead.getMessage()
    # The first of a kind has the traceback, once.
    assert [bool(line.exc_info) for line in (retried, finished, dead)] == [True, False, True]


def test_dead_tasks_are_logged_as_seldom_as_dead_messages(
    using: Use, caplog: pytest.LogCaptureFixture
) -> None:
    using(MAX_RETRIES=0)
    ids = {errands.fails.enqueue().id for _ in range(4)}
    drain(raise_errors=False, live=True)
    assert [line.name for line in lines(caplog, logging.ERROR)] == [LOGGERS[1], LOGGERS[0]]
    (named,) = {line.rmq_result for line in lines(caplog)}
    assert named in ids


def redact(topic: str, body: Any, context: Any) -> str:
    return "hidden"


@pytest.mark.parametrize("task", [errands.fails, errands.afails])
@pytest.mark.parametrize("retries", [0, 1])
def test_the_error_of_a_task_of_a_redacted_queue_is_in_no_line(
    using: Use, caplog: pytest.LogCaptureFixture, task: Any, retries: int
) -> None:
    redacted = dict.fromkeys(("tasks.default", "tasks-async.default"), f"{__name__}.redact")
    using({"ADMIN": {"FORMATTER": redacted}}, MAX_RETRIES=retries, BACKOFF=0)
    result = task.enqueue("4111111111111111")
    with caplog.at_level(logging.DEBUG):
        drain(raise_errors=False, live=True)
    assert result.id in caplog.text
    assert "4111111111111111" not in caplog.text
    assert "ValueError" in caplog.text


def test_a_path_or_a_key_that_a_sender_chose_is_in_no_line_of_a_redacted_queue(
    using: Use, caplog: pytest.LogCaptureFixture
) -> None:
    using({"ADMIN": {"FORMATTER": {"tasks.default": f"{__name__}.redact"}}}, MAX_RETRIES=0)
    result = errands.returns.enqueue(1)
    body = {**take(result.id).body, "task": "secret.path"}
    send_message("tasks.default", body, key="4111111111111111", priority=2000, on_commit=False)
    with caplog.at_level(logging.DEBUG):
        drain(raise_errors=False, live=True)
    (line,) = lines(caplog, logging.ERROR)
    assert "django_rmq.exceptions.UnknownTask" in line.getMessage()
    assert "secret.path" not in caplog.text
    assert "4111111111111111" not in caplog.text


@pytest.mark.parametrize(
    ("kind", "text", "name"),
    [
        ("overran", "HardTimeout: the listener ran longer than 5 s", "TimeoutError"),
        ("timed_out", "", "TimeoutError"),
        ("rejected", "Reject: no", "Reject"),
        ("failed", "Retry: not yet", "Retry"),
        ("failed", "ZeroDivisionError: division by zero", "ZeroDivisionError"),
        ("failed", "django.http.response.Http404: gone", "Http404"),
        ("failed", "Unheard: of", "Exception"),
        ("failed", "print: no", "Exception"),
        ("failed", "", "Exception"),
    ],
)
def test_an_error_of_which_only_redis_knows_has_a_class(using: Use, kind: str, text: str, name: str) -> None:
    using(MAX_RETRIES=0)
    result = errands.returns.enqueue(1)
    message = take(result.id)
    failure = Failure(result.id.encode(), kind, None, text)
    connections.get_broker().run(ack.rollback(message.topic, 0, message.receipt, [failure]))
    result.refresh()
    assert result.status == Status.FAILED
    assert result.errors[-1].exception_class.__name__ == name
    assert text in result.errors[-1].traceback


@pytest.mark.parametrize("where", ["queue", "defaults"])
def test_a_queue_limits_how_long_its_tasks_run_and_keeps_how_they_ended(using: Use, where: str) -> None:
    options = {"HARD_TIMEOUT": 5, "OUTCOME_RETENTION": "1h"}
    if where == "queue":
        using(**options)
    else:
        using({"TOPIC_DEFAULTS": options})
    topics = get_config().topics
    found = {name: (topic.hard_timeout, topic.outcome_retention_ms) for name, topic in topics.items()}
    of_queues = dict.fromkeys(("tasks.default", "tasks-async.default"), (5.0, 3_600_000))
    assert found == {**of_queues, "tasks-later": (None, None)}


def test_a_queue_may_do_without_the_limit_of_all_topics(using: Use) -> None:
    using({"TOPIC_DEFAULTS": {"HARD_TIMEOUT": 5}}, HARD_TIMEOUT=None, MAX_RUNTIME=7200)
    topic = get_config().topics["tasks.default"]
    assert (topic.hard_timeout, topic.max_runtime) == (None, 7200)


def test_the_first_attempt_with_fewer_retries_is_the_first_one(using: Use) -> None:
    using(MAX_RETRIES=16)
    result = errands.attempt.enqueue()
    body = take(result.id).body
    send_message("tasks.default", body, key="again", max_retries=2, priority=2000)
    message = take("again")
    run_to_end(message)
    found = errands.attempt.get_result("again")
    assert (found.return_value, len(found.worker_ids)) == (1, 1)
    second = message.delivery._replace(retries_left=1)
    attempt = Attempt(Message(message.topic, 0, message.receipt + 1, second))
    assert attempt.is_over, "a later one knows of it"


def test_a_task_with_fewer_retries_is_released_although_it_ran_before(using: Use) -> None:
    using()
    result = errands.returns.enqueue(1)
    message = take(result.id)
    run_to_end(message)
    connections.get_broker().run(ack.commit(message.topic, 0, message.receipt, [result.id.encode()]))
    due = timezone.now() + timedelta(milliseconds=200)
    send_message("tasks-later", message.body, key=result.id, max_retries=2, fixed_time=due)
    deadline = due + timedelta(seconds=60)
    while drain("tasks-later", live=True) == 0:
        assert timezone.now() < deadline
    assert take(result.id).key == result.id


def test_a_task_that_was_cancelled_after_its_release_does_not_come_back(using: Use) -> None:
    """Its worker dies before it can commit the message that waited, and another one has it again."""
    using()
    result, later = released_by_a_dying_worker()
    assert result.status == Status.READY
    assert cancel_message("tasks.default", key=result.id, on_commit=False) == "waiting"
    execution.release(later)
    topic = get_config().topics["tasks.default"]
    (looked,) = connections.get_broker().run(inspect.describe_messages(topic, 0, [result.id.encode()]))
    assert (looked.store, looked.prepare, looked.retry) == (None, None, None)
    with pytest.raises(FRAMEWORK.exceptions.TaskResultDoesNotExist):
        end_of_waiting(later, result)


def test_a_task_that_was_released_and_begins_counts_no_attempt_of_its_release(using: Use) -> None:
    using()
    result, later = released_by_a_dying_worker()
    execution.release(later)
    drain("tasks.default", live=True)
    execution.release(later)
    assert drain("tasks.default", live=True) == 0
    result.refresh()
    assert (result.return_value, result.attempts) == (1, 1)


def released_by_a_dying_worker() -> tuple[Any, Message]:
    """Return a task in its queue, and the message that waited as its next delivery has it."""
    due = timezone.now() + timedelta(milliseconds=200)
    result = errands.returns.using(run_after=due).enqueue(1)
    topic, broker = get_config().topics["tasks-later"], connections.get_broker()
    deadline = due + timedelta(seconds=60)
    while (prepared := broker.run(fetch.prepare(topic, 0, "dying", None, 1))).status != "ok":
        assert timezone.now() < deadline
    (delivery,) = prepared.deliveries
    execution.release(Message(topic, 0, prepared.receipt, delivery, BrokerDeliveryControl(broker)))
    again = delivery._replace(retries_left=delivery.retries_left - 1)
    return result, Message(topic, 0, prepared.receipt, again, BrokerDeliveryControl(broker))


def end_of_waiting(later: Message, result: Any) -> None:
    """Commit the message that waited, and refresh the result."""
    connections.get_broker().run(ack.commit(later.topic, 0, later.receipt, [later.delivery.member]))
    result.refresh()


@pytest.mark.parametrize("state", ["waiting", "resting", "dead", "until its time"])
@pytest.mark.parametrize("slots", [(1, 4), (4, 1)])
def test_a_task_is_found_at_every_step_of_a_re_slotting(
    using: Use, state: str, slots: tuple[int, int]
) -> None:
    """Also by a process that has asked for the slot counts a moment ago."""
    before, after = slots
    using(SLOTS=before, BACKOFF=600)
    name = "tasks-later" if state == "until its time" else "tasks.default"
    topic, broker = get_config().topics[name], connections.get_broker()
    later = {"run_after": timezone.now() + timedelta(hours=1)} if state == "until its time" else {}
    given = [errands.fails.using(**later).enqueue() for _ in range(6)]
    # In slot 0 a task stays where it is.
    while not any(slot_of(result.id.encode(), 4) for result in given):
        given.append(errands.fails.using(**later).enqueue())
    if state == "resting":
        drain(name, raise_errors=False, live=True)
    if state == "dead":
        for result in given:
            key = result.id.encode()
            broker.run(operate.bury(topic, slot_of(key, before), [key]))
    expected = Status.FAILED if state == "dead" else Status.READY
    for result in given:
        result.refresh()
    seen: dict[str, set[Any]] = {}

    def note(step: str, progress: Any) -> None:
        for result in given:
            result.refresh()
            seen.setdefault(step, set()).add((result.status, result.finished_at is not None))

    chosen = reslotting.begin(broker, topic, after)
    assert chosen is not None
    reslotting.move(broker, chosen, report=note)
    reslotting.finish(broker, chosen)
    note("finished", None)
    assert {"shut", "moved_out", "moved_in", "reopened", "finished"} <= seen.keys()
    assert set().union(*seen.values()) == {(expected, state == "dead")}


def test_the_end_of_a_task_may_be_recorded_while_the_next_ones_run(using: Use) -> None:
    using()
    results = [errands.returns.enqueue(value) for value in range(3)]
    ends = [execution.run(take(result.id)) for result in results]
    for end in ends:
        assert end is not None
        end.wait()
    for value, result in enumerate(results):
        result.refresh()
        assert (result.status, result.return_value) == (Status.SUCCESSFUL, value)


def test_the_last_attempt_is_recorded_before_the_next_task_begins(using: Use) -> None:
    """If that one killed the worker, a task that has succeeded would have failed, and would not run again."""
    using(MAX_RETRIES=0)
    result = errands.returns.enqueue(1)
    assert execution.run(take(result.id)) is None
    result.refresh()
    assert result.status == Status.SUCCESSFUL


def test_a_receiver_may_read_the_result_before_the_next_task_begins(using: Use) -> None:
    using()
    read: list[Any] = []

    def read_result(task_result: Any, **_: Any) -> None:
        read.append(errands.returns.get_result(task_result.id).status)

    with receiving(read_result, signals.task_finished):
        assert execution.run(take(errands.returns.enqueue(1).id)) is None
    assert read == [Status.SUCCESSFUL]


def test_the_line_about_a_task_is_logged_once_its_end_is_recorded(
    using: Use, caplog: pytest.LogCaptureFixture
) -> None:
    using()
    caplog.set_level(logging.INFO)
    end = execution.run(take(errands.returns.enqueue(1).id))
    assert end is not None
    assert "state=SUCCESSFUL" not in caplog.text
    end.wait()
    assert "state=SUCCESSFUL" in caplog.text


@pytest.mark.parametrize("is_full_for_long", [False, True])
def test_a_task_whose_end_redis_does_not_take_is_not_acknowledged(
    using: Use, monkeypatch: pytest.MonkeyPatch, is_full_for_long: bool
) -> None:
    monkeypatch.setattr(record_writer, "PATIENCE", 0.5 if is_full_for_long else 60.0)
    with RedisServer(maxmemory_policy="noeviction") as server:
        using({"REDIS": server.url})
        result = errands.returns.enqueue(1)
        message = take(result.id)
        ask(server.port, "CONFIG", "SET", "maxmemory", 1)
        listener_registry.discover()
        listener = listener_registry.listeners()["tasks.default"]
        with ThreadPoolExecutor(1) as pool:
            ending = pool.submit(call_all, listener, [message])
            if is_full_for_long:
                (failure,) = ending.result(30)
                assert failure is not None
                assert "ServerFull" in failure.error
            assert ending.done() == is_full_for_long
            ask(server.port, "CONFIG", "SET", "maxmemory", 0)
            assert is_full_for_long or ending.result(30) == [None]
        result.refresh()
        assert result.is_finished != is_full_for_long


# Python 3.12 warns that the process has several threads.
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_process_that_a_task_has_forked_does_not_end_the_task(using: Use, tmp_path: Path) -> None:
    using(MAX_RETRIES=0)
    (tmp_path / "tried").touch()
    result = errands.forks_at_last.enqueue(str(tmp_path / "tried"))
    message = take(result.id)
    listener_registry.discover()
    listener = listener_registry.listeners()["tasks.default"]
    inbox: SimpleQueue[Any] = SimpleQueue()
    thread = ExecutorThread(0, inbox, NO_HOOKS)
    slot = ConsumedSlot(message.topic, message.slot, 0)
    thread.put(Batch(slot, listener, message.receipt, [message], uptime()))
    thread.stop()
    thread.start()
    assert inbox.get(timeout=30).committed == [message.delivery.member]
    result.refresh()
    assert result.return_value == "the original"


def test_an_async_task_ends_though_the_project_uses_all_threads_of_its_event_loop(using: Use) -> None:
    using()
    result = errands.areturns.enqueue("done")
    free = Event()

    async def run_beside_a_full_executor() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        blocked = asyncio.create_task(asyncio.to_thread(free.wait, 20))
        message = take(result.id, "tasks-async.default")
        assert await message.aextend()
        await execution.arun(message)
        assert not blocked.done()
        free.set()
        await blocked

    asyncio.run(run_beside_a_full_executor())
    result.refresh()
    assert result.return_value == "done"
