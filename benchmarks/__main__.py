"""``python -m benchmarks``: the table of ratios. Rounds are interleaved, and medians are shown."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from benchmarks.works import WORKS, Bench
from example_project.embedded_redis import start_redis


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds (default 7)")
    parser.add_argument(
        "--messages", type=int, default=200_000, help="messages per bulk work: enough to drown a start"
    )
    parser.add_argument("--singles", type=int, default=2_000, help="messages per single-send work")
    parser.add_argument("--only", default="", help="only works whose name contains this")
    parser.add_argument("--json", type=Path, help="write the results there too")
    options = parser.parse_args()
    works = [work for work in WORKS if options.only in work.name]
    with tempfile.TemporaryDirectory() as directory:
        server = start_redis(directory)
        try:
            client = redis.Redis.from_url(
                server.url, retry=Retry(NoBackoff(), 0), protocol=2, socket_timeout=30
            )
            info = client.info("server")
            print(
                f"Redis {info['redis_version']} ({info['executable']}), Python {platform.python_version()}, "
                f"redis-py {redis.__version__}; {options.rounds} interleaved rounds, medians"
            )
            rates = _measure(Bench(client, options.messages, options.singles), works, options.rounds)
        finally:
            server.stop()
    results = []
    print(f"{'work':<26}{'ours/s':>10}{'bare/s':>10}{'ratio':>8}{'goal':>7}   met")
    for work in works:
        ours, bare = statistics.median(rates[work.ours]), statistics.median(rates[work.bare])
        ratio = statistics.median(a / b for a, b in zip(rates[work.ours], rates[work.bare], strict=True))
        met = "yes" if ratio >= work.goal else f"{ratio / work.goal:.0%}"
        print(f"{work.name:<26}{ours:>10,.0f}{bare:>10,.0f}{ratio:>8.2f}{work.goal:>7.2f}   {met}")
        results.append(
            {"work": work.name, "ours": ours, "bare": bare, "ratio": ratio, "goal": work.goal, "met": met}
        )
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))
    return 0


def _measure(bench: Bench, works: list, rounds: int) -> dict[str, list[float]]:
    names = list(dict.fromkeys(name for work in works for name in (work.bare, work.ours)))
    rates: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        for name in names:
            rate = getattr(bench, name)()
            if number:  # the first round warms up
                rates[name].append(rate)
        print(f"\rround {number} of {rounds}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return rates


if __name__ == "__main__":
    sys.exit(main())
