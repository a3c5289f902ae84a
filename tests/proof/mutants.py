"""The scripts with one rule of `mutants.txt` switched off each, and a way to run tests against them.

    python -m tests.proof.mutants FILE...

serves runs of the tests of these files (see `serve`). Nothing of this is in the package: the texts that
`django_rmq.core.lua` reads are changed on their way in.
"""

from __future__ import annotations

import gc
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NamedTuple

import pytest

GONE = "gone"
"""The marked lines go."""


class If(str):
    """The condition of the marked line reads so."""

    __slots__ = ()


class As(str):
    """The marked line reads so."""

    __slots__ = ()


_CONDITION = re.compile(r"((?:if|elseif|while) )(.*?)( (?:then|do)\b)")


class Mutant(NamedTuple):
    """A rule switched off, at the lines or statements that are marked for it: ``rule: name`` in a comment.

    The mark is at the end of its line, or on a line of its own before it.
    """

    switch: Any
    """`GONE`, `If`, `As`, or one of those that `python_mutants` adds."""
    rule: str
    """The rule that dies, in a sentence."""
    caught_by: tuple[str, ...]
    """Who notices, all of them: a case, or some case of a test or of a file."""
    mark: str = ""
    """Its mark, where that is not its own name: several rules share a line."""


SWITCHES: dict[str, Callable[[str], Any]] = {"gone": lambda _: GONE, "as": As, "if": If}
_ENTRY = re.compile(r"(\w+)(?: \((\w+)\))?: (\w+) ?(.*)\n  (.+)((?:\n  tests/.+)+)")


def read_mutants(name: str, switches: dict[str, Callable[[str], Any]]) -> dict[str, Mutant]:
    """Return the mutants of a file beside this one, whose head says how they are written."""
    lines = (Path(__file__).parent / name).read_text().splitlines()
    mutants: dict[str, Mutant] = {}
    for entry in re.split(r"\n(?! )", "\n".join(line for line in lines if line and not line.startswith("#"))):
        found = _ENTRY.fullmatch(entry)
        if found is None or found[1] in mutants:
            raise ValueError(f"{name}: a mutant that is not written as its head says, or twice: {entry}")
        mutant, mark, switch, text, rule, tests = found.groups()
        mutants[mutant] = Mutant(switches[switch](text), rule, tuple(tests.split("\n  ")[1:]), mark or "")
    return mutants


MUTANTS = read_mutants("mutants.txt", SWITCHES)


def marks(text: str) -> dict[str, list[int]]:
    """Return where the marks of a file are: the indexes of the marked lines."""
    found: dict[str, list[int]] = {}
    for index, line in enumerate(text.split("\n")):
        if mark := re.search(r"-- rule: (\w+)$", line):
            alone = line.lstrip().startswith("--")
            found.setdefault(mark[1], []).append(index + 1 if alone else index)
    return found


def switched_off(name: str, text: str) -> str:
    """Return a file's text with the rule of the mutant ``name`` switched off, if it is marked there."""
    mutant, lines = MUTANTS[name], text.split("\n")
    for index in marks(text).get(mutant.mark or name, []):
        line = lines[index]
        blank = line[: len(line) - len(line.lstrip())]
        if isinstance(mutant.switch, If):
            lines[index] = _CONDITION.sub(lambda found: found[1] + mutant.switch + found[3], line, count=1)
            if not _CONDITION.search(line):
                raise ValueError(f"{name}: the marked line has no condition: {line}")
        else:
            lines[index] = "" if mutant.switch == GONE else blank + mutant.switch
    return "\n".join(lines)


def switch_off(mutant: str) -> None:
    """Let this process, and no other, read the scripts with one rule switched off."""
    from django_rmq.core import lua

    texts = lua.texts()
    lua.texts = lambda: {file: switched_off(mutant, text) for file, text in texts.items()}
    for cached in (lua.sources, lua.load, lua.declaration):
        cached.cache_clear()


class Serving:
    """A plugin of pytest: once all is collected, tests run when they are asked for, each time in a child of this process."""

    def __init__(self, requests: IO[str], answers: IO[str], switch_off: Callable[[str], None]) -> None:
        self.requests, self.answers, self.switch_off = requests, answers, switch_off
        self.failed: list[str] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self) -> None:
        # Not earlier: pytest wants to be the first to import what has plugins for it.
        from hypothesis import HealthCheck, Phase, settings

        # The first failure is enough: nobody wants to read the shortest one.
        settings.register_profile(
            "mutants",
            deadline=None,
            max_examples=400,
            stateful_step_count=40,
            phases=[Phase.generate],
            database=None,
            suppress_health_check=list(HealthCheck),
        )

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        gc.freeze()
        for line in self.requests:
            name, test = json.loads(line)
            items = [item for item in session.items if test in named(item.nodeid)]
            child = os.fork()
            if child == 0:
                os._exit(self._judge(name, items))
            _, status = os.waitpid(child, 0)
            if status:
                self._answer(len(items), f"died with {os.waitstatus_to_exitcode(status)}")
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    def _judge(self, name: str, items: list[pytest.Item]) -> int:
        if name:
            self.switch_off(name)
        for item in items:
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            if self.failed:
                break
        self._answer(len(items), *self.failed[:1])
        return 0

    def _answer(self, asked: int, killer: str = "") -> None:
        print(json.dumps([asked, killer]), file=self.answers, flush=True)


def named(case: str) -> tuple[str, str, str]:
    """Return a case, its test and its file."""
    return case, case.partition("[")[0], case.partition("::")[0]


QUIET = ["-q", "--tb=no", "-p", "no:cacheprovider", "--hypothesis-profile=mutants"]


def serve(files: list[str], switch_off: Callable[[str], None]) -> int:
    """Collect the tests of these files once; then answer each line [mutant, test] with a line [number of cases, who failed].

    What is asked for on the input may be a case, a test with all its cases, or a file. No mutant: all rules are on.
    """
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    # The answers are alone on their way: what pytest says of the tests goes elsewhere.
    os.dup2(2, 1)
    return int(pytest.main([*QUIET, *files], plugins=[Serving(requests, answers, switch_off)]))


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1:], switch_off))
