"""``python -m benchmarks.overlap``: jobs that wait 50 ms in an event loop, many at a time in one process, beside other queues.

They sleep, or call a server on this machine that answers after 50 ms. The ideal is concurrency / 50 ms. Each queue runs in an
environment of its own as in ``benchmarks.peers``, in turn on the same Redis, with one worker process. Rates are medians of the
rounds; memory is that of all processes of the worker.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

from benchmarks.peers.harness import (
    FOLDER,
    Result,
    command_line,
    measure,
    measure_in_rounds,
    publish,
    ratio_row,
    shared_redis,
)
from benchmarks.table import Row

PEERS = ("saq", "arq", "taskiq")
SLEEP_SECONDS = 0.05
GOAL = 0.9
WORKS = {"sleep": "sleeping 50 ms", "http": "a call of 50 ms"}
COLUMNS = ("work", "queue", "version", "concurrency", "jobs/s", "of the ideal", "MiB")


def main() -> int:
    parser = command_line("benchmarks.overlap", __doc__, PEERS, 20_000)
    parser.add_argument("--work", nargs="*", choices=WORKS, default=list(WORKS), help="default: both")
    parser.add_argument("--concurrency", type=int, nargs="*", default=[100, 1000], help="default 100 1000")
    parser.add_argument(
        "--seconds", type=float, default=15.0, help="how long ours would take at the ideal rate (default 15)"
    )
    options = parser.parse_args()
    os.environ |= {"PEER_SLEEP": str(SLEEP_SECONDS), "PEER_PROCESSES": "1"}
    lines: list[list[str]] = []
    rows: list[Row] = []
    with shared_redis() as (where, port), web() as web_port:
        for work, concurrency in product(options.work, options.concurrency):
            os.environ |= {
                "PEER_WEB": str(web_port if work == "http" else 0),
                "PEER_CONCURRENCY": str(concurrency),
            }
            ideal = concurrency / SLEEP_SECONDS

            def measure_overlap(name: str, ideal: float = ideal) -> Result:
                jobs = int(ideal * options.seconds) if name == "rmq" else options.messages
                return measure(name, port, jobs, 0)

            about = f"{work}, {concurrency}, "
            rounds = measure_in_rounds(("rmq", *options.only), options.rounds, measure_overlap, about)
            found = {name: [each[name] for each in rounds] for name in rounds[0]}
            rates = {name: rate for name, results in found.items() if (rate := _middle(results)) is not None}
            lines += [_line(work, name, concurrency, results, ideal) for name, results in found.items()]
            rows += _rows(f"{WORKS[work]}, {concurrency} at a time", rates, ideal)
    publish(options, where, COLUMNS, lines, rows=rows)
    return 0


def _middle(results: list[Result], what: str = "consume") -> float | None:
    found = [result[what] for result in results if "error" not in result]
    return statistics.median(found) if found else None


def _line(work: str, name: str, concurrency: int, results: list[Result], ideal: float) -> list[str]:
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
        rows.append(ratio_row(work, f"{ours:,.0f}/s", (best, f"{rates[best]:,.0f}/s"), ours / rates[best], 1))
    return rows


if __name__ == "__main__":
    sys.exit(main())
