"""The registry of listeners: ``@listener`` and ``@schedule``, and the search for the modules of the apps that use them.

The topics of ``TASKS`` get their listeners from ``tasks.execution``. This module only registers. Listeners are called by
``core.consumer``; ``checks`` and ``runrmqconsumers`` report a topic that is not declared.
"""

from __future__ import annotations

import functools
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, overload

from asgiref.sync import async_to_sync, iscoroutinefunction
from django.apps import apps
from django.db import DEFAULT_DB_ALIAS

from django_rmq import schedules as scheduled
from django_rmq.conf import get_config
from django_rmq.core.consumer.batch_run import Coroutine
from django_rmq.core.model.bounds import BATCH
from django_rmq.core.model.delivered_message import ListenerFunction, Message
from django_rmq.durations import Duration
from django_rmq.exceptions import ConfigurationError
from django_rmq.tasks import execution as tasks
from django_rmq.tasks.task_modules import import_each, modules_of_apps
from django_rmq.worker.once import OnceListener

if sys.version_info >= (3, 14):
    import annotationlib

Function = TypeVar("Function", bound=Callable[..., object])
TakesMessage = TypeVar("TakesMessage", bound=Callable[[Message], object])
TakesMessages = TypeVar("TakesMessages", bound=Callable[[list[Message]], object])


class DuplicateListener(ConfigurationError):
    """Two functions listen to the same topic."""


@dataclass(frozen=True, slots=True)
class Listener:
    """The function that is called with the messages of one topic."""

    topic: str
    function: ListenerFunction
    """Takes one message, or a list of them if ``batch_size`` is given. Never a coroutine function: it runs one
    to its end."""
    batch_size: int | None
    location: str
    """``module:line`` of the function in its source."""
    name: str
    """``module.qualname``, by which the same function is recognised after a reload."""
    using: str | None = None
    """The database in which its effects happen once; None if they may happen again."""
    coroutine: Coroutine | None = None
    """The coroutine function that workers run beside others in their event loop; None if they call ``function``."""
    registered: Callable[..., Any] | None = None
    """What ``@listener`` stands above."""

    @property
    def is_covered(self) -> bool:
        """Whether its module has in its place what a decorator above ``@listener`` has made of it. Workers do not call that."""
        written = _written(self.registered)
        place: object = sys.modules.get(getattr(written, "__module__", ""))
        for name in getattr(written, "__qualname__", "").split("."):
            place = getattr(place, name, None)
        return place is not self.registered and _is_made_of(place, self.registered)


class FailedModule(NamedTuple):
    """A module of listeners that could not be imported, and the error."""

    module: str
    error: Exception

    @property
    def reason(self) -> str:
        """The error in one line, with file and line of the project's code that raised it."""
        kind, error = type(self.error).__name__, self.error
        if isinstance(error, SyntaxError):
            return f"{kind}: {error.msg} ({error.filename}, line {error.lineno})"
        text = f"{kind}: {(str(error).splitlines() or [''])[0]}"
        frames = traceback.extract_tb(error.__traceback__)
        own = [f"{frame.filename}, line {frame.lineno}" for frame in frames if not is_library(frame.filename)]
        return f"{text} ({own[-1]})" if own else text


_LIBRARIES = (
    *(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")),
    str(Path(__file__).parent),
)


def is_library(path: str) -> bool:
    """Return whether a frame's file belongs to Python, an installed package or RMQ, rather than to the project."""
    return path.startswith(("<", *_LIBRARIES))


_listeners: dict[str, Listener] = {}
_of_tasks: set[str] = set()
"""The topics of tasks that have a listener."""


@overload
def listener(
    topic: str, *, batch_size: None = None, once: bool | str = False
) -> Callable[[TakesMessage], TakesMessage]: ...
@overload
def listener(
    topic: str, *, batch_size: int, once: bool | str = False
) -> Callable[[TakesMessages], TakesMessages]: ...
def listener(
    topic: str, *, batch_size: int | None = None, once: bool | str = False
) -> Callable[[Function], Function]:
    """Register the decorated function as the listener of ``topic``, and return it unchanged.

    It gets one ``Message``; with ``batch_size`` a list of up to that many. Returning commits; ``False`` or an
    exception rolls back. Calls of an ``async def`` overlap in the event loop of the worker process, up to the
    topic's ``CONCURRENCY``.

    ``once``: True for the default database, or the alias of another one. The listener then runs in a transaction of
    that database, and what it writes there happens exactly once for each message. The topic needs ``ORIGIN``. An
    ``async def`` with ``once`` takes a thread for each call.

    Raises ``ConfigurationError`` for an object that cannot listen and for a second listener of a topic.
    """
    name: object = topic  # the argument of a decorator may be anything, such as the function itself
    if not isinstance(name, str) or not name:
        raise ConfigurationError(
            f'@listener needs the name of a topic, as in @listener("orders"), got {name!r}'
        )
    size: object = batch_size
    if size is not None and not (type(size) is int and 1 <= size <= BATCH):
        raise ConfigurationError(
            f'@listener("{topic}"): batch_size must be a whole number from 1 to {BATCH}, got {batch_size!r}'
        )
    alias: object = once
    if not isinstance(alias, (bool, str)) or alias == "":
        raise ConfigurationError(
            f'@listener("{topic}"): once must be True, False or the alias of a database, got {once!r}'
        )
    using = DEFAULT_DB_ALIAS if once is True else once or None

    def register(function: Function) -> Function:
        add(topic, function, batch_size, using)
        return function

    return register


def add(
    topic: str, function: Callable[..., Any], batch_size: int | None = None, using: str | None = None
) -> Listener:
    """Register ``function`` like ``@listener``, and return the registered object.

    ``using``: the database in which its effects happen once.
    """
    if not callable(function):
        raise ConfigurationError(f'@listener("{topic}") needs a function, got {function!r}')
    written = _written(function)
    name, location = _name_of(written), _location_of(written)
    called = written if inspect.isroutine(written) else _call_method(written)
    for inner in (written, called):
        if inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner):
            raise ConfigurationError(
                f'listener {name} of topic "{topic}" ({location}) is a generator, so calling it would run nothing'
            )
    try:
        check_arguments(function, object())
    except TypeError as error:
        argument = "one message" if batch_size is None else "a list of messages"
        raise ConfigurationError(
            f'listener {name} of topic "{topic}" ({location}) cannot be called with {argument}: {error}'
        ) from None
    # A decorator that is a plain function may return the coroutine of the function beneath it.
    runs_later = any(iscoroutinefunction(inner) for inner in (function, written, called))
    runs: ListenerFunction = async_to_sync(function) if runs_later else function
    if using is not None:
        runs = OnceListener(name, runs, using)
    # A transaction of Django belongs to a thread, so a coroutine function with ``once`` is run to its end in one.
    coroutine = function if runs_later and using is None else None
    listener = Listener(topic, runs, batch_size, location, name, using, coroutine, function)
    other = _listeners.get(topic)
    # After a reload the same function is registered again.
    if other is not None and other.name != listener.name:
        raise DuplicateListener(
            f'topic "{topic}" has two listeners: {other.name} ({other.location}) and {name} ({location})'
        )
    _listeners[topic] = listener
    return listener


def check_arguments(function: Callable[..., object], *arguments: object) -> None:
    """Raise ``TypeError`` if ``function`` cannot be called with these arguments.

    Since Python 3.14 annotations are evaluated when somebody asks for them. The names in them may exist for type
    checkers only, so they are not evaluated here.
    """
    try:
        if sys.version_info >= (3, 14):
            signature = inspect.signature(function, annotation_format=annotationlib.Format.FORWARDREF)
        else:
            signature = inspect.signature(function)
    except ValueError:
        return  # some functions written in C do not expose their arguments
    signature.bind(*arguments)


def schedule(
    name: str,
    *,
    topic: str | None = None,
    body: object = None,
    cron: str | None = None,
    every: Duration | None = None,
    timezone: str | None = None,
    catch_up: str = "last",
) -> Callable[[Function], Function]:
    """Call the decorated function at fixed times, by a message for each; it is returned unchanged.

    Above ``@listener`` the message goes to the topic of the listener. Without a listener the function becomes that of a
    topic with the name of the schedule, which no settings need to declare. ``topic`` names another one.

    ``cron``: an expression of five fields, in ``timezone`` (by default TIME_ZONE). ``every``: whole seconds,
    a timedelta, or text such as "15m". ``catch_up``: which of the ticks that were missed are sent: none, last or all.

    Raises ``ConfigurationError`` for options that cannot be used, and for a second schedule of this name.
    """
    options = {"BODY": body, "CRON": cron, "EVERY": every, "TIMEZONE": timezone, "CATCH_UP": catch_up}
    # Options that cannot be used are reported at the line of the decorator, before there is a function.
    parsed = scheduled.parsed(name, topic, options)

    def register(function: Function) -> Function:
        sends_to = topic
        if sends_to is None:
            own = _name_of(_written(function))
            served = [each.topic for each in _listeners.values() if each.name == own and each.topic != name]
            if len(served) > 1:
                raise ConfigurationError(
                    f'@schedule("{name}"): {own} listens to {", ".join(served)}: pass topic='
                )
            sends_to = served[0] if served else name
            if not served:
                add(name, function)
        scheduled.register(replace(parsed, topic=sends_to))
        return function

    return register


def listeners() -> dict[str, Listener]:
    """Return the registered listeners by topic."""
    return dict(_listeners)


def name_of(topic: str) -> str:
    """Return the name of the listener of a topic, as ``module.qualname``."""
    listener = _listeners.get(topic)
    return f"of topic {topic}" if listener is None else listener.name


def once_databases() -> dict[str, str]:
    """Return the databases of the listeners with ``once``, by topic."""
    return {topic: each.using for topic, each in _listeners.items() if each.using is not None}


def discover() -> list[FailedModule]:
    """Import the ``RMQ["AUTODISCOVER"]`` module of every installed app; return the modules that failed."""
    name = get_config().autodiscover
    _add_tasks()
    return [] if name is None else [FailedModule(*each) for each in import_each(modules_of_apps(name))]


def _add_tasks() -> None:
    """Register the listeners of the topics that the setting TASKS needs now, and of no others."""
    functions = tasks.listeners(get_config())
    for topic in _of_tasks - functions.keys():
        _listeners.pop(topic, None)
    _of_tasks.clear()
    _of_tasks.update(functions)
    for topic, function in functions.items():
        add(topic, function)


def autodiscover() -> None:
    """Import the listeners of every installed app; raise the first error, if any."""
    for _, error in discover():
        raise error


@contextmanager
def isolated(*, empty: bool = True) -> Iterator[None]:
    """For tests: begin with no listeners and no ``@schedule`` (or with the current ones) and restore them afterwards."""
    # A module is imported only once: if it were first imported in isolation, its listeners would be lost
    # permanently.
    if apps.ready:
        with suppress(ConfigurationError):
            discover()
    before = dict(_listeners)
    schedules = scheduled.declared()
    if empty:
        _listeners.clear()
        scheduled.replace_declared({})
    try:
        yield
    finally:
        _listeners.clear()
        _listeners.update(before)
        scheduled.replace_declared(schedules)


def _is_made_of(outer: object, function: object, layers: int = 8) -> bool:
    """Return whether ``outer`` is what decorators, one above the other, have made of ``function``."""
    if outer is function:
        return True
    # A class or a module that a decorator refers to is not what it decorates.
    if not layers or not callable(outer) or isinstance(outer, type):
        return False
    # A decorator keeps the function in a closure, a partial or an attribute, also if it does not use ``functools.wraps``.
    parts: list[object] = [getattr(outer, "__wrapped__", None), getattr(outer, "func", None)]
    for cell in getattr(outer, "__closure__", None) or ():
        with suppress(ValueError):  # the variable has been deleted
            parts.append(cell.cell_contents)
    parts += getattr(outer, "__dict__", {}).values()
    return any(_is_made_of(part, function, layers - 1) for part in parts)


def _written(function: Any) -> Any:
    """Return the function of the project's code beneath decorators and partials."""
    written = inspect.unwrap(function)
    while isinstance(written, functools.partial):
        written = inspect.unwrap(written.func)
    return written


def _name_of(function: object) -> str:
    owner = function if hasattr(function, "__qualname__") else type(function)
    return f"{owner.__module__}.{owner.__qualname__}"


def _location_of(function: object) -> str:
    code = getattr(function, "__code__", None) or getattr(_call_method(function), "__code__", None)
    return f"{function.__module__}:{code.co_firstlineno}" if code is not None else str(function.__module__)


def _call_method(function: object) -> object:
    """Return the function behind the call of an object that is not a function."""
    return inspect.unwrap(type(function).__call__)
