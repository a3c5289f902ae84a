"""Requests that wait, against a web server with few threads: they never take them all."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from example_project.embedded_server import free_port
from tests.shop_server import TOPIC, Shop
from tests.workers import eventually

ROOT = Path(__file__).parents[2]
PROCESSES, THREADS = 2, 4
POLLS = 24


@pytest.fixture
def shop(redis_url: str, tmp_path: Path) -> Iterator[Shop]:
    """The example project under a server with eight threads in all."""
    port = free_port()
    environment = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "example_project.settings",
        "REDIS_URL": redis_url,
        "RMQ_KEY_PREFIX": f"t{uuid.uuid4().hex[:12]}:",
        "SHOP_DATA": str(tmp_path),
        "DJANGO_SUPERUSER_PASSWORD": "program",
    }
    shop = Shop(environment, port)
    shop.manage("migrate", "--verbosity", "0")
    shop.manage("createsuperuser", "--noinput", "--username", "program", "--email", "program@example.com")
    shop.token = shop.manage("drf_create_token", "program").split()[2]
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.prefork", str(port), str(PROCESSES), str(THREADS)],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT)},
    )
    try:
        eventually(shop.is_up, "the web server", 60)
        yield shop
    finally:
        server.terminate()
        server.wait(30)


@pytest.mark.slow
def test_long_polls_of_one_user_leave_threads_for_everybody_else(shop: Shop) -> None:
    def poll(_: int) -> tuple[Any, float]:
        began = time.monotonic()
        answer = shop.ask("POST", f"topics/{TOPIC}/prepare/", {"consumer": str(uuid.uuid4()), "wait": 20})
        return answer, time.monotonic() - began

    with ThreadPoolExecutor(POLLS) as pool:
        polls = [pool.submit(poll, n) for n in range(POLLS)]
        time.sleep(0.5)
        slowest = 0.0
        for _ in range(8):
            began = time.monotonic()
            assert shop.is_up()
            slowest = max(slowest, time.monotonic() - began)
        # The goal is a second; the machine may be busy.
        assert slowest < 5
        answers = [poll.result() for poll in polls]
    waited = [seconds for answer, seconds in answers if not answer["wait_refused"]]
    refused = [seconds for answer, seconds in answers if answer["wait_refused"]]
    # Half of the two of each process is one.
    assert 1 <= len(waited) <= PROCESSES
    assert min(waited) >= 20
    assert max(refused) < 10
