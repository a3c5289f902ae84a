"""Garbage collection in a worker's process: rarer, unless the project has its own mind about it."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest

from django_rmq.core.consumer.shared_notes import SharedNotes
from django_rmq.core.worker_processes.child_process import DONE_FOR_GOOD
from django_rmq.core.worker_processes.supervisor import THRESHOLD, Supervisor, collect_less
from django_rmq.worker import worker_process


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.freeze()
    gc.set_threshold(*thresholds)


@pytest.mark.parametrize(
    ("before", "after"), [(700, THRESHOLD), (50_000, 50_000), (0, 0)], ids=["default", "rarer", "off"]
)
def test_collections_are_rarer_but_never_more_frequent_than_the_project_wants(
    before: int, after: int
) -> None:
    gc.set_threshold(before, 7, 11)
    others = gc.get_threshold()[1:]
    collect_less()
    assert gc.get_threshold() == (after, *others)


def test_what_is_loaded_by_now_is_no_longer_looked_at() -> None:
    kept, before = list[list[int]]([] for _ in range(100)), gc.get_freeze_count()
    collect_less()
    assert gc.get_freeze_count() >= before + 100
    frozen = {id(one) for one in gc.get_objects()}
    assert not any(id(one) in frozen for one in kept)


def test_a_worker_does_so_before_it_starts_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    class Collected(Exception):
        pass

    def collected() -> None:
        raise Collected

    monkeypatch.setattr(worker_process, "collect_less", collected)
    monkeypatch.setattr(worker_process.WorkerProcess, "_beat", lambda _: None)
    # Nothing of it is there yet that could be started.
    process = object.__new__(worker_process.WorkerProcess)
    with pytest.raises(Collected):
        process.run()


def test_a_child_begins_with_what_the_parent_has_loaded_out_of_its_collections() -> None:
    """Otherwise its first collection would write to the pages that it shares, and make copies of all of them."""
    reader, writer = os.pipe()
    kept: list[list[int]] = [[] for _ in range(100)]

    def child(notes: SharedNotes) -> int:
        alive = {id(one) for one in gc.get_objects()}
        os.write(writer, str(sum(id(one) in alive for one in kept)).encode())
        return DONE_FOR_GOOD

    assert Supervisor(child, 1, lambda: SharedNotes(1)).run() == DONE_FOR_GOOD
    os.close(writer)
    assert os.read(reader, 100) == b"0"
    os.close(reader)
