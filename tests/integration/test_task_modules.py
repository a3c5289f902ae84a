"""Which modules a task may be in: those of the project, and none that a message, a result or an error names."""

from __future__ import annotations

import copy
import json
import logging
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from django.core import checks
from django.test import modify_settings, override_settings

from django_rmq import connections, send_message, tasks
from django_rmq.conf import get_config
from django_rmq.core.commands import ack, fetch, stored_results
from django_rmq.core.model.replies import Failure
from django_rmq.exceptions import ConfigurationError, MessageGone, UnknownTask
from django_rmq.tasks import task_modules
from django_rmq.testing import drain, memory_broker
from django_rmq.worker import listener_registry, startup
from tests.support import tasks as errands

FRAMEWORK = tasks.framework()
Status = FRAMEWORK.base.TaskResultStatus

UPLOADED = "imported_by_a_message"
"""A module that nobody but its sender names."""

Use = Callable[..., None]


@pytest.fixture
def using() -> Iterator[Use]:
    """Use these options of the backend until the test ends."""
    with ExitStack() as stack:
        stack.enter_context(listener_registry.isolated())

        def use(**options: Any) -> None:
            topic: dict[str, Any] = {"TOPIC": {"SLOTS": 1, "MAX_RETRIES": 0}, "ON_COMMIT": False}
            backend = {"BACKEND": "django_rmq.tasks.RMQBackend", "OPTIONS": {**topic, **options}}
            rmq: dict[str, Any] = {"BROKER": "memory", "AUTODISCOVER": None, "TOPICS": {}}
            stack.enter_context(override_settings(RMQ=rmq, TASKS={"default": backend}))
            stack.enter_context(memory_broker())

        yield use


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder from which modules are imported. What the test imports is forgotten."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(task_modules, "_imported", set())
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


@pytest.fixture
def uploaded(folder: Path) -> None:
    """A file that could be imported, as in a folder of uploads below the project."""
    (folder / f"{UPLOADED}.py").write_text("class Boom(Exception): pass\n")


TASK = """
from tests.support.tasks import task

@task()
def doubles(value):
    return 2 * value
"""


def enqueue_as_sender(path: Any) -> str:
    """Send what a task's message looks like, as anybody may who may send to its topic; return the id of its result."""
    body = {"task": path, "args": [], "kwargs": {}, "backend": "default", "queue": "default", "priority": 0}
    send_message(
        "tasks.default",
        {**body, "enqueued_at": "2026-01-01T00:00:00+00:00"},
        key="sent",
        priority=2000,
        on_commit=False,
    )
    return "sent"


def test_a_worker_imports_no_module_that_a_message_names(using: Use, uploaded: None) -> None:
    using()
    enqueue_as_sender(f"{UPLOADED}.Boom")
    drain(raise_errors=False)
    assert UPLOADED not in sys.modules
    kept = connections.get_broker().run(stored_results.result("sent"))
    assert kept is not None
    (path, text) = json.loads(kept.record)["errors"][0]
    assert path == "django_rmq.exceptions.UnknownTask"
    assert 'OPTIONS["MODULES"]' in text


@pytest.mark.parametrize("is_tried", [False, True])
def test_who_reads_a_result_imports_no_module_that_it_names(
    using: Use, uploaded: None, is_tried: bool
) -> None:
    using()
    key = enqueue_as_sender(f"{UPLOADED}.Boom")
    if is_tried:
        drain(raise_errors=False)
    with pytest.raises(UnknownTask, match=UPLOADED):
        FRAMEWORK.backends["default"].get_result(key)
    assert UPLOADED not in sys.modules


def test_the_class_of_an_error_is_never_imported(using: Use, uploaded: None) -> None:
    """Any consumer may end a delivery with a text of an error."""
    using()
    result = errands.returns.enqueue(1)
    topic, broker = get_config().topics["tasks.default"], connections.get_broker()
    prepared = broker.run(fetch.prepare(topic, 0, "a consumer", None, 1))
    failure = Failure(result.id.encode(), "failed", None, f"{UPLOADED}.Boom: no")
    broker.run(ack.rollback(topic, 0, prepared.receipt, [failure]))
    result.refresh()
    (error,) = result.errors
    assert (error.exception_class, error.exception_class_path) == (Exception, f"{UPLOADED}.Boom")
    assert UPLOADED not in sys.modules


def test_the_class_of_an_error_in_a_record_is_found_only_if_it_is_imported(
    using: Use, uploaded: None
) -> None:
    using()
    result = errands.fails.enqueue()
    drain(raise_errors=False)
    kept = connections.get_broker().run(stored_results.result(result.id))
    assert kept is not None
    paths = {
        "builtins.ValueError": ValueError,
        "django_rmq.exceptions.MessageGone": MessageGone,
        "tests.support.tasks.Odd": errands.Odd,
        "tests.integration.test_task_modules.Outer.Inner": Outer.Inner,
        f"{UPLOADED}.Boom": Exception,
        "builtins.print": Exception,
        "tests.support.tasks": Exception,
        "ValueError": Exception,
        "": Exception,
        "." * 600: Exception,
    }
    record = {**json.loads(kept.record), "errors": [[path, "a traceback"] for path in paths]}
    call = stored_results.store_result(
        result.id, kept.stamp + 1, 1_000_000, kept.job, json.dumps(record, separators=(",", ":")).encode()
    )
    assert connections.get_broker().run(call) == "ok"
    result.refresh()
    assert [error.exception_class for error in result.errors] == list(paths.values())
    assert [error.exception_class_path for error in result.errors] == list(paths)
    assert UPLOADED not in sys.modules
    error = result.errors[0]
    assert isinstance(error, FRAMEWORK.base.TaskError)
    assert pickle.loads(pickle.dumps(error)) == copy.copy(error) == error


class Outer:
    class Inner(Exception):
        pass


def test_a_module_is_not_asked_for_what_it_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    module = ModuleType("a_lazy_module")
    module.__dict__.update(here=1, __getattr__=asked.append)
    monkeypatch.setitem(sys.modules, "a_lazy_module", module)
    assert task_modules.imported("a_lazy_module.here") == 1
    assert task_modules.imported("a_lazy_module.there") is None
    assert task_modules.imported("a_lazy_module.here.real") is None
    assert asked == []


@pytest.mark.parametrize("path", [None, 5, ["tests.support.tasks.noop"]])
def test_a_body_whose_task_is_no_path_is_refused(using: Use, path: Any) -> None:
    using()
    enqueue_as_sender(path)
    with pytest.raises(ValueError, match="not that of a task"):
        drain()


@pytest.fixture
def app(folder: Path) -> Iterator[Path]:
    """An installed app of the project."""
    (folder / "an_app").mkdir()
    (folder / "an_app/__init__.py").touch()
    with modify_settings(INSTALLED_APPS={"append": "an_app"}):
        yield folder / "an_app"


@pytest.mark.parametrize(("module", "named"), [("tasks", {}), ("services", {"MODULES": ["an_app.services"]})])
def test_a_worker_imports_the_tasks_of_every_app_and_what_the_settings_name_at_its_start(
    using: Use, app: Path, module: str, named: dict[str, Any]
) -> None:
    (app / f"{module}.py").write_text(TASK)
    using(**named)
    startup.chosen_topics()
    assert f"an_app.{module}" in sys.modules


def test_whoever_reads_a_result_imports_the_tasks_of_the_apps_if_needed(using: Use, app: Path) -> None:
    (app / "tasks.py").write_text(TASK)
    using()
    key = enqueue_as_sender("an_app.tasks.doubles")
    assert "an_app.tasks" not in sys.modules
    assert FRAMEWORK.backends["default"].get_result(key).status == Status.READY


def test_a_task_of_any_other_module_runs_once_its_module_is_imported_or_declared(
    using: Use, app: Path
) -> None:
    (app / "services.py").write_text(TASK)
    using()
    startup.chosen_topics()
    key = enqueue_as_sender("an_app.services.doubles")
    with pytest.raises(UnknownTask, match=r"'an_app\.services\.doubles'.*AppConfig\.ready"):
        FRAMEWORK.backends["default"].get_result(key)
    import an_app.services  # type: ignore[import-not-found]

    assert FRAMEWORK.backends["default"].get_result(key).status == Status.READY
    result = an_app.services.doubles.enqueue(4)
    drain("tasks.default", raise_errors=False)
    result.refresh()
    assert result.return_value == 8


def test_a_module_that_the_settings_name_and_that_fails_stops_the_start(using: Use, app: Path) -> None:
    (app / "services.py").write_text("import nothing_of_this_name")
    using(MODULES=["an_app.services"])
    with pytest.raises(ConfigurationError, match=r"an_app\.services.*nothing_of_this_name"):
        startup.chosen_topics()
    (problem,) = checks.run_checks(tags=["rmq"])
    assert problem.id == "django_rmq.E089"
    assert "nothing_of_this_name" in problem.msg


def test_tasks_of_an_app_that_cannot_be_imported_stop_nothing_else(
    using: Use, app: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They may be those of another queue, which the project does not have."""
    (app / "tasks.py").write_text("import nothing_of_this_name")
    using()
    with caplog.at_level(logging.ERROR):
        assert startup.chosen_topics()
        assert startup.chosen_topics()
    (line,) = [record for record in caplog.records if record.name == "django_rmq.tasks"]
    assert "an_app.tasks" in line.getMessage()
    assert "nothing_of_this_name" in line.getMessage()
    assert line.rmq_event == "tasks_not_imported"  # type: ignore[attr-defined]


@pytest.mark.parametrize("given", ["an_app.services", ["a b"], [""], [1], ["a..b"]])
def test_what_names_no_modules_is_reported(using: Use, given: Any) -> None:
    using(MODULES=given)
    found = [each for each in checks.run_checks(tags=["rmq"]) if "MODULES" in each.msg]
    assert [each.id for each in found] == ["django_rmq.E003"]
