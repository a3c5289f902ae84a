"""What users see is what `tests/unit/snapshot.txt` says: who changes it on purpose runs `make snapshot` and says so in CHANGELOG.

Other files hold the rest, each written from the code and compared with it by a test:

docs/reference/python.md     what ``django_rmq`` exports, with signatures and members (test_papers)
docs/reference/settings.md   the keys of the settings with their defaults (test_papers)
docs/reference/commands.md   the commands and their options; those of pipelines are here (test_papers)
docs/reference/checks.md     the ids of the checks (test_conf)
docs/reference/logging.md    the events of the log with their fields (test_logs)
docs/reference/metrics.md    the metrics of Prometheus (test_metrics); labels of those that each project has are here
django_rmq/api/openapi.yaml  the routes of REST with methods, parameters and answers (test_openapi)
"""

from __future__ import annotations

import inspect
import os
import pkgutil
import re
import tomllib
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from enum import Enum
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from django.apps import apps
from django.contrib import admin
from django.core.management import load_command_class
from django.dispatch import Signal
from django.test import override_settings

import pyspark_rmq
from django_rmq import pytest_plugin, send_message, signals, templatetags
from django_rmq.conf import get_config
from django_rmq.core import lua
from django_rmq.core.commands import ack, fetch
from django_rmq.core.model import keys
from django_rmq.core.model.replies import Failure
from django_rmq.metrics import RmqCollector
from django_rmq.models import Topic
from django_rmq.spark.columns import OPTION_COLUMNS
from django_rmq.spark.pipelines import pipelines as registered
from django_rmq.spark.reader import METADATA
from django_rmq.spark.source_options import READ, STREAM, WRITE
from django_rmq.testing import clock_from_now, memory_broker

SNAPSHOT = Path(__file__).with_name("snapshot.txt")
PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
PUBLIC: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            "admin", "exceptions", "health_check", "metrics", "operations", "spark.pipelines", "tasks",
            "testing",
        ),
        (),
    ),
    "pytest_plugin": ("Rmq",),
    "spark.declaring": ("declare",),
    "spark.failing": ("fail", "fail_batch"),
    "spark.java": ("prepare_environment",),
    "spark.acknowledger": ("Acknowledger",),
    "spark.foreach_batch": ("Batches", "Each", "Files"),
    "spark.source": ("RmqDataSource",),
}  # fmt: skip
"""Module → the names that users import; none: its ``__all__``, or all that it defines."""
OPAQUE = {"InMemoryBroker", "TopicAdmin"}
"""Classes that users name, but whose members are not for them."""


def call_of(function: Any, skips: int = 0) -> str:
    """The parameters of a function with their defaults, without types, which may be names of ours."""
    plain = []
    for each in list(inspect.signature(function).parameters.values())[skips:]:
        if not each.name.startswith("_"):
            is_object = each.default is not each.empty and repr(each.default).startswith("<")
            plain.append(each.replace(annotation=each.empty, default=... if is_object else each.default))
    return str(inspect.Signature(plain)).replace("Ellipsis", "...")


def members_of(kind: type) -> dict[str, Any]:
    """The public members of a class and of those of its bases that are ours."""
    members: dict[str, Any] = {}
    for each in reversed(kind.__mro__):
        if each.__module__.startswith("django_rmq"):
            members |= dict.fromkeys(inspect.get_annotations(each)) | vars(each)
    return {name: value for name, value in members.items() if not name.startswith("_")}


def lines_of(name: str, value: Any, others: Iterable[Any]) -> Iterator[str]:
    """What a user may call or read of a public name; what a class shares with one of the ``others`` is said there."""
    if not isinstance(value, type):
        yield f"{name}{call_of(value)}" if callable(value) else f"{name} = {value!r}"
        return
    own = [vars(each) for each in value.__mro__ if each.__module__.startswith("django_rmq")]
    is_called = not issubclass(value, Enum) and any("__init__" in each or "__new__" in each for each in own)
    above = [each for each in value.__mro__[1:] if each in others]
    bases = [each.__name__ for each in value.__bases__ if each in above or each in (Exception, ValueError)]
    yield f"{name}{call_of(value) if is_called else ''}: class{f' of {bases[0]}' if bases else ''}"
    known = set().union(*map(members_of, above))
    for member, what in members_of(value).items() if name not in OPAQUE else ():
        function = getattr(what, "__func__", what)
        if member not in known:
            called = inspect.isfunction(function)
            yield f"{name}.{member}{call_of(function, not isinstance(what, staticmethod)) if called else ''}"


def exported(module: ModuleType, names: Iterable[str]) -> Iterator[str]:
    own = [name for name in vars(module) if getattr(vars(module)[name], "__module__", "") == module.__name__]
    public = [name for name in names or getattr(module, "__all__", own) if not name.startswith("_")]
    values = {name: getattr(module, name) for name in public}
    for name, value in values.items():
        yield from lines_of(name, value, [each for each in values.values() if isinstance(each, type)])


def fixtures() -> Iterator[str]:
    """The fixtures of the plugin for pytest."""
    for name, value in vars(pytest_plugin).items():
        if type(value).__name__ == "FixtureFunctionDefinition" and not name.startswith("_"):
            yield name


def options_of_pipelines() -> Iterator[str]:
    """The options of each pipeline that comes with the package."""
    parser = load_command_class("django_rmq", "runrmqpipeline").create_parser("manage.py", "runrmqpipeline")
    (pipelines,) = [action.choices for action in parser._actions if isinstance(action.choices, dict)]
    for name, own in pipelines.items():
        ours = registered()[name].__module__.startswith("django_rmq")
        for action in own._actions[1:] if ours else ():
            yield f"{name} {' '.join(action.option_strings) or action.dest} = {action.default!r}"


def pages_of_the_admin() -> Iterator[str]:
    for pattern in admin.site._registry[Topic].get_urls():
        yield f"{pattern.name}: {pattern.pattern}"


def tags_of_templates() -> Iterator[str]:
    for info in pkgutil.iter_modules(templatetags.__path__):
        library = import_module(f"django_rmq.templatetags.{info.name}").register
        yield from (f"{info.name} filter {name}" for name in library.filters)
        yield from (f"{info.name} tag {name}" for name in library.tags)


def tables() -> Iterator[str]:
    """Each table with its columns, constraints and indexes, and the permissions."""
    for model in apps.get_app_config("django_rmq").get_models():
        meta = model._meta
        for field in meta.local_fields:
            null = " null" if field.null else ""
            yield f"{meta.db_table}.{field.column}: {field.get_internal_type()} {field.max_length or ''}{null}"
        yield from (f"{meta.db_table} has {each.name}" for each in (*meta.constraints, *meta.indexes))
        yield from (f"{meta.db_table} permits {codename}" for codename, _ in meta.permissions)


def keys_of_code() -> Iterator[str]:
    """Every key and channel that the code can name, with the prefix P:, for slot 3 or the topic, worker or task NAME."""
    for name, function in vars(keys).items():
        given = getattr(inspect.unwrap(function), "__annotations__", {}) if callable(function) else {}
        if name.startswith("check_") or list(given)[:1] != ["prefix"] or len(given) > 4:
            continue
        made = function(*("P:", "NAME", 3)[: len(given) - 1])
        yield from (key.decode() for key in ([made] if isinstance(made, bytes) else made))


TYPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "range_merge": ({"TYPE": "range_merge", "TIME_RANGE": 1}, {}),
    "priority": ({"TYPE": "priority"}, {"priority": 100}),
    "fixed_time": ({"TYPE": "fixed_time"}, {"fixed_time": datetime(2100, 1, 1, tzinfo=UTC)}),
    "fifo": ({"TYPE": "fifo"}, {}),
    "strict": ({"TYPE": "fifo", "ORDER": "strict"}, {}),
    "keyed": ({"TYPE": "range_merge", "TIME_RANGE": 1, "IDENTITY": "key"}, {}),
    "outcomes": ({"TYPE": "range_merge", "TIME_RANGE": 1, "OUTCOME_RETENTION": "1h"}, {}),
}
"""Topic → its settings, and the options of a send to it."""


def keys_of_types() -> Iterator[str]:
    """The keys in Redis of a topic of each type, once a message is done, one is dead, one has failed and one waits."""
    for name, (settings, options) in TYPES.items():
        rmq = {"BROKER": "memory", "TOPICS": {name: {"SLOTS": 1, "LISTENER": False, **settings}}}
        clock = clock_from_now()
        with override_settings(RMQ=rmq), memory_broker(clock, "P:") as broker:
            for body in ("done", "rejected", "failed", "waiting"):
                send_message(name, body, key=body if name == "keyed" else None, **options)
            clock.advance("30000d")
            topic = get_config().topic(name)
            for kind in ("done", "rejected", "failed"):
                taken = broker.run(fetch.prepare(topic, 0, "worker", None, 1))
                (member,) = [each.member for each in taken.deliveries]
                failures = [Failure(member, kind, None, "Error: text")]
                end = ack.commit(topic, 0, taken.receipt, [member]) if kind == "done" else None
                broker.run(end or ack.rollback(topic, 0, taken.receipt, failures))
            broker.run(fetch.prepare(topic, 0, "worker", None, 1))
            for key in broker.client.scan_iter():
                yield f"{name}: {broker.client.type(key).decode()} {key.decode()}"


def metrics() -> Iterator[str]:
    """The metrics that each project has, with their kinds and labels."""
    rmq = {"BROKER": "memory", "TOPICS": {"work": {"LISTENER": False}}}
    with override_settings(RMQ=rmq), memory_broker():
        for family in RmqCollector().collect():
            yield f"{family.name}: {family.type}, labels: {', '.join(family._labelnames) or 'none'}"  # type: ignore[attr-defined]


def arguments_of_signals() -> Iterator[str]:
    """The arguments that each signal has, as its module says; test_signals and test_sending receive them."""
    for name, value in vars(signals).items():
        if isinstance(value, Signal):
            (row,) = re.findall(rf"^``{name}`` +(.*)", str(signals.__doc__), re.MULTILINE)
            yield f"{name}: topic, {', '.join(re.findall('``([a-z]+)``[:,]', row))}"


def spark() -> Iterator[str]:
    """The format, its options and its columns."""
    yield f"format: {pyspark_rmq.DefaultSource.name()}"
    for use, names in {"read": READ, "stream": STREAM, "write": WRITE}.items():
        yield from (f"option of {use}: {name}" for name in names)
    yield from (f"column of a read: {field.simpleString()}" for field in METADATA.fields)
    yield from (f"column of a write: {name}" for name in OPTION_COLUMNS)


def distribution() -> Iterator[str]:
    """What pyproject.toml says to installers."""
    yield f"{PROJECT['name']} for Python {PROJECT['requires-python']}"
    yield from (f"requires: {each}" for each in PROJECT["dependencies"])
    for extra, wanted in PROJECT["optional-dependencies"].items():
        yield f"extra {extra}: {', '.join(wanted)}"
    for group, entries in PROJECT["entry-points"].items():
        yield from (f"entry point of {group}: {name} = {value}" for name, value in entries.items())


def snapshot() -> str:
    """All parts as text, each sorted."""
    made = (keys_of_code, keys_of_types, metrics, arguments_of_signals, tables)
    shown = (distribution, fixtures, options_of_pipelines, pages_of_the_admin, spark, tags_of_templates)
    parts = {part.__name__.replace("_", " "): part() for part in (*made, *shown)}
    parts["names of scripts"] = iter(lua.all_names())
    for name, names in PUBLIC.items():
        parts[f"django_rmq.{name}"] = exported(import_module(f"django_rmq.{name}"), names)
    return "\n".join(
        f"# {name}\n" + "".join(f"{line}\n" for line in sorted(set(part)))
        for name, part in sorted(parts.items())
    )


def test_what_users_see_is_the_snapshot() -> None:
    written = snapshot()
    if os.environ.get("SNAPSHOT") == "write":
        SNAPSHOT.write_text(written)
    assert written.splitlines() == SNAPSHOT.read_text().splitlines(), "run: make snapshot"
