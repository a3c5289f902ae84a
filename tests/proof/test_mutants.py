"""Each rule of the scripts, switched off, is noticed by the test that its mutant names; a survivor is a test that is missing.

Two processes work ahead, each with a Redis of its own; a test waits for what came of its mutant.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import pytest

from django_rmq.core import lua
from tests.proof.mutants import GONE, MUTANTS, As, If, Mutant, marks, switched_off
from tests.support.servers import RedisServer

ROOT = Path(__file__).parents[2]
PROCESSES = 2


class Runner:
    """A process that has collected the tests that mutants name, and runs them against mutants, with its own Redis."""

    def __init__(self, url: str, files: list[str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.proof.mutants", *files],
            cwd=ROOT,
            env={**os.environ, "REDIS_URL": url, "BROKERS": "redis"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def killer(self, name: str) -> str:
        """Return the first case that fails without the rule, of those that the mutant names; empty: it survives."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps([name, MUTANTS[name].caught_by]) + "\n")
        self.process.stdin.flush()
        asked, killer = json.loads(self.process.stdout.readline())
        assert asked, f"there is no {MUTANTS[name].caught_by}"
        return str(killer)

    def close(self) -> None:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()


@pytest.fixture(scope="module")
def killers(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[str]]]:
    """Who notices each of the mutants that were asked for."""
    chosen = {
        item.callspec.params["name"]  # type: ignore[attr-defined]
        for item in request.session.items
        if "name" in getattr(getattr(item, "callspec", None), "params", {}) and item.module is request.module  # type: ignore[attr-defined]
    }
    files = sorted({MUTANTS[name].caught_by.partition("::")[0] for name in chosen})
    idle: SimpleQueue[Runner] = SimpleQueue()
    servers = [RedisServer() for _ in range(PROCESSES)]
    runners: list[Runner] = []

    def judge(name: str) -> str:
        runner = idle.get()
        try:
            return runner.killer(name)
        finally:
            idle.put(runner)

    try:
        for server in servers:
            server.__enter__()
            runners.append(Runner(server.url, files))
            idle.put(runners[-1])
        with ThreadPoolExecutor(PROCESSES) as pool:
            yield {name: pool.submit(judge, name) for name in MUTANTS if name in chosen}
            pool.shutdown(cancel_futures=True)
    finally:
        for runner in runners:
            runner.close()
        for server in servers:
            if server.running:
                server.__exit__()


@pytest.mark.proof
@pytest.mark.parametrize("name", MUTANTS)
def test_a_rule_that_is_switched_off_is_noticed(name: str, killers: dict[str, Future[str]]) -> None:
    killer = killers[name].result(timeout=600)
    assert killer.startswith("tests/"), f"{killer or 'nothing notices'}: {MUTANTS[name].rule}"


def texts() -> dict[str, str]:
    folder = Path(lua.__file__).parent
    names = [path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.lua")]
    return {name: lua._read(name.removeprefix("slot/")) for name in names}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_changes_one_file(name: str) -> None:
    changed = [file for file, text in texts().items() if switched_off(name, text) != text]
    assert len(changed) == 1
    assert re.fullmatch(r"[A-Za-z].*\.", MUTANTS[name].rule)
    assert ("[" in MUTANTS[name].caught_by) == MUTANTS[name].caught_by.endswith("]")


def test_every_mark_has_a_mutant_and_every_file_of_a_slot_a_mark() -> None:
    marked = {file: set(marks(text)) for file, text in texts().items()}
    assert set().union(*marked.values()) == {mutant.mark or name for name, mutant in MUTANTS.items()}
    assert [file for file, found in marked.items() if file.startswith(("slot/", "_")) and not found] == []


def test_a_mark_holds_for_its_line_or_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "if a then -- rule: x\n  b = 1\n  -- rule: y\n  c = 1\nend"
    for name, switch, switched in [
        ("x", If("false"), "if false then -- rule: x\n  b = 1\n  -- rule: y\n  c = 1\nend"),
        ("y", As("c = 2"), "if a then -- rule: x\n  b = 1\n  -- rule: y\n  c = 2\nend"),
        ("y", GONE, "if a then -- rule: x\n  b = 1\n  -- rule: y\n\nend"),
    ]:
        monkeypatch.setitem(MUTANTS, name, Mutant(switch, "A rule.", "a test"))
        assert switched_off(name, text) == switched
    monkeypatch.setitem(MUTANTS, "y", Mutant(If("false"), "A rule.", "a test"))
    with pytest.raises(ValueError, match="no condition"):
        switched_off("y", text)
