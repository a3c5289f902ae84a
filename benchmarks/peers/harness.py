"""What the comparisons with other queues share: their command line, the server, the rounds, the environments, and the output."""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.table import TITLES, Row, cells, conditions, markdown, server, text, told, write

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
OURS = ("rmq", "tasks_rmq")
PINS = {"tasks_db": "django-tasks-db", "tasks_huey": "huey", "tasks_rq": "django-tasks-rq"}
"""Peer -> the package whose version counts, where it has another name."""

Result = dict[str, Any]
"""What the driver of one queue found, or an ``error``."""


def command_line(
    module: str, about: str | None, peers: Sequence[str], messages: int
) -> argparse.ArgumentParser:
    """Return the options that every comparison has."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=about)
    add = parser.add_argument
    add("--messages", type=int, default=messages, help=f"messages of each queue (default {messages:,})")
    add("--only", nargs="*", choices=peers, default=peers, help="only these; none: this queue alone")
    add("--rounds", type=int, default=3, help="rounds over all queues (default 3)")
    add("--markdown", action="store_true", help="print the tables as Markdown")
    add("--json", type=Path, help="also write the results to this JSON file")
    return parser


@contextmanager
def shared_redis() -> Iterator[tuple[dict[str, str], int]]:
    """Print and yield the conditions, and the port of a Redis for all queues."""
    with server() as (client, _):
        where = conditions(client)
        print(told(where), flush=True)
        yield where, client.connection_pool.connection_kwargs["port"]


def measure_in_rounds(
    names: Sequence[str], rounds: int, measure_one: Callable[[str], Result]
) -> list[dict[str, Result]]:
    """Return for each round what was found of each queue, which are measured in turn."""
    results: list[dict[str, Result]] = []
    for _ in range(rounds):
        results.append({})
        for name in names:
            results[-1][name] = measure_one(name)
            print(f"  {name}: {results[-1][name].get('error') or 'measured'}", file=sys.stderr, flush=True)
    return results


def combine(rounds: list[dict[str, Result]], figures: Sequence[str]) -> dict[str, Result]:
    """Return for each queue the medians of these figures; an ``error`` if there was one in any round."""
    combined = {}
    for name in rounds[0]:
        results = [each[name] for each in rounds]
        wrong = [result for result in results if "error" in result]
        medians = {
            what: statistics.median(result[what] for result in results) for what in figures if not wrong
        }
        combined[name] = wrong[0] if wrong else results[0] | medians
    return combined


def publish(
    options: argparse.Namespace,
    where: dict[str, str],
    columns: Sequence[str],
    lines: list[list[str]],
    *,
    notes: Sequence[str] = (),
    rows: list[Row] | None = None,
    **found: Any,
) -> None:
    """Print the table of the queues, notes, and our rows beside the best of the others; write all as JSON if it is asked for."""
    as_table = markdown if options.markdown else text
    print(as_table(columns, lines))
    if notes:
        print("\n" + "\n".join(notes))
    if rows:
        print("\n" + as_table(TITLES, cells(rows)))
    write(options.json, where, **found, **({} if rows is None else {"rows": rows}))


def ratio_row(
    work: str, ours: str, best: tuple[str, str], ratio: float, goal: float, *, least: bool = False
) -> Row:
    """Return our figure beside that of the best of the others, whose name comes first; ``least``: less is better."""
    name, limit = best
    return Row(
        work,
        ours,
        f"{limit} ({name})",
        f"× {ratio:.3g}",
        f"{'≤' if least else '≥'} × {goal:g}",
        ratio <= goal if least else ratio >= goal,
        {"ratio": ratio, "best": name, "goal": goal},
    )


def measure(name: str, port: int, messages: int, singles: int) -> Result:
    """Return what the driver of ``name`` found, or an ``error``."""
    return driven(name, (messages, singles), {"PEER_REDIS_PORT": port})


def driven(name: str, arguments: Sequence[int], settings: Mapping[str, float]) -> Result:
    """Return what the driver of ``name`` found in its environment with these settings, or an ``error``."""
    driver = "tasks_driver" if name.startswith("tasks_") else f"{name}_driver"
    try:
        python = sys.executable if name in OURS else str(environment(name))
        ran = subprocess.run(
            [python, "-m", driver, *map(str, arguments)],
            cwd=FOLDER,
            env={
                **os.environ,
                **{key: str(value) for key, value in settings.items()},
                "PYTHONPATH": str(FOLDER),
                "PEER_TASKS": name.removeprefix("tasks_"),
            },
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": "not done after 300 s"}
    except Unavailable as error:
        return {"error": str(error)}
    if ran.returncode:
        return {"error": (ran.stderr.strip().splitlines() or ["no output"])[-1][:200]}
    return {**json.loads(ran.stdout.strip().splitlines()[-1]), "version": version(name)}


class Unavailable(Exception):
    """A peer that cannot be installed here."""


def requirements(name: str) -> Path:
    return FOLDER / "requirements" / f"{name}.txt"


def version(name: str) -> str:
    """Return the version that is pinned."""
    if name in OURS:
        from django_rmq import __version__

        return __version__
    pin = re.search(rf"^{PINS.get(name, name)}==(\S+)", requirements(name).read_text(), re.MULTILINE)
    return pin[1] if pin else "?"


def environment(name: str) -> Path:
    """Return the Python of the environment of ``name``, made again if what it requires has changed."""
    home, wanted = ROOT / "build" / "peers" / name, requirements(name)
    python, mark = home / "bin" / "python", home / ".required"
    if mark.exists() and mark.read_text() == wanted.read_text():
        return python
    venv.create(home, clear=True, with_pip=True)
    pip = f"-m pip install --quiet --disable-pip-version-check --require-hashes -r {wanted}"
    ran = subprocess.run([python, *pip.split()], capture_output=True, text=True, timeout=300, check=False)
    if ran.returncode:
        raise Unavailable(f"cannot be installed: {(ran.stderr.strip().splitlines() or ['?'])[-1][:200]}")
    mark.write_text(wanted.read_text())
    return python
