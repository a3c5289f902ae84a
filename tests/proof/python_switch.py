"""Switches rules of the package off in a process that has imported it: functions get the code that they have without the rule.

    python -m tests.proof.python_switch FILE...

serves runs of the tests of these files (see `mutants.serve`).
"""

from __future__ import annotations

import gc
import sys
from collections import defaultdict
from functools import cache
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FunctionType

from tests.proof.mutants import serve
from tests.proof.python_mutants import PYTHON_MUTANTS, marks, switched_off

ROOT = Path(__file__).parents[2]


@cache
def marked() -> dict[str, list[str]]:
    """Return the files of the package that have each mark."""
    files: dict[str, list[str]] = {}
    for path in sorted((ROOT / "django_rmq").rglob("*.py")):
        text = path.read_text()
        for mark in marks(text) if "# rule: " in text else ():
            files.setdefault(mark, []).append(path.relative_to(ROOT / "django_rmq").as_posix())
    return files


def files_of(name: str) -> list[str]:
    """Return the files that are marked for a mutant: always one."""
    return marked().get(PYTHON_MUTANTS[name].mark or name, [])


def changed_code(name: str) -> dict[CodeType, CodeType]:
    """Return the code of each function that a mutant changes, and its code without the rule.

    A function within another one comes with the code of that one.
    """
    mutant, (file,) = PYTHON_MUTANTS[name], files_of(name)
    path = ROOT / "django_rmq" / file
    text = path.read_text()
    before = _functions(compile(text, path, "exec"))
    after = _functions(compile(switched_off(mutant, mutant.mark or name, text), path, "exec"))
    return {old: new for at, old in before.items() if (new := after[at]) != old}


def _functions(module: CodeType) -> dict[tuple[str, int], CodeType]:
    """Return the code of the functions and methods of a module, by their names and how many of this name came before."""
    named: dict[str, int] = defaultdict(int)
    found: dict[tuple[str, int], CodeType] = {}
    holders = [module]
    for holder in holders:
        for code in holder.co_consts:
            if not isinstance(code, CodeType) or "<" in code.co_qualname:
                continue
            holders.append(code)
            # The code of a class is no function's.
            if code.co_flags & CO_OPTIMIZED:
                found[code.co_qualname, named[code.co_qualname]] = code
                named[code.co_qualname] += 1
    return found


def switch_off(name: str) -> None:
    """Let this process, and no other, run the package with one rule switched off."""
    changed = changed_code(name)
    # What was there when the tests were collected is frozen.
    gc.unfreeze()
    for each in gc.get_objects():
        # Not isinstance: that asks objects for their class, and those of tests may raise.
        if type(each) is FunctionType and each.__code__ in changed:
            each.__code__ = changed[each.__code__]


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1:], switch_off))
