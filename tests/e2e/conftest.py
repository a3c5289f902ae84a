"""Starting worker processes, and ending them after the test whatever happened."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.load import LEDGER, Load
from tests.e2e.processes import Happened, Start, WorkerProcess, environment_of
from tests.support.brokers import Broker
from tests.support.workers import client_of


@pytest.fixture
def start(tmp_path: Path, redis_url: str, prefix: str) -> Iterator[Start]:
    """Start workers; those that still run after the test are killed. None has made an illegal transition of a slot."""
    started: list[WorkerProcess] = []

    def start_one(*arguments: str, url: str = redis_url, **environment: Any) -> WorkerProcess:
        worker = WorkerProcess(tmp_path, url, prefix, *arguments, **environment)
        started.append(worker)
        return worker

    yield start_one
    for worker in started:
        worker.kill()
    illegal = tmp_path / "illegal-transitions"
    assert not illegal.exists(), illegal.read_text()


@pytest.fixture
def broker(redis_url: str, prefix: str) -> Iterator[Broker]:
    client = client_of(redis_url)
    yield Broker(client, prefix)
    client.close()


@pytest.fixture
def load(broker: Broker, tmp_path: Path) -> Load:
    return Load(broker, tmp_path, LEDGER)


@pytest.fixture
def environment(tmp_path: Path, redis_url: str, prefix: str) -> dict[str, str]:
    """The environment of a process of the tests' project."""
    return environment_of(tmp_path, redis_url, prefix)


@pytest.fixture
def happened(tmp_path: Path) -> Happened:
    return Happened(tmp_path)
