"""``python -m benchmarks.overlap``: jobs that wait 50 ms in an event loop, many at a time in one process, beside other queues.

They sleep, or call a server on this machine that answers after 50 ms. The ideal is concurrency / 50 ms. Each queue runs in an
environment of its own as in ``benchmarks.peers``, in turn on the same Redis, with one worker process. Rates are medians of the
rounds; memory is that of all processes of the worker.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.peers.__main__ import FOLDER, measure
from benchmarks.table import TITLES, Row, cells, conditions, markdown, server, text, told, write

PEERS = ("saq", "arq", "taskiq")
SLEEP_SECONDS = 0.05
GOAL = 0.9
WORKS = {"sleep": "sleeping 50 ms", "http": "a call of 50 ms"}
COLUMNS = ("work", "queue", "version", "concurrency", "jobs/s", "of the ideal", "MiB")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overlap", description=__doc__)
    parser.add_argument("--work", nargs="*", choices=WORKS, default=list(WORKS), help="default: both")
    parser.add_argument("--concurrency", type=int, nargs="*", default=[100, 1000], help="default 100 1000")
    parser.add_argument("--jobs", type=int, default=20_000, help="jobs of each other queue (default 20,000)")
    parser.add_argument(
        "--seconds", type=float, default=15.0, help="how long ours would take at the ideal rate (default 15)"
    )
    parser.add_argument(
        "--only", nargs="*", choices=PEERS, default=PEERS, help="only these; none: this queue alone"
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds over all queues (default 3)")
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    parser.add_argument("--json", type=Path, help="also write the results to this JSON file")
    options = parser.parse_args()
    os.environ |= {"PEER_SLEEP": str(SLEEP_SECONDS), "PEER_PROCESSES": "1"}
    lines: list[list[str]] = []
    rows: list[Row] = []
    with server() as (client, _), web() as web_port:
        where = conditions(client)
        print(told(where), flush=True)
        port = client.connection_pool.connection_kwargs["port"]
        for work, concurrency in product(options.work, options.concurrency):
            os.environ |= {
                "PEER_WEB": str(web_port if work == "http" else 0),
                "PEER_CONCURRENCY": str(concurrency),
            }
            ideal = concurrency / SLEEP_SECONDS
            found: dict[str, list[dict[str, Any]]] = {name: [] for name in ("rmq", *options.only)}
            for _ in range(options.rounds):
                for name, results in found.items():
                    jobs = int(ideal * options.seconds) if name == "rmq" else options.jobs
                    results.append(measure(name, port, jobs, 0))
                    print(
                        f"  {work}, {name}, {concurrency}: {_said(results[-1])}", file=sys.stderr, flush=True
                    )
            rates = {name: rate for name, results in found.items() if (rate := _middle(results)) is not None}
            lines += [_line(work, name, concurrency, results, ideal) for name, results in found.items()]
            rows += _rows(f"{WORKS[work]}, {concurrency} at a time", rates, ideal)
    as_table = markdown if options.markdown else text
    print(as_table(COLUMNS, lines))
    print("\n" + as_table(TITLES, cells(rows)))
    write(options.json, where, rows=rows)
    return 0


def _said(result: dict[str, Any]) -> str:
    return str(result.get("error") or f"{result['consume']:,.0f}/s")


def _middle(results: list[dict[str, Any]], what: str = "consume") -> float | None:
    found = [result[what] for result in results if "error" not in result]
    return statistics.median(found) if found else None


def _line(work: str, name: str, concurrency: int, results: list[dict[str, Any]], ideal: float) -> list[str]:
    rate = _middle(results)
    if rate is None:
        return [work, name, "-", str(concurrency), str(results[0]["error"]), "-", "-"]
    version = next(result["version"] for result in results if "error" not in result)
    memory = f"{_middle(results, 'memory'):,.0f}"
    return [work, name, version, str(concurrency), f"{rate:,.0f}", f"{rate / ideal:.2f}", memory]


@contextmanager
def web() -> Iterator[int]:
    """Run the server that the jobs call; give its port."""
    with subprocess.Popen(
        [sys.executable, str(FOLDER / "jobs.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())


def _rows(work: str, rates: dict[str, float], ideal: float) -> list[Row]:
    ours = rates.pop("rmq", None)
    if ours is None:
        return []
    share = ours / ideal
    rows = [
        Row(
            work,
            f"{ours:,.0f}/s",
            f"{ideal:,.0f}/s (ideal)",
            f"{share:.2f}",
            f"≥ {GOAL}",
            share >= GOAL,
            {"share": share},
        )
    ]
    if rates:
        best = max(rates, key=rates.__getitem__)
        ratio = ours / rates[best]
        limit = f"{rates[best]:,.0f}/s ({best})"
        rows.append(
            Row(
                work,
                f"{ours:,.0f}/s",
                limit,
                f"× {ratio:.3g}",
                "≥ × 1",
                ratio >= 1,
                {"ratio": ratio, "best": best},
            )
        )
    return rows


if __name__ == "__main__":
    sys.exit(main())
