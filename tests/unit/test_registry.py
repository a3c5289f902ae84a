"""Listeners: who may be one, one per topic, and where they are looked for."""

from __future__ import annotations

import asyncio
import functools
import importlib
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.apps import AppConfig, apps
from django.test import override_settings

from django_rmq import listener
from django_rmq.exceptions import ConfigurationError
from django_rmq.worker import listener_registry
from django_rmq.worker.listener_registry import DuplicateListener, check_arguments, isolated, listeners


@pytest.fixture(autouse=True)
def _no_listeners() -> Iterator[None]:
    with isolated():
        yield


def one(message: Any) -> None: ...


def two(message: Any) -> None: ...


def test_the_decorated_function_is_registered_and_returned_as_it_is() -> None:
    assert listener("orders")(one) is one
    found = listeners()["orders"]
    assert (found.topic, found.function, found.batch_size) == ("orders", one, None)
    assert found.location == f"{__name__}:{one.__code__.co_firstlineno}"


def test_a_batch_size_is_kept() -> None:
    listener("orders", batch_size=500)(one)
    assert listeners()["orders"].batch_size == 500


@pytest.mark.parametrize("batch_size", [0, -1, 1001, 1.0, "9", True])
def test_a_batch_size_out_of_bounds_is_refused_at_decoration(batch_size: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"from 1 to 1000, got "):
        listener("orders", batch_size=batch_size)


@pytest.mark.parametrize("topic", [one, None, "", 5])
def test_a_decorator_without_its_topic_says_how_it_is_written(topic: Any) -> None:
    with pytest.raises(ConfigurationError, match=r'@listener\("orders"\)'):
        listener(topic)


@pytest.mark.parametrize("thing", [5, "one", None])
def test_what_cannot_be_called_cannot_listen(thing: Any) -> None:
    with pytest.raises(ConfigurationError, match="needs a function"):
        listener("orders")(thing)


def test_generators_are_refused_for_calling_one_runs_nothing() -> None:
    def yielding(message: Any) -> Iterator[int]:
        yield 1

    async def yielding_later(message: Any) -> AsyncIterator[int]:
        yield 1

    class Yields:
        def __call__(self, message: Any) -> Iterator[int]:
            yield 1

    for generator in (yielding, yielding_later, functools.partial(yielding), Yields()):
        with pytest.raises(ConfigurationError, match="generator"):
            listener("orders")(generator)
    assert listeners() == {}


@pytest.mark.parametrize(
    "function", [lambda: None, lambda a, b: None, lambda *, message: None], ids=["none", "two", "keyword"]
)
def test_a_listener_takes_one_argument(function: Any) -> None:
    with pytest.raises(ConfigurationError, match="cannot be called with one message"):
        listener("orders")(function)
    with pytest.raises(ConfigurationError, match="cannot be called with a list of messages"):
        listener("orders", batch_size=2)(function)


# Since Python 3.14 annotations are evaluated when somebody asks for them, as if all modules had this import.
ANNOTATIONS_LATER = "" if sys.version_info >= (3, 14) else "from __future__ import annotations"


@pytest.mark.parametrize("batch_size", [None, 5])
def test_the_types_of_a_listener_may_exist_for_type_checkers_only(batch_size: int | None) -> None:
    source = f"{ANNOTATIONS_LATER}\ndef handle(message: OnlyForTypeCheckers) -> None: ..."
    found: dict[str, Any] = {"__name__": "shop"}
    exec(compile(source, "shop.py", "exec", dont_inherit=True), found)
    listener("orders", batch_size=batch_size)(found["handle"])
    assert listeners()["orders"].function is found["handle"]
    with pytest.raises(TypeError):
        check_arguments(found["handle"], 1, 2)


def test_methods_partials_and_objects_may_listen() -> None:
    class Shop:
        def handle(self, message: Any) -> None: ...

        def __call__(self, message: Any) -> None: ...

    for topic, function in (
        ("a", Shop().handle),
        ("b", functools.partial(lambda shop, message: None, 7)),
        ("c", Shop()),
        ("d", lambda message, more=None: None),
        ("e", print),
    ):
        listener(topic)(function)
    assert sorted(listeners()) == ["a", "b", "c", "d", "e"]


def test_a_coroutine_function_is_run_to_its_end() -> None:
    async def later(message: Any) -> str:
        await asyncio.sleep(0)
        return f"{message} handled"

    class Later:
        async def __call__(self, message: Any) -> str:
            return await later(message)

    assert listener("a")(later) is later
    listener("b")(functools.partial(later))
    listener("c")(Later())
    assert [found.function("x") for found in listeners().values()] == ["x handled"] * 3


def test_a_second_listener_of_a_topic_is_refused_and_both_are_named() -> None:
    listener("orders")(one)
    with pytest.raises(DuplicateListener) as caught:
        listener("orders")(two)
    for function in (one, two):
        assert f"{__name__}.{function.__name__}" in str(caught.value)
        assert f"{__name__}:{function.__code__.co_firstlineno}" in str(caught.value)
    assert listeners()["orders"].function is one


def test_the_same_function_after_a_reload_takes_its_place(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "reloaded_shop.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("reloaded_shop")
    first = listeners()["orders"].function
    (tmp_path / "reloaded_shop.py").write_text("\n" + SOURCE)
    importlib.reload(module)
    assert listeners()["orders"].function is not first
    assert listeners()["orders"].location == "reloaded_shop:3"
    sys.modules.pop("reloaded_shop")


def test_what_is_registered_in_isolation_is_gone_afterwards() -> None:
    listener("outer")(one)
    with isolated():
        assert listeners() == {}
        listener("inner")(two)
    with isolated(empty=False):
        listener("added")(two)
        assert sorted(listeners()) == ["added", "outer"]
    assert sorted(listeners()) == ["outer"]


SOURCE = "from django_rmq import listener\n@listener('orders')\ndef handle(message): ...\n"
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Let apps be installed that have such listeners."""

    def installed(**sources: str) -> None:
        found = []
        for name, source in sources.items():
            (tmp_path / name).mkdir()
            (tmp_path / name / "__init__.py").touch()
            (tmp_path / name / "listeners.py").write_text(source)
            monkeypatch.delitem(sys.modules, f"{name}.listeners", raising=False)
            found.append(AppConfig(name, importlib.import_module(name)))
        monkeypatch.setattr(apps, "get_app_configs", lambda: found)

    monkeypatch.syspath_prepend(tmp_path)
    return installed


def test_listeners_of_installed_apps_are_found(install: Install) -> None:
    install(found_shop=SOURCE)
    listener_registry.autodiscover()
    assert listeners()["orders"].name == "found_shop.listeners.handle"


def test_one_module_that_fails_does_not_hide_the_others(install: Install) -> None:
    install(broken_shop="import no_such_library\n", sound_shop=SOURCE)
    ((module, error),) = listener_registry.discover()
    assert (module, type(error)) == ("broken_shop.listeners", ModuleNotFoundError)
    assert list(listeners()) == ["orders"]
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        listener_registry.autodiscover()


def test_listeners_first_imported_in_isolation_are_not_lost(install: Install) -> None:
    install(late_shop=SOURCE)
    with isolated():
        listener_registry.autodiscover()
        assert listeners() == {}
    assert list(listeners()) == ["orders"]


def test_without_a_module_name_nothing_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apps, "get_app_configs", lambda: pytest.fail("looked for listeners"))
    with override_settings(RMQ={"BROKER": "memory", "AUTODISCOVER": None}):
        assert listener_registry.discover() == []
