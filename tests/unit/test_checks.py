"""System checks: what a project is told before anything runs."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core import checks
from django.test import override_settings

from django_rmq import listener, schedule, typed_bodies
from django_rmq.checks import (
    check_bodies,
    check_identity,
    check_listeners,
    check_package,
    check_settings,
    check_zookeeper,
    system_checks,
)
from django_rmq.checks.system_checks import sentence
from django_rmq.exceptions import ConfigurationError
from django_rmq.worker import listener_registry
from django_rmq.worker.listener_registry import FailedModule, isolated
from tests.support.embedded_server import free_port

ORDERS = {"orders": {"TYPE": "fixed_time"}}


@pytest.fixture(autouse=True)
def _no_listeners(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with isolated():
        monkeypatch.setattr(listener_registry, "discover", list)
        yield


def handle(message: Any) -> None: ...


def told(check: Any, **rmq: Any) -> list[checks.CheckMessage]:
    with override_settings(RMQ={"BROKER": "memory", **rmq}):
        found: list[checks.CheckMessage] = check()
        return found


def ids(found: list[checks.CheckMessage]) -> list[str | None]:
    return [message.id for message in found]


def test_a_sound_project_is_told_nothing() -> None:
    listener("orders")(handle)
    assert told(check_settings, TOPICS=ORDERS) == told(check_listeners, TOPICS=ORDERS) == []


def install(folder: Path, *, requires: str, with_files: bool = True) -> None:
    """Write an installed package ``django-rmq`` into ``folder``, as pip does."""
    installed = folder / "django_rmq-1.0.5.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: django-rmq\nVersion: 1.0.5\nRequires-Dist: {requires}\n"
    )
    (installed / "RECORD").write_text("django_rmq/producer.py,,\ndjango_rmq-1.0.5.dist-info/METADATA,,\n")
    if with_files:
        (folder / "django_rmq").mkdir()
        (folder / "django_rmq" / "producer.py").touch()


def test_another_projects_package_with_our_import_name_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, requires="pika<2.0,>=1.4.1")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    (error,) = check_package()
    assert error.id == "django_rmq.E014" and "django-rmq 1.0.5" in error.msg
    assert error.hint == "pip uninstall django-rmq django-redis-rmq, then: pip install django-redis-rmq"


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"requires": "pika<2.0,>=1.4.1", "with_files": False}, id="files are gone"),
        pytest.param({"requires": "django-redis>=6"}, id="an older version of this project"),
    ],
)
def test_metadata_that_were_left_behind_are_no_error(
    how: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, **how)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert check_package() == []


def test_old_metadata_of_this_project_do_not_hide_the_other_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, requires in (("old", "django-redis>=6"), ("other", "pika>=1.4.1")):
        (tmp_path / name).mkdir()
        install(tmp_path / name, requires=requires)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "old"), *sys.path, str(tmp_path / "other")])
    assert ids(check_package()) == ["django_rmq.E014"]


def test_our_own_package_is_not_taken_for_the_other_one() -> None:
    assert check_package() == []


@pytest.mark.parametrize("tag", ["django_rmq", "rmq"])
def test_the_app_registers_its_checks_with_its_label_as_a_tag_and_a_short_one(tag: str) -> None:
    with override_settings(RMQ={"BROKER": "memory", "TOPICS": ORDERS, "COLOUR": 1}):
        assert ids(checks.run_checks(tags=[tag])) == ["django_rmq.E002"]


def test_a_check_is_silenced_by_its_id() -> None:
    (warning,) = told(check_listeners)
    assert not warning.is_silenced()
    with override_settings(SILENCED_SYSTEM_CHECKS=["django_rmq.W002"]):
        assert warning.is_silenced()


def test_errors_of_the_settings_come_with_their_hints() -> None:
    (error,) = told(check_settings, TOPICS=ORDERS, TOPIC={})
    assert error.level == checks.ERROR
    assert (error.id, error.msg) == (
        "django_rmq.E002",
        "RMQ has the unknown key 'TOPIC'; did you mean 'TOPICS'?",
    )
    assert error.hint
    assert "TOPICS" in error.hint


def test_listeners_are_not_looked_at_while_the_settings_are_wrong() -> None:
    assert told(check_listeners, TOPICS={"orders": {"TYPE": "lifo"}}) == []


def test_what_bodies_as_identities_cannot_do_is_said_where_nobody_has_chosen_them() -> None:
    topics = {
        "clicks": {"TYPE": "range_merge", "TIME_RANGE": "1s"},
        "chosen": {"TYPE": "priority", "IDENTITY": "body"},
        "keyed": {"TYPE": "fixed_time", "IDENTITY": "key"},
        "jobs": {},
    }
    (note,) = told(check_identity, TOPICS=topics)
    assert (note.id, note.level) == ("django_rmq.I003", checks.INFO)
    assert "for clicks: equal bodies" in note.msg and "headers=" in note.msg
    assert told(check_identity, TOPICS=topics, TOPIC_DEFAULTS={"IDENTITY": "body"}) == []
    assert told(check_identity, TOPICS={"jobs": {}}) == []
    assert told(check_identity, TOPICS={"jobs": {"TYPE": "lifo"}}) == []
    assert check_identity in set[Any](checks.registry.registry.get_checks(include_deployment_checks=True))
    assert check_identity not in set[Any](checks.registry.registry.get_checks())


def test_no_topics_at_all_is_a_warning() -> None:
    (warning,) = told(check_listeners)
    assert (warning.id, warning.level) == ("django_rmq.W002", checks.WARNING)
    assert "django_rmq.tasks.RMQBackend" in str(warning.hint)


def test_a_project_whose_only_topics_belong_to_schedules_is_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    def import_listeners() -> list[FailedModule]:
        schedule("nightly", every="1d")(handle)
        return []

    monkeypatch.setattr(listener_registry, "discover", import_listeners)
    assert told(check_settings) == []
    assert told(check_listeners) == []


@pytest.mark.parametrize(
    "rmq",
    [
        {"COORDINATOR": "no.such.Coordinator"},
        {"API": {"PERMISSION": "math.pi"}},
        {"ADMIN": {"FORMATTER": "math.no_such_function"}},
        {"ADMIN": {"FORMATTER": {"orders": "no_such_module.hide"}}},
    ],
    ids=str,
)
def test_a_dotted_path_that_leads_nowhere_is_an_error(rmq: dict[str, Any]) -> None:
    assert ids(told(check_settings, TOPICS=ORDERS, **rmq)) == ["django_rmq.E008"]


@pytest.mark.parametrize(
    ("key", "value"), [("FORMATTER", {"order": "json.dumps"}), ("COLUMNS", {"order": ["city"]})]
)
def test_a_topic_of_the_admin_that_is_not_declared_is_an_error(key: str, value: object) -> None:
    (error,) = told(check_settings, TOPICS=ORDERS, ADMIN={key: value})
    assert error.id == "django_rmq.E004"
    assert f'["{key}"] names' in error.msg and "did you mean 'orders'?" in error.msg


def test_the_topic_of_a_schedule_has_a_formatter_and_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    def import_listeners() -> list[FailedModule]:
        schedule("nightly", every="1d")(handle)
        return []

    monkeypatch.setattr(listener_registry, "discover", import_listeners)
    admin = {"FORMATTER": {"nightly": "json.dumps"}, "COLUMNS": {"nightly": ["city"]}}
    assert told(check_settings, ADMIN=admin) == []


def test_an_error_of_a_module_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    def import_string(path: str) -> object:
        raise ValueError("x" * 1_000 + "\nmore")

    monkeypatch.setattr(system_checks, "import_string", import_string)
    monkeypatch.setattr(typed_bodies, "import_string", import_string)
    typed_bodies.adapter_of.cache_clear()
    topics = {"orders": {**ORDERS["orders"], "BODY": "shop.Order"}}
    found = [
        *told(check_settings, TOPICS=ORDERS, ADMIN={"FORMATTER": "shop.hide"}),
        *told(check_bodies, TOPICS=topics),
    ]
    assert ids(found) == ["django_rmq.E008", "django_rmq.E101"]
    assert all("ValueError: xxx" in one.msg and len(one.msg) < 300 for one in found)


def test_a_dotted_path_that_leads_somewhere_is_fine() -> None:
    rmq = {"ADMIN": {"FORMATTER": {"orders": "json.dumps"}}, "COORDINATOR": "collections.Counter"}
    assert told(check_settings, TOPICS=ORDERS, **rmq) == []


def test_a_topic_without_a_listener_is_a_warning_unless_it_says_so() -> None:
    (warning,) = told(check_listeners, TOPICS=ORDERS)
    assert (warning.id, warning.level) == ("django_rmq.W001", checks.WARNING)
    assert warning.hint
    assert '@listener("orders")' in warning.hint
    assert told(check_listeners, TOPICS={"orders": {"TYPE": "fixed_time", "LISTENER": False}}) == []
    assert told(check_listeners, TOPICS=ORDERS, AUTODISCOVER=None) == []


def test_a_thousand_topics_without_a_listener_are_one_warning() -> None:
    many = {f"topic{number:03}": {"TYPE": "fixed_time"} for number in range(1_000)}
    (warning,) = told(check_listeners, TOPICS=many)
    assert warning.id == "django_rmq.W001"
    assert warning.msg.startswith('1000 topics have no listener: "topic000", "topic001"')
    assert "and 990 more" in warning.msg and len(warning.msg) < 300
    few = dict(list(many.items())[:10])
    assert ids(told(check_listeners, TOPICS=few)) == ["django_rmq.W001"] * 10


@pytest.mark.parametrize("text", ["It failed", "It failed.", "It failed.. "])
def test_a_text_of_a_server_ends_with_one_full_stop(text: str) -> None:
    assert sentence(text) == "It failed."


def test_a_listener_for_an_unknown_topic_is_an_error_that_guesses() -> None:
    listener("order")(handle)
    found = told(check_listeners, TOPICS=ORDERS)
    assert ids(found) == ["django_rmq.E023", "django_rmq.W001"]
    assert "did you mean 'orders'?" in found[0].msg
    assert f"{__name__}:{handle.__code__.co_firstlineno}" in found[0].msg


def test_a_listener_for_a_topic_that_has_none_is_an_error() -> None:
    listener("orders")(handle)
    topics = {"orders": {"TYPE": "fixed_time", "LISTENER": False}}
    assert ids(told(check_listeners, TOPICS=topics)) == ["django_rmq.E024"]


def logged(function: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(function)
    def call(*arguments: object) -> object:
        return function(*arguments)

    return call


def unwrapped(function: Callable[..., object]) -> Callable[..., object]:
    def call(*arguments: object) -> object:
        return function(*arguments)

    return call


class Counted:
    """A decorator that is a class."""

    def __init__(self, function: Callable[..., object]) -> None:
        self.inner = function

    def __call__(self, *arguments: object) -> object:
        return self.inner(*arguments)


def take(message: object) -> None: ...


async def atake(message: object) -> None: ...


class Taker:
    def take(self, message: object) -> None: ...

    def __call__(self, message: object) -> None: ...


def test_a_decorator_above_that_of_the_listener_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def told_of(name: str, registered: Callable[..., object], in_module: object) -> list[str | None]:
        monkeypatch.setattr(sys.modules[__name__], name, in_module)
        with isolated():
            listener("orders")(registered)
            return ids(told(check_listeners, TOPICS=ORDERS))

    plain, coroutine = take, atake
    above, twice = logged(plain), logged(logged(plain))
    assert told_of("take", plain, above) == told_of("take", plain, twice) == ["django_rmq.W025"]
    assert told_of("atake", coroutine, logged(coroutine)) == ["django_rmq.W025"]
    for decorator in (unwrapped, Counted, functools.partial, lambda each: Counted(unwrapped(each))):
        assert told_of("take", plain, decorator(plain)) == ["django_rmq.W025"]
    assert told_of("take", above, above) == told_of("take", plain, plain) == []
    assert told_of("take", plain, None) == told_of("take", plain, logged(print)) == []
    assert told_of("take", functools.partial(plain), above) == []


def test_what_is_no_function_of_a_module_is_not_taken_for_covered() -> None:
    for registered in (Taker(), Taker().take, lambda message: None, print, logged(print)):
        with isolated():
            listener("orders")(registered)
            assert ids(told(check_listeners, TOPICS=ORDERS)) == []


def test_listeners_that_do_not_load_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def failures() -> list[FailedModule]:
        found = []
        for i, attempt in enumerate(
            (
                lambda: __import__("no_such_library"),
                lambda: (listener("orders")(handle), listener("orders")(print)),
                lambda: listener("orders", batch_size=0),
            )
        ):
            try:
                attempt()
            except (ImportError, ConfigurationError) as error:
                found.append(FailedModule(f"app{i}.listeners", error))
        return found

    monkeypatch.setattr(listener_registry, "discover", failures)
    found = told(check_listeners, TOPICS={**ORDERS, "others": {"TYPE": "priority"}})
    assert ids(found) == ["django_rmq.E020", "django_rmq.E021", "django_rmq.E022"]
    for i, message in enumerate(found):
        assert f"app{i}.listeners" in message.msg


def test_the_example_project_passes_its_checks_and_loads_listeners_only_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from subprocess import run

    code = (
        "import django, sys; django.setup()\n"
        "names = ['example_project.orders.listeners', 'example_project.prices.listeners']\n"
        "names.append('django_rmq.worker.listener_registry')\n"
        "print([name in sys.modules for name in names[:2]])\n"
        "from django.core.checks import run_checks\n"
        "print(run_checks(tags=['rmq']))\n"
        "print([name in sys.modules for name in names[:2]])\n"
    )
    monkeypatch.setenv("DJANGO_SETTINGS_MODULE", "example_project.settings")
    answer = run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert answer.stdout.splitlines() == ["[False, False]", "[]", "[True, True]"]


def test_zookeeper_is_asked_only_where_it_is_the_coordinator() -> None:
    assert told(check_zookeeper, TOPICS=ORDERS) == []
    assert check_zookeeper not in set[Any](checks.registry.registry.get_checks())
    assert check_zookeeper in set[Any](checks.registry.registry.get_checks(include_deployment_checks=True))


def test_a_zookeeper_that_does_not_answer_is_an_error() -> None:
    zookeeper = {"HOSTS": f"127.0.0.1:{free_port()}"}
    [error] = told(check_zookeeper, TOPICS=ORDERS, BROKER="redis", REDIS="redis://h/1", ZOOKEEPER=zookeeper)
    assert error.id == "django_rmq.E030"
    assert f"ZooKeeper at {zookeeper['HOSTS']} does not answer" in error.msg
