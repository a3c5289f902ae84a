"""What benchmarks share: options, servers, where it ran, and rows that say whether a goal is met, as text, JSON and Markdown."""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.support.embedded_redis import start_redis


@dataclass(frozen=True)
class Row:
    """One line: what was measured, what it is compared with, and the goal for the relation of both."""

    work: str
    ours: str
    limit: str
    relation: str
    goal: str
    met: bool
    values: dict[str, Any]
    """The figures behind the words."""


def command_line(module: str, about: str | None, *, rounds: int | None = None) -> argparse.ArgumentParser:
    """Return the options that every benchmark has: ``--json``, and ``--rounds`` if it has rounds."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if rounds is not None:
        parser.add_argument(
            "--rounds", type=int, default=rounds, help=f"interleaved rounds (default {rounds})"
        )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this JSON file")
    return parser


def client_of(url: str) -> redis.Redis:
    """Return a client as the brokers want it: it does not retry and does not decode."""
    return redis.Redis.from_url(url, retry=Retry(NoBackoff(), 0), protocol=2, socket_timeout=60)


@contextmanager
def server(**options: Any) -> Iterator[tuple[redis.Redis, str]]:
    """Yield a client of a server of its own, and the server's address."""
    with tempfile.TemporaryDirectory() as directory:
        started = start_redis(directory, **options)
        try:
            yield client_of(started.url), started.url
        finally:
            started.stop()


@contextmanager
def cores_apart(client: redis.Redis) -> Iterator[str]:
    """Give the server a core and this process the others, as if it were on another machine; yield what was done.

    Otherwise the threads of a worker, of which only one runs at a time, wait for the server's core while another is idle.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < 2:
        yield "shared with the server"
        return
    for thread in Path(f"/proc/{client.info('server')['process_id']}/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores[-1:])
    os.sched_setaffinity(0, cores[:-1])
    try:
        yield "one for the server"
    finally:
        os.sched_setaffinity(0, cores)


def conditions(client: redis.Redis) -> dict[str, str]:
    """Return machine, binaries and versions: without them no figure says anything."""
    info = client.info("server")
    allocator = client.info("memory")["mem_allocator"]
    return {
        "machine": f"{_processor()}, {os.cpu_count()} cores",
        "load before": f"{os.getloadavg()[0]:.1f}",
        "server": f"{product(info)}, malloc of {allocator} ({'/'.join(Path(info['executable']).parts[-3:])})",
        "Python": platform.python_version(),
        "redis-py": redis.__version__,
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
    }


def redis_seconds(client: redis.Redis) -> float:
    """Return the seconds of CPU that the server has taken."""
    info = client.info("cpu")
    return float(info["used_cpu_sys"] + info["used_cpu_user"])


def cpu_of(*pids: int) -> float:
    """Return the seconds of CPU that processes and their ended children have taken."""
    ticks = 0
    for pid in pids:
        with suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def descendants(root: int = 0) -> list[int]:
    """Return a process (this one, if none is given) and all that it has started, directly or not."""
    root = root or os.getpid()
    parents: dict[int, int] = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parents[int(process.name)] = int((process / "stat").read_text().rpartition(")")[2].split()[1])

    def belongs(pid: int) -> bool:
        return pid == root or (pid in parents and belongs(parents[pid]))

    return list(filter(belongs, parents))


def product(info: dict[str, Any]) -> str:
    """Return which server it is: Valkey's `redis_version` is that of the Redis that it is compatible with."""
    if "valkey_version" in info:
        return f"Valkey {info['valkey_version']}"
    return f"Redis {info['redis_version']}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next(
        (line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine()
    )


def told(where: dict[str, str]) -> str:
    """Return the conditions as one line."""
    return "; ".join(f"{name}: {value}" for name, value in where.items())


def text(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of columns as wide as they need; the first is left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in (titles, *rows)
    )


def markdown(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [titles, ["---"] + ["---:"] * (len(titles) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


TITLES = ("work", "ours", "limit", "relation", "goal", "met")


def cells(rows: Sequence[Row]) -> list[list[str]]:
    """Return the cells of ``rows`` under ``TITLES``."""
    return [[r.work, r.ours, r.limit, r.relation, r.goal, "yes" if r.met else "**no**"] for r in rows]


def write(path: Path | None, where: dict[str, str], **found: Any) -> None:
    """Write results as JSON; rows become objects. No path: do nothing."""
    if path is None:
        return
    plain = {
        name: [asdict(each) if isinstance(each, Row) else each for each in value]
        if isinstance(value, list)
        else value
        for name, value in found.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"conditions": where, **plain}, indent=2) + "\n")


def read_rows(path: Path) -> list[Row]:
    """Return the rows that ``write`` wrote."""
    return [Row(**row) for row in json.loads(path.read_text())["rows"]]
