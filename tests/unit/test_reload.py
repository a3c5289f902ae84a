"""``--reload``: changed code is tried out beside the supervisor, which waits for nothing meanwhile."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from django.utils import autoreload

from django_rmq.worker import reload
from django_rmq.worker.reload import SourceWatch
from django_rmq.worker.startup import READY
from tests.e2e.processes import is_gone
from tests.support.workers import LONG, eventually

LOADING = f"""
import os, pathlib, sys, time
here = pathlib.Path(sys.argv[1])
(here / f"loads {{os.getpid()}}").touch()
while not (here / "go").exists():
    time.sleep(0.01)
print("{READY} work")
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only file of the project, whose loading waits until there is a file ``go`` beside it."""
    source = tmp_path / "listeners.py"
    source.touch()
    monkeypatch.setattr(autoreload, "iter_all_python_module_files", lambda: frozenset([source]))
    arguments = [sys.executable, "-c", LOADING, str(tmp_path)]
    monkeypatch.setattr(autoreload, "get_child_arguments", lambda: arguments)
    monkeypatch.setattr(reload, "TRIAL_SECONDS", LONG)
    return source


@pytest.fixture
def watch(source: Path) -> Iterator[SourceWatch]:
    watch = SourceWatch()
    assert not watch(), "nothing has changed"
    yield watch
    watch.end_trial()


@pytest.fixture
def change(source: Path) -> Callable[[], None]:
    """Change the file, by the clock that files have."""

    def change() -> None:
        at = source.stat().st_mtime_ns + 1_000_000_000
        os.utime(source, ns=(at, at))

    return change


def loading(source: Path) -> set[int]:
    """The processes that load the code, or have loaded it."""
    return {int(path.name.partition(" ")[2]) for path in source.parent.glob("loads *")}


def test_a_call_does_not_wait_for_code_that_blocks(
    watch: SourceWatch, source: Path, change: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    change()
    assert not watch()
    eventually(lambda: loading(source), "loading")
    assert not watch()
    (source.parent / "go").touch()
    eventually(watch, "the code being loaded")
    assert "cannot be loaded" not in caplog.text
    assert not watch(), "it is reported once"


def test_code_that_blocks_for_too_long_cannot_be_loaded_and_is_tried_again(
    watch: SourceWatch,
    source: Path,
    change: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    change()
    assert not watch()
    eventually(lambda: loading(source), "loading")
    monkeypatch.setattr(reload, "TRIAL_SECONDS", 0.0)
    monkeypatch.setattr(reload, "AGAIN_SECONDS", 0.0)
    watch._trial._until = 0.0  # type: ignore[union-attr]
    assert not watch()
    assert "keeps running: loading takes longer than 0 s" in caplog.text
    [blocked] = loading(source)
    assert is_gone(blocked)
    monkeypatch.setattr(reload, "TRIAL_SECONDS", LONG)
    (source.parent / "go").touch()
    eventually(watch, "the second trial")


def test_a_change_during_a_trial_begins_another_one(
    watch: SourceWatch, source: Path, change: Callable[[], None]
) -> None:
    change()
    assert not watch()
    eventually(lambda: loading(source), "loading")
    [before] = loading(source)
    change()
    assert not watch()
    assert is_gone(before)
    (source.parent / "go").touch()
    eventually(watch, "the code being loaded")
    assert len(loading(source)) == 2


def test_a_trial_ends_with_the_command(watch: SourceWatch, source: Path, change: Callable[[], None]) -> None:
    change()
    assert not watch()
    eventually(lambda: loading(source), "loading")
    watch.end_trial()
    assert all(map(is_gone, loading(source)))
