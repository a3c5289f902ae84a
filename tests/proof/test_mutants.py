"""Each rule of the scripts, switched off, is noticed by a suite; a mutant that survives is a test that is missing.

Two processes work ahead, each with a Redis of its own; a test waits for the verdict on its mutant.
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
from typing import Any, NamedTuple

import pytest

from django_rmq.core import scripts
from tests.proof.mutants import GONE, MUTANTS, As, If, Mutant, marks, switched_off
from tests.servers import RedisServer

ROOT = Path(__file__).parents[2]
PROCESSES = 2

CONTRACT = "tests/contract"
SUITES: dict[str, list[str]] = {
    "contract": [CONTRACT, "-k", "redis"],
    "lockstep": ["tests/stateful/test_lockstep.py", "--hypothesis-profile=mutants"],
    "faults": ["tests/integration/test_faults.py"],
    "fairness": ["tests/integration/test_fairness.py"],
    "quotas": ["tests/unit/test_quota_scripts.py"],
    "schedules": ["tests/unit/test_schedule_scripts.py"],
}
"""Whom to ask when the suite that a mutant names does not see it, the cheapest first."""

KILLED = re.compile(r"^(?:FAILED|ERROR) (tests/\S+::\S+)", re.MULTILINE)
"""A test that failed, or one whose books did not balance at its end."""


class Verdict(NamedTuple):
    killer: str
    """The first test that failed; empty: the mutant survives."""
    trouble: str = ""
    """What came of a run that ended otherwise than by failed or passed tests."""


class Runner:
    """A process that has collected the tests that mutants name, and runs them against mutants, with its own Redis."""

    def __init__(self, url: str, files: list[str]) -> None:
        self.url = url
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.proof.mutants", "serve", *files],
            cwd=ROOT,
            env={**os.environ, "REDIS_URL": url, "BROKERS": "redis"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def verdict(self, name: str) -> Verdict:
        """Return what the test says that the mutant names; if it sees nothing, what the suites say."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps([name, MUTANTS[name].caught_by]) + "\n")
        self.process.stdin.flush()
        asked, killer = json.loads(self.process.stdout.readline())
        if killer.startswith("tests/"):
            return Verdict(killer)
        if killer or not asked:
            return Verdict("", f"{MUTANTS[name].caught_by}: {killer or 'there is no such test'}")
        for suite in SUITES.values():
            code, output = run(name, suite, self.url)
            found = KILLED.search(output)
            if code == pytest.ExitCode.TESTS_FAILED and found:
                return Verdict(found[1])
            if code != pytest.ExitCode.OK:
                return Verdict("", output[-4_000:])
        return Verdict("")

    def close(self) -> None:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()


def run(name: str, arguments: list[str], url: str) -> tuple[int, str]:
    """Run a suite against a mutant; return pytest's exit code and output. ``name`` empty: the scripts as they are."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.proof.mutants", name, *arguments],
        cwd=ROOT,
        env={**os.environ, "REDIS_URL": url},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[Any]]]:
    """The verdicts to come on the mutants that were asked for; under "", what the suites say of the scripts."""
    chosen = {
        item.callspec.params["name"]  # type: ignore[attr-defined]
        for item in request.session.items
        if "name" in getattr(getattr(item, "callspec", None), "params", {}) and item.module is request.module  # type: ignore[attr-defined]
    }
    files = sorted({MUTANTS[name].caught_by.partition("::")[0] for name in chosen})
    idle: SimpleQueue[Runner] = SimpleQueue()
    servers = [RedisServer() for _ in range(PROCESSES)]
    runners: list[Runner] = []

    def judge(name: str) -> Verdict:
        runner = idle.get()
        try:
            return runner.verdict(name)
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
def test_a_rule_that_is_switched_off_is_noticed(name: str, verdicts: dict[str, Future[Verdict]]) -> None:
    verdict = verdicts[name].result(timeout=600)
    assert not verdict.trouble, verdict.trouble
    assert verdict.killer, f"nothing notices: {MUTANTS[name].rule}"
    print(f"\n{name}: {verdict.killer}", end="")


@pytest.mark.proof
@pytest.mark.deep
@pytest.mark.parametrize("suite", SUITES)
def test_the_suites_have_nothing_against_the_scripts_as_they_are(suite: str, redis_url: str) -> None:
    code, output = run("", SUITES[suite], redis_url)
    assert code == pytest.ExitCode.OK, output[-4_000:]


def texts() -> dict[str, str]:
    folder = Path(scripts.__file__).parent
    names = [path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.lua")]
    return {name: scripts._read(name.removeprefix("slot/")) for name in names}


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
