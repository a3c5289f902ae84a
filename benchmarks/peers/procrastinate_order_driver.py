"""Procrastinate: jobs with a lock for each entity, in PostgreSQL."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

import measuring
import order_jobs
import ordering
import procrastinate
import psycopg

SETTINGS = "2 workers, concurrency=50, lock, retry after 1 s, delete_jobs=always; PostgreSQL with fsync=off"
GUARANTEE = "a job waits for all earlier ones with its lock, also for one that is to be retried"
WORKERS = [[sys.executable, "-m", "procrastinate_order_driver", "worker"]] * 2

DSN = f"host=127.0.0.1 port={os.environ['PEER_POSTGRES_PORT']} user=shop dbname=shop"
app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=DSN))
measuring.LOOK_SECONDS = 0.1


@app.task(name="run", retry=procrastinate.RetryStrategy(max_attempts=3, wait=1))
async def run(entity: int, n: int) -> None:
    order_jobs.run(entity, n)


def clear() -> None:
    """Remove what the workers were killed with."""
    with psycopg.connect(DSN, autocommit=True) as connection:
        connection.execute("TRUNCATE procrastinate_jobs, procrastinate_workers CASCADE")


async def _bulk(count: int) -> None:
    by_entity: dict[int, list[dict[str, int]]] = {}
    for entity, n in ordering.share(count):
        by_entity.setdefault(entity, []).append({"entity": entity, "n": n})
    async with app.open_async():
        for entity, jobs in by_entity.items():
            await run.configure(lock=f"e{entity}").batch_defer_async(*jobs)


def bulk(count: int) -> None:
    asyncio.run(_bulk(count))
    with psycopg.connect(DSN, autocommit=True) as connection:
        # As a server does by itself after a minute: without figures it plans badly.
        connection.execute("ANALYZE procrastinate_jobs")


def left(_: Any) -> int:
    with psycopg.connect(DSN, autocommit=True) as connection:
        row = connection.execute(
            "SELECT count(*) FROM procrastinate_jobs WHERE status IN ('todo', 'doing')"
        ).fetchone()
    return int(row[0]) if row else 0


async def _work() -> None:
    async with app.open_async():
        await app.run_worker_async(concurrency=50, delete_jobs="always", install_signal_handlers=False)


async def _migrate() -> None:
    async with app.open_async():
        await app.schema_manager.apply_schema_async()


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        asyncio.run(_work())
    else:
        asyncio.run(_migrate())
        ordering.main(sys.modules[__name__])
