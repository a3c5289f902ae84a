"""``python -m benchmarks``: the table of all that speed is promised for, each work beside its bare limit in the same run.

Rates are medians over interleaved rounds, and the ratio is the median of the rounds' ratios. The bare limit is redis-py
doing the least that could be called the same; where a raw socket does that too, its figure stands behind it. The server
has a core of its own, where there are two.
"""

from __future__ import annotations

import statistics
import sys
import time
from contextlib import nullcontext

from benchmarks import idle, lateness
from benchmarks.harness import (
    TITLES,
    Row,
    cells,
    command_line,
    conditions,
    cores_apart,
    server,
    text,
    told,
    write,
)
from benchmarks.works import WORKS, Bench, Work


def main() -> int:
    parser = command_line("benchmarks", __doc__, rounds=7)
    parser.add_argument(
        "--single-rounds", type=int, default=24, help="rounds of the noisiest work (default 24)"
    )
    parser.add_argument("--messages", type=int, default=200_000, help="messages per bulk work")
    parser.add_argument("--singles", type=int, default=2_000, help="messages per single-send work")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each rate, and of the idle worker")
    parser.add_argument("--only", default="", help="only works whose name contains this")
    parser.add_argument("--shared", action="store_true", help="let the server share the cores with the works")
    options = parser.parse_args()
    begun = time.monotonic()
    with (
        server() as (client, url),
        nullcontext("shared with the server") if options.shared else cores_apart(client) as cores,
    ):
        where = conditions(client) | {"cores": cores}
        print(told(where), flush=True)
        bench = Bench(client, options.messages, options.singles)
        rows: list[Row] = []
        works = [work for work in WORKS if options.only in work.name]
        steady = [work for work in works if work.name != "single send"]
        noisy = [work for work in works if work.name == "single send"]
        for some, rounds in ((steady, options.rounds), (noisy, options.single_rounds)):
            rates = _measure(bench, some, rounds)
            rows += [_row(work, rates) for work in some]
        rows.sort(key=lambda row: [work.name for work in works].index(row.work))
        if options.only in "lateness":
            for rate in lateness.RATES:
                rows.append(lateness.row(lateness.measure(client, rate, options.seconds)))
        if options.only in "idle worker":
            rows += idle.measure(client, url, options.seconds)
    print(text(TITLES, cells(rows)))
    print(f"{options.rounds} interleaved rounds, {time.monotonic() - begun:.0f} s in all")
    write(options.json, where, rows=rows)
    return 0


def _row(work: Work, rates: dict[str, list[float]]) -> Row:
    ours, bare = rates[work.ours], rates[work.bare]
    ratio = statistics.median(a / b for a, b in zip(ours, bare, strict=True))
    raw = statistics.median(rates[work.raw]) if work.raw else None
    limit = f"{statistics.median(bare):,.0f}/s"
    if raw is not None:
        limit += f" (raw socket {raw:,.0f})"
    safety = work.ours == "safe_scripts"
    return Row(
        work.name,
        f"{statistics.median(ours):,.0f}/s",
        limit,
        f"{1 / ratio - 1:+.0%} time" if safety else f"× {ratio:.2f}",
        "≤ +20 % time" if safety else f"≥ × {work.goal:g}",
        ratio >= work.goal,
        {"ours": ours, "bare": bare, "ratio": ratio, "goal": work.goal, "raw": raw},
    )


def _measure(bench: Bench, works: list[Work], rounds: int) -> dict[str, list[float]]:
    wanted = (name for work in works for name in (work.bare, work.ours, work.raw) if name)
    names = list(dict.fromkeys(wanted))
    rates: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1 if works else 0):
        for name in names:
            rate = getattr(bench, name)()
            if number:  # the first round warms up
                rates[name].append(rate)
        print(f"\rround {number} of {rounds}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return rates


if __name__ == "__main__":
    sys.exit(main())
