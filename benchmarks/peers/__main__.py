"""``python -m benchmarks.peers``: other Python queues and this one, doing the same nothing on the same Redis, in turn.

Each is installed into an environment of its own under ``build/peers``, pinned with hashes, and used as well as it can be: its
bulk call if it has one, two worker processes, its fastest sensible settings, and at-least-once delivery where it has that. What
cannot be installed or run is shown with the reason. Rates are medians of the rounds, relations medians of what they are in each.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.table import TITLES, Row, cells, conditions, markdown, server, text, told, write

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
OURS = ("rmq", "tasks_rmq")
PINS = {"tasks_db": "django-tasks-db", "tasks_huey": "huey", "tasks_rq": "django-tasks-rq"}
"""Peer -> the package whose version counts, where it has another name."""
PEERS = ("rq", "celery", "dramatiq", "huey", "arq", "saq", "bullmq")
GOALS = {"bulk": 10.0, "single": 1.0, "consume": 20.0}
COLUMNS = ("queue", "version", "bulk sends/s", "single sends/s", "consumed/s")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument(
        "--messages", type=int, default=10_000, help="messages of each queue (default 10,000)"
    )
    parser.add_argument(
        "--singles", type=int, default=2_000, help="single sends of each queue (default 2,000)"
    )
    parser.add_argument(
        "--only", nargs="*", choices=PEERS, default=PEERS, help="only these; none: this queue alone"
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds over all queues (default 3)")
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    parser.add_argument("--json", type=Path, help="also write the results to this JSON file")
    options = parser.parse_args()
    names = ("rmq", *options.only)
    rounds: list[dict[str, dict[str, Any]]] = []
    with server() as (client, _):
        where = conditions(client)
        print(told(where), flush=True)
        port = client.connection_pool.connection_kwargs["port"]
        for _ in range(options.rounds):
            rounds.append({})
            for name in names:
                rounds[-1][name] = measure(name, port, options.messages, options.singles)
                error = rounds[-1][name].get("error")
                print(f"  {name}: {error or 'measured'}", file=sys.stderr, flush=True)
    found = combined(rounds)
    rows = compared(rounds)
    as_table = markdown if options.markdown else text
    print(as_table(COLUMNS, [line(name, result) for name, result in found.items()]))
    print("\n" + "\n".join(note(name, result) for name, result in found.items()))
    if rows:
        print("\n" + as_table(TITLES, cells(rows)))
    write(options.json, where, queues=found, rows=rows)
    return 0


def measure(name: str, port: int, messages: int, singles: int) -> dict[str, Any]:
    """Return what the driver of ``name`` found, or an ``error``."""
    return driven(name, f"{name}_driver", (messages, singles), {"PEER_REDIS_PORT": port})


def driven(name: str, driver: str, arguments: Sequence[int], ports: Mapping[str, int]) -> dict[str, Any]:
    """Return what a driver found in the environment of ``name``, or an ``error``."""
    try:
        python = sys.executable if name in OURS else str(environment(name))
        ran = subprocess.run(
            [python, "-m", driver, *map(str, arguments)],
            cwd=FOLDER,
            env={
                **os.environ,
                **{key: str(port) for key, port in ports.items()},
                "PYTHONPATH": str(FOLDER),
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
    pip: list[str | Path] = [
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--require-hashes",
    ]
    ran = subprocess.run([*pip, "-r", wanted], capture_output=True, text=True, timeout=300, check=False)
    if ran.returncode:
        raise Unavailable(f"cannot be installed: {(ran.stderr.strip().splitlines() or ['?'])[-1][:200]}")
    mark.write_text(wanted.read_text())
    return python


def combined(rounds: list[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return for each queue the medians of what was found; an ``error`` if there was one in any round."""
    found = {}
    for name in rounds[0]:
        results = [each[name] for each in rounds]
        wrong = [result for result in results if "error" in result]
        found[name] = (
            wrong[0] if wrong else {**results[0], **{what: _middle(results, what) for what in GOALS}}
        )
    return found


def _middle(results: list[dict[str, Any]], what: str) -> float:
    return statistics.median(result[what] for result in results)


def line(name: str, result: dict[str, Any]) -> list[str]:
    """Return the row of one queue."""
    if "error" in result:
        return [name, "-", "-", "-", "-"]
    return [name, result["version"], *(f"{result[what]:,.0f}" for what in GOALS)]


def note(name: str, result: dict[str, Any]) -> str:
    """Return what is to be known of the figures of one queue."""
    if "error" in result:
        return f"- {name}: {result['error']}"
    return f"- {name}: {result['guarantee']}. Measured with {result['settings']}; bulk: {result['bulk_by']}."


def compared(rounds: list[dict[str, dict[str, Any]]], goals: dict[str, float] = GOALS) -> list[Row]:
    """Return our rows beside the best of the others."""
    found = combined(rounds)
    (own,) = (name for name in found if name in OURS)
    ours = found[own]
    others = {name: result for name, result in found.items() if name != own and "error" not in result}
    if "error" in ours or not others:
        return []
    rows = []
    for what, goal in goals.items():
        best = max(others, key=lambda name: others[name][what])
        ratio = statistics.median(each[own][what] / each[best][what] for each in rounds)
        rows.append(
            Row(
                {"bulk": "bulk sends", "single": "single sends", "consume": "consuming"}[what],
                f"{ours[what]:,.0f}/s",
                f"{others[best][what]:,.0f}/s ({best})",
                f"× {ratio:.3g}",
                f"≥ × {goal:g}",
                ratio >= goal,
                {"ratio": ratio, "best": best, "goal": goal},
            )
        )
    return rows


if __name__ == "__main__":
    sys.exit(main())
