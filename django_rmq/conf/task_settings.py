"""The backends of Django's setting ``TASKS`` that are RMQ's, and the topics that their queues need.

A backend becomes a ``TaskBackend`` with a ``Topic`` for each kind of function. ``django_rmq.tasks`` uses it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from django_rmq.conf.known_keys import Keys, Problems, keys_of, read_section, read_values, setting
from django_rmq.conf.parsers import boolean, matching, module_names, optional, printable, seconds, text
from django_rmq.conf.topic_settings import TOPIC_KEYS, read_defaults, read_topic
from django_rmq.core.model.bounds import MAX_RETRIES_LIMIT
from django_rmq.core.model.keys import check_topic_name
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import ConfigurationError

PATHS = {"django_rmq.tasks.RMQBackend": "", "django_rmq.tasks.PackageBackend": "django_tasks"}
"""BACKEND -> the package whose tasks it takes; an empty one is Django's own, or django-tasks before Django 6.0."""

DEFAULT = "default"
"""The queue of a backend that names none, and the alias of the first backend."""

QUEUE_KEYS: Keys = {
    key: TOPIC_KEYS[key]
    for key in (
        "SLOTS", "SERIAL", "TIMEOUT", "MAX_RETRIES", "BACKOFF", "MAX_RUNTIME", "HARD_TIMEOUT", "PREFETCH",
        "MAX_BODY", "MAX_BACKLOG", "MAX_RATE", "MAX_IN_FLIGHT", "MAX_PREPARED", "FLOW", "CONCURRENCY",
        "DEAD_RETENTION", "OUTCOME_RETENTION", "OUTBOX",
    )
}  # fmt: skip
"""The options that a queue may set for its topics. The others follow from what a task is."""

_LATER_KEYS = ("SLOTS", "MAX_BODY", "OUTBOX")
"""The options of all queues, ``OPTIONS["TOPIC"]``, that hold for the topic of tasks that wait for their time, too."""

_RUNNING = {"TYPE": "priority", "RETRY_PRIORITY": "original"}

_FIXED = {"IDENTITY": "key", "BODY": "json", "SLOT_BASIS": None, "ORIGIN": False, "LISTENER": True}


@dataclass(frozen=True, slots=True)
class TaskOptions:
    """``OPTIONS`` of a backend, except those of topics. Times in seconds."""

    prefix: str | None = setting(
        optional(matching(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}", "1 to 40 of A-Z a-z 0-9 _ -")), None
    )
    result_retention: float = setting(seconds(1.0), 86_400.0)
    """How long the result of a finished task is kept."""
    on_commit: bool | None = setting(optional(boolean), None)
    """Whether a task waits for the commit; without a value ``RMQ["ON_COMMIT"]`` decides."""
    database: str | None = setting(optional(text), None)
    """The alias of the database whose commit a task waits for; without a value the default one."""
    modules: tuple[str, ...] = setting(module_names, ())
    """Modules with tasks, beside the ``tasks`` modules of the installed apps."""


OPTION_KEYS = keys_of(TaskOptions)


@dataclass(frozen=True, slots=True)
class Queue:
    """The topics of a queue: one for functions, one for coroutine functions."""

    threads: Topic
    loop: Topic


@dataclass(frozen=True, slots=True)
class TaskBackend:
    """One backend of ``TASKS``."""

    alias: str
    package: str
    """The package whose tasks it takes; see ``PATHS``."""
    options: TaskOptions
    queues: Mapping[str, Queue]
    """The queues by name. If there are none, the backend takes any queue, and ``shared`` has the tasks of all of them."""
    shared: Queue | None
    later: Topic
    """The topic in which tasks wait for their ``run_after``."""

    def topic_of(self, queue: str, *, in_loop: bool) -> Topic:
        """Return the topic of a queue's functions, or (``in_loop``) of its coroutine functions.

        Raises ``KeyError`` if there is no such queue.
        """
        topics = self.shared or self.queues[queue]
        return topics.loop if in_loop else topics.threads

    @property
    def running(self) -> Iterable[Topic]:
        """The topics whose messages are tasks to run."""
        each = [self.shared] if self.shared else self.queues.values()
        return [topic for queue in each for topic in (queue.threads, queue.loop)]

    @property
    def topics(self) -> Iterable[Topic]:
        return [*self.running, self.later]


def read_tasks(problems: Problems, root: Mapping[str, object], declared: object) -> Mapping[str, TaskBackend]:
    """Return the backends of ``declared`` (``TASKS``) that are RMQ's and have no problem."""
    if not isinstance(declared, Mapping):
        return {}
    # The problems of the defaults are reported with the topics.
    defaults = read_defaults(Problems(), root)
    backends = {}
    for alias, settings_of in declared.items():
        # The path alone decides, so that the backends of other packages are not imported here.
        if isinstance(settings_of, Mapping) and settings_of.get("BACKEND") in PATHS:
            backend = _Reader(problems, str(alias), settings_of, defaults).read()
            if backend is not None:
                backends[str(alias)] = backend
    return MappingProxyType(backends)


class _Reader:
    def __init__(
        self, problems: Problems, alias: str, given: Mapping[str, object], defaults: Mapping[str, object]
    ) -> None:
        self._problems = problems
        self._alias = alias
        self._given = given
        self._place = f'TASKS["{alias}"]'
        # A task is independent of the others, unless its queue says otherwise.
        self._defaults = {**defaults, "serial": False}

    def read(self) -> TaskBackend | None:
        """Return the backend, or None if it has a problem."""
        before = len(self._problems)
        place = f'{self._place}["OPTIONS"]'
        options = read_section(
            self._problems, place, self._given.get("OPTIONS") or {}, [*OPTION_KEYS, "TOPIC", "QUEUES"]
        )
        own = {key: value for key, value in options.items() if key in OPTION_KEYS}
        settings = TaskOptions(**read_values(self._problems, place, own, OPTION_KEYS))
        template = read_section(self._problems, f'{place}["TOPIC"]', options.get("TOPIC", {}), QUEUE_KEYS)
        special = self._special(place, options.get("QUEUES", {}))
        names = self._names()
        for name in special.keys() - set(names):
            self._problems.report(
                "E088",
                f'{place}["QUEUES"] names the queue {printable(name)}, which is not in {self._place}["QUEUES"].',
            )
        prefix = settings.prefix or ("tasks" if self._alias == DEFAULT else f"tasks-{self._alias}")
        queues = {name: self._queue(prefix, name, {**template, **special.get(name, {})}) for name in names}
        shared = None if names else self._queue(prefix, "", template)
        waiting = {key: template[key] for key in _LATER_KEYS if key in template}
        # A task whose queue is full is tried until the queue has room again.
        waiting |= {"TYPE": "fixed_time", "MAX_RETRIES": MAX_RETRIES_LIMIT, "BACKOFF": 10}
        # These defaults are for messages whose listeners do the work. Here a task only changes its topic.
        waiting |= {"HARD_TIMEOUT": None, "OUTCOME_RETENTION": None}
        later = self._topic(f"{prefix}-later", waiting)
        if len(self._problems) > before or later is None:
            return None
        queues_read = {name: queue for name, queue in queues.items() if queue is not None}
        package = PATHS[str(self._given["BACKEND"])]
        return TaskBackend(self._alias, package, settings, MappingProxyType(queues_read), shared, later)

    def _names(self) -> list[str]:
        names = self._given.get("QUEUES", [DEFAULT])
        if isinstance(names, str) or not isinstance(names, Iterable):
            self._problems.report(
                "E086", f'{self._place}["QUEUES"] is {printable(names)}: it must be a list of names.'
            )
            return []
        return list(dict.fromkeys(map(str, names)))

    def _special(self, place: str, given: object) -> dict[str, dict[str, object]]:
        """Return the options of single queues."""
        if not isinstance(given, Mapping):
            self._problems.report("E001", f'{place}["QUEUES"] is {printable(given)}: it must be a dict.')
            return {}
        return {
            str(name): read_section(self._problems, f'{place}["QUEUES"]["{name}"]', options, QUEUE_KEYS)
            for name, options in given.items()
        }

    def _queue(self, prefix: str, name: str, options: Mapping[str, object]) -> Queue | None:
        end = f".{name}" if name else ""
        threads = self._topic(f"{prefix}{end}", {**options, **_RUNNING})
        loop = threads and self._topic(f"{prefix}-async{end}", {**options, **_RUNNING})
        return Queue(threads, loop) if threads and loop else None

    def _topic(self, name: str, options: Mapping[str, object]) -> Topic | None:
        try:
            check_topic_name(name)
        except ConfigurationError as error:
            self._problems.report(
                "E086", f"{self._place} has a queue that cannot be a topic: {error}.", "Rename the queue."
            )
            return None
        fixed = {**options, **_FIXED}
        return read_topic(self._problems, f"{self._place} (topic {name})", name, fixed, self._defaults)


def with_task_topics(
    problems: Problems, declared: Mapping[str, Topic], backends: Iterable[TaskBackend]
) -> Mapping[str, Topic]:
    """Return all topics: the ``declared`` ones, and those of ``backends``. Report names that are used twice."""
    topics = dict(declared)
    for backend in backends:
        for topic in backend.topics:
            if topic.name in topics:
                problems.report(
                    "E086",
                    f'TASKS["{backend.alias}"] needs the topic "{topic.name}", which is declared elsewhere, too.',
                    f'Set TASKS["{backend.alias}"]["OPTIONS"]["PREFIX"] to another beginning of its topics\' names.',
                )
            topics[topic.name] = topic
    return MappingProxyType(topics)
