"""Processes that run tests against mutants: each has collected the tests, and has a Redis of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue

import pytest

from tests.support.servers import RedisServer

ROOT = Path(__file__).parents[2]


class Runner:
    """A process of a module that serves runs of tests (see `mutants.serve`)."""

    def __init__(self, module: str, files: Iterable[str], url: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *files],
            cwd=ROOT,
            env={**os.environ, "REDIS_URL": url, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def killer(self, name: str, test: str) -> str:
        """Return the first case of a test that fails without the rule; empty: it survives. No name: with all rules."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps([name, test]) + "\n")
        self.process.stdin.flush()
        asked, killer = json.loads(self.process.stdout.readline())
        assert asked, f"there is no {test}"
        return str(killer)

    def close(self) -> None:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()


def chosen(request: pytest.FixtureRequest) -> set[str]:
    """Return the mutants that the cases of this module ask for."""
    return {
        item.callspec.params["name"]  # type: ignore[attr-defined]
        for item in request.session.items
        if "name" in getattr(getattr(item, "callspec", None), "params", {}) and item.module is request.module  # type: ignore[attr-defined]
    }


@contextmanager
def running(
    processes: int, module: str, caught_by: Mapping[str, tuple[str, ...]], **environment: str
) -> Iterator[dict[str, Future[list[str]]]]:
    """Run the tests of each mutant in a few processes at once; yield what will come of them: the killer in each test."""
    files = sorted({test.partition("::")[0] for tests in caught_by.values() for test in tests})
    idle: SimpleQueue[Runner] = SimpleQueue()

    def judge(name: str) -> list[str]:
        runner = idle.get()
        try:
            return [runner.killer(name, test) for test in caught_by[name]]
        finally:
            idle.put(runner)

    with ExitStack() as stack:
        for _ in range(processes):
            server = stack.enter_context(RedisServer())
            runner = Runner(module, files, server.url, **environment)
            stack.callback(runner.close)
            idle.put(runner)
        with ThreadPoolExecutor(processes) as pool:
            yield {name: pool.submit(judge, name) for name in caught_by}
            pool.shutdown(cancel_futures=True)
