"""The backend: it enqueues tasks as messages.

``jobs`` makes the message of a task, ``priority`` its priority. ``task_status`` finds the results of tasks, and ``execution``
runs tasks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from inspect import iscoroutinefunction
from typing import Any

from django.db import transaction
from django.utils import timezone

from django_rmq.conf import get_config
from django_rmq.conf.task_settings import PATHS, TaskBackend
from django_rmq.core.model.envelope import new_origin
from django_rmq.core.model.send_results import SendResult
from django_rmq.exceptions import ConfigurationError, InvalidMessage
from django_rmq.sending import send_message
from django_rmq.tasks import Framework, task_status
from django_rmq.tasks.jobs import Job
from django_rmq.tasks.priority import message_priority
from django_rmq.tasks.task_status import TaskRecord, result_of


class Tasks:
    """The methods of a backend for either framework. ``backend_of`` makes the class."""

    framework: Framework
    alias: str
    validate_task: Any

    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    def enqueue(self, task: Any, args: Sequence[object], kwargs: Mapping[str, object]) -> Any:
        """Send the task to its queue, and return its result, which is not finished.

        Inside a transaction it is sent at the commit (``OPTIONS["ON_COMMIT"]``), and with the outbox it is
        written in this transaction. Raises the errors of ``send_message``.
        """
        self.validate_task(task)
        mine, now = self._declared(), timezone.now()
        job = Job(
            task.module_path,
            list(args),
            dict(kwargs),
            self.alias,
            task.queue_name,
            task.priority,
            now,
            task.run_after,
            iscoroutinefunction(task.func),
        )
        result = result_of(self.framework, task, new_origin(), job, TaskRecord())
        # The result has the arguments as JSON holds them, and the message must carry the same.
        sent = _send(mine, job._replace(args=result.args, kwargs=result.kwargs), result.id, now)
        if sent.status == "pending":
            # Django runs callbacks in order. This one follows that of the send, so the status of ``sent`` is then
            # final.
            transaction.on_commit(
                lambda: self._announce(result, sent), using=mine.options.database, robust=True
            )
        else:
            self._announce(result, sent)
        return result

    def get_result(self, result_id: str) -> Any:
        """Return the result of a task, in whichever state. Raises ``TaskResultDoesNotExist``.

        While the task waits or runs, this is what its message says. The result of a finished task is kept for
        ``OPTIONS["RESULT_RETENTION"]``. Raises ``UnknownTask`` if no module of this process has the task.
        """
        task = task_status.find(self._declared(), result_id)
        if task is None:
            raise self.framework.exceptions.TaskResultDoesNotExist(result_id)
        job, record = task
        return result_of(self.framework, job.task(self.framework), result_id, job, record)

    def _declared(self) -> TaskBackend:
        """Return the settings of this backend. Raises ``ConfigurationError`` if it is a subclass of ``RMQBackend``."""
        try:
            return get_config().tasks[self.alias]
        except KeyError:
            raise ConfigurationError(
                f'TASKS["{self.alias}"] must name one of {", ".join(PATHS)} itself, and not a subclass: workers '
                "find the queues by this name"
            ) from None

    def _announce(self, result: object, sent: SendResult) -> None:
        """Send the signal ``task_enqueued``, once the task is in Redis or in the outbox."""
        if sent.ok or sent.status == "in_outbox":
            self.framework.signals.task_enqueued.send(type(self), task_result=result)


def _send(mine: TaskBackend, job: Job, key: str, now: datetime) -> SendResult:
    options = mine.options
    how: dict[str, Any] = {"key": key, "on_commit": options.on_commit, "using": options.database}
    after = job.run_after
    if after is not None and _is_later(after, now):
        try:
            return send_message(mine.later.name, job.body, fixed_time=_aware(after), **how)
        except InvalidMessage:
            # The time of the task may have come after ``now`` was read. The task then goes to its queue at once.
            if _is_later(after, timezone.now()):
                raise
    topic = mine.topic_of(job.queue, in_loop=job.in_loop)
    return send_message(topic.name, job.body, priority=message_priority(job), **how)


def _is_later(moment: datetime, now: datetime) -> bool:
    return _aware(moment) > _aware(now)


def _aware(moment: datetime) -> datetime:
    """Return ``moment`` with a time zone; with ``USE_TZ = False`` that of the process."""
    return moment if timezone.is_aware(moment) else moment.astimezone()


def backend_of(name: str, framework: Framework) -> Any:
    """Return the class ``name`` of backends for the tasks of ``framework``."""
    given = {"framework": framework, "__doc__": Tasks.__doc__, "__module__": "django_rmq.tasks"}
    return type(name, (Tasks, framework.backend), given)
