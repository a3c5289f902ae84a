"""Hold the package to its sizes, so that one person can keep each room in mind.

    python tests/sizes.py            complains of what is too large, and of exceptions that are not needed any more
    python tests/sizes.py --write    writes the exceptions again, with the reasons that are there

An exception stands in ``sizes.toml`` with its size, beyond which it must not grow, and its reason.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGES = ("django_rmq", "pyspark_rmq")
EXCEPTIONS = Path(__file__).with_name("sizes.toml")

LIMITS = {
    "lines": 300,
    "lines of function": 40,
    "methods": 20,
    "parameters": 8,
    "lines of Lua": 220,
    "lines in the median file": 110,
    "entries": 26,
}


class Size(NamedTuple):
    """How large something is, by one measure."""

    what: str
    measure: str
    size: int


def without_docstring(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the lines of a function, its signature included and its docstring not."""
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    if ast.get_docstring(node) is not None:
        lines -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
    return lines


def in_file(path: Path) -> Iterator[Size]:
    """Yield the sizes of a Python file and of all that it defines."""
    name, text = str(path.relative_to(ROOT)), path.read_text()
    yield Size(name, "lines", len(text.splitlines()))

    def within(node: ast.AST, place: str) -> Iterator[Size]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                here = f"{place}{child.name}"
                yield Size(here, "lines of function", without_docstring(child))
                given = child.args
                named = (*given.posonlyargs, *given.args, *given.kwonlyargs)
                yield Size(here, "parameters", sum(one.arg not in ("self", "cls") for one in named))
                yield from within(child, f"{here}.")
            elif isinstance(child, ast.ClassDef):
                here = f"{place}{child.name}"
                methods = [
                    one for one in child.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
                ]
                yield Size(here, "methods", len({one.name for one in methods}))
                yield from within(child, f"{here}.")
            else:
                yield from within(child, place)

    yield from within(ast.parse(text), f"{name}::")


def all_sizes() -> list[Size]:
    """Return the sizes of the package."""
    python = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    lua = sorted((ROOT / "django_rmq").rglob("*.lua"))
    sizes = [size for path in python if "migrations" not in path.parts for size in in_file(path)]
    files = [size.size for size in sizes if size.measure == "lines" and size.size > 1]
    entries = [path for path in (ROOT / "django_rmq").iterdir() if path.name != "__pycache__"]
    return [
        *sizes,
        *(
            Size(str(path.relative_to(ROOT)), "lines of Lua", len(path.read_text().splitlines()))
            for path in lua
        ),
        Size("django_rmq", "lines in the median file", round(median(files))),
        Size("django_rmq", "entries", len(entries)),
    ]


def complaints(sizes: list[Size], exceptions: dict[str, dict[str, str | int]]) -> Iterator[str]:
    """Yield what is wrong with sizes, given the exceptions by "what, measure"."""
    large = {f"{size.what}, {size.measure}": size for size in sizes if size.size > LIMITS[size.measure]}
    for key, size in large.items():
        allowed = exceptions.get(key)
        if allowed is None:
            yield f"{size.what}: {size.size} {size.measure}, at most {LIMITS[size.measure]}"
        elif size.size != allowed["size"]:
            yield f"{size.what}: {size.size} {size.measure}, and its exception says {allowed['size']}"
    yield from (
        f"{key}: an exception that is not needed any more" for key in exceptions.keys() - large.keys()
    )


def main() -> int:
    """Say what is wrong; return 1 if anything is."""
    sizes, exceptions = all_sizes(), tomllib.loads(EXCEPTIONS.read_text())
    if sys.argv[1:] == ["--write"]:
        with EXCEPTIONS.open("w") as file:
            for size in sizes:
                if size.size > LIMITS[size.measure]:
                    key = f"{size.what}, {size.measure}"
                    reason = exceptions.get(key, {}).get("reason", "to be split")
                    file.write(f'["{key}"]\nsize = {size.size}\nreason = "{reason}"\n\n')
        return 0
    found = list(complaints(sizes, exceptions))
    print("\n".join(found))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
