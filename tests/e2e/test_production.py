"""The example shop with the settings of production, on PostgreSQL: it works, with as many connections as the docs say."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from urllib.error import HTTPError

import pytest

from tests.e2e.postgres import postgres
from tests.support import preloaded
from tests.support.commands import ROOT, output_of, started
from tests.support.embedded_server import free_port
from tests.support.servers import RedisServer, absent, ask
from tests.support.workers import eventually

PROCESSES, THREADS = 2, 4
CONNECTIONS = 9
"""The most connections of a worker process to Redis: 2 of the dispatcher, 2 of the coordinator, and 1 each for wake-ups, for
the heartbeat, for duties, for the relay of the outbox, and for what is asked at the start. Each thread whose listener sends
has one more at most."""
CHANGE_PRICES = """
from decimal import Decimal
from example_project.prices.changes import change_prices
from example_project.prices.models import Product
skus = list(Product.objects.values_list("sku", flat=True))
for cents in range(100, 103):
    change_prices([(sku, Decimal(cents) / 100) for sku in skus])
"""


class Shop:
    def __init__(self, folder: Path, stack: ExitStack) -> None:
        for name in ("gunicorn", "psycopg", "whitenoise"):
            if find_spec(name) is None:
                absent(f"{name} is not installed: make install")

        self.stack, self.folder = stack, folder
        self.redis = stack.enter_context(RedisServer(appendonly=True))
        self.database = stack.enter_context(postgres())
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "DJANGO_SETTINGS_MODULE": "example_project.production",
            "DJANGO_SECRET_KEY": "a-test-has-no-secrets-but-a-long-key-all-the-same-0123456789",
            "DATABASE_PASSWORD": "trusted",
            "PGPORT": str(self.database.port),
            "REDIS_URL": self.redis.url,
            "SHOP_DATA": str(folder),
            "WEB_CONCURRENCY": "1",
            "WEB_THREADS": str(THREADS),
        }

    def manage(self, *arguments: str) -> str:
        return output_of([*preloaded.python(), "manage.py", *arguments], self.environment)

    def start(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        """Start a process that ends with the test at the latest; PostgreSQL knows it by its name."""
        environment = {**self.environment, "PGAPPNAME": name}
        process = started([sys.executable, *command], self.folder / f"{name}.log", environment)
        self.stack.callback(process.wait)
        self.stack.callback(process.kill)
        return process

    def redis_connections(self) -> int:
        lines = ask(self.redis.port, "CLIENT", "LIST").splitlines()
        return len([line for line in lines if b"cmd=client" not in line])


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    with ExitStack() as stack:
        found = Shop(tmp_path, stack)
        found.manage("migrate", "--no-input", "--verbosity", "0")
        assert "registered" in found.manage("rmqtopics", "--apply")
        assert "no issues" in found.manage("check", "--deploy", "--tag", "rmq", "--fail-level", "WARNING")
        found.manage("seed_shop", "--products", "300")
        yield found


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return bool(answer.status == 200)
    except HTTPError as error:
        error.close()
        return False
    except OSError:
        return False


def most(count: Callable[[], int], until: Callable[[], bool], seconds: float = 60) -> int:
    """Return the largest count until something is so."""
    end, found = time.monotonic() + seconds, 0
    while not until():
        assert time.monotonic() < end, "it did not come about in time"
        found = max(found, count())
        time.sleep(0.02)
    return max(found, count())


def test_workers_and_web_run_in_production_with_the_connections_that_are_promised(shop: Shop) -> None:
    before = shop.redis_connections()
    health = free_port()
    options = (f"-p{PROCESSES}", f"-t{THREADS}", "--health-addr", f"127.0.0.1:{health}")
    worker = shop.start("worker", "manage.py", "runrmqconsumers", *options)
    eventually(lambda: answers(f"http://127.0.0.1:{health}/ready"), "a ready worker", 60)
    # Those of the outbox.
    assert shop.database.connections("worker") <= PROCESSES
    assert shop.redis_connections() - before <= PROCESSES * CONNECTIONS
    shop.manage("shell", "-v", "0", "-c", CHANGE_PRICES)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(eventually, lambda: is_empty(shop), "an empty queue", 120)
        used = most(lambda: shop.database.connections("worker"), waiting.done, 120)
        waiting.result()
    assert PROCESSES < used <= PROCESSES * (THREADS + 1)
    assert shop.redis_connections() - before <= PROCESSES * (CONNECTIONS + THREADS)
    assert "DRIFT" not in shop.manage("rmqaudit")
    worker.terminate()
    assert worker.wait(60) == 0
    eventually(lambda: shop.database.connections("worker") == 0, "the end of its connections")

    before = shop.redis_connections()
    port = free_port()
    binding = ("-c", "deploy/gunicorn.conf.py", "-b", f"127.0.0.1:{port}")
    web = shop.start("web", "-m", "gunicorn", *binding, "example_project.wsgi")
    url = f"http://127.0.0.1:{port}"
    eventually(lambda: answers(f"{url}/api/rmq/health/live"), "a web server", 60)
    with ThreadPoolExecutor(4 * THREADS) as pool:
        pages = [f"{url}/", f"{url}/api/rmq/health/ready"] * 40
        found = pool.map(answers, pages)
        assert all(found)
    assert shop.database.connections("web") <= THREADS
    assert 0 < shop.redis_connections() - before <= THREADS
    web.terminate()
    assert web.wait(60) == 0


def is_empty(shop: Shop) -> bool:
    """Return whether nothing is due or in hand any more."""
    time.sleep(0.5)
    stats = shop.manage("rmqstats", "price-changes", "image-renders").splitlines()[1:]
    # topic, type, store, due, prepare, retry, …
    return all(line.split()[2:6] == ["0"] * 4 for line in stats)
