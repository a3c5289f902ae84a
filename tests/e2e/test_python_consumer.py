"""examples/consume.py, the consumer in Python without Django, against a real server and a bad network."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.commands import ROOT
from tests.support.servers import TcpProxy
from tests.support.shop_server import TOPIC, Shop, running
from tests.support.workers import eventually

EXAMPLE = ROOT / "examples/consume.py"
PYTHON = (sys.executable, "-I", "-S")
"""Python with its standard library and nothing else."""
TIMEOUT = 4
WORK = 'print(json.dumps(message["body"]), flush=True)'
TEST_WORK = """
    import time
    print("begun", json.dumps(message["body"]), flush=True)
    if message["body"].get("fail"):
        raise ValueError("the body says so")
    time.sleep(message["body"].get("seconds", 0))
    print("done", json.dumps(message["body"]), flush=True)
"""


@pytest.fixture(scope="module")
def shop(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    """A shop whose deliveries time out soon, and are tried again much later."""
    with running(redis_url, tmp_path_factory.mktemp("shop"), TIMEOUT=TIMEOUT, BACKOFF=600) as found:
        yield found


@pytest.fixture(autouse=True)
def empty(shop: Shop) -> None:
    """Begin each test with an empty topic."""
    for state in ("waiting", "resting", "dead"):
        shop.ask("POST", f"v1/topics/{TOPIC}/purge/", {"state": state})


class Consumer:
    """The example as a process, with work that the test chooses."""

    def __init__(self, shop: Shop, folder: Path, url: str, *arguments: str) -> None:
        source = EXAMPLE.read_text()
        assert source.count(WORK) == 1
        program = folder / "consume.py"
        program.write_text(source.replace(WORK, TEST_WORK.strip()))
        self.out, self.err = folder / "out", folder / "err"
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(
                [*PYTHON, program, TOPIC, *arguments],
                env={"PATH": os.environ["PATH"], "RMQ_URL": url, "RMQ_TOKEN": shop.token},
                stdout=out,
                stderr=err,
            )

    def says(self, text: str) -> bool:
        return text in self.out.read_text() or text in self.err.read_text()

    def stop(self) -> float:
        """Send SIGTERM, and return after how many seconds it has ended."""
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)
        return time.monotonic() - began


@contextmanager
def consuming(shop: Shop, folder: Path, *arguments: str, url: str = "") -> Iterator[Consumer]:
    consumer = Consumer(shop, folder, url or shop.url, *arguments)
    try:
        yield consumer
    finally:
        consumer.process.kill()
        consumer.process.wait(30)


def figures(shop: Shop) -> dict[str, int]:
    found = shop.ask("GET", f"v1/topics/{TOPIC}/")
    return {name: found[name] for name in ("waiting", "running", "resting", "dead")}


def failed(shop: Shop) -> int:
    time.sleep(1.1)  # for a second a process answers what it has answered before
    (found,) = [one for one in shop.ask("GET", "v1/stats/")["results"] if one["topic"] == TOPIC]
    return int(found["failed"])


def test_it_is_short_and_needs_the_standard_library_only() -> None:
    lines = EXAMPLE.read_text().splitlines()
    assert len(lines) <= 100
    imported = {found[1] for line in lines if (found := re.match(r"(?:import|from) (\w+)", line))}
    assert imported <= sys.stdlib_module_names


def test_it_commits_what_succeeds_and_rolls_back_what_fails(shop: Shop, tmp_path: Path) -> None:
    shop.send(*({"n": n} for n in range(12)), {"fail": True})
    before = failed(shop)
    with consuming(shop, tmp_path, "13") as consumer:
        assert consumer.process.wait(60) == 0, consumer.err.read_text()
        done = [json.loads(line[5:]) for line in consumer.out.read_text().splitlines() if line[:4] == "done"]
    assert [body["n"] for body in done] == list(range(12))
    assert failed(shop) == before + 1
    (kept,) = shop.ask("GET", f"v1/topics/{TOPIC}/messages/?state=retry")["results"]
    assert kept["error"] == "ValueError: the body says so"
    assert figures(shop) == {"waiting": 0, "running": 0, "resting": 1, "dead": 0}


def test_it_extends_what_takes_longer_than_the_time_out(shop: Shop, tmp_path: Path) -> None:
    # The second waits in the consumer's hand for as long as the first takes.
    shop.send({"seconds": 2.5 * TIMEOUT}, {"n": 2})
    before = failed(shop)
    with consuming(shop, tmp_path, "2") as consumer:
        assert consumer.process.wait(90) == 0, consumer.err.read_text()
        assert consumer.out.read_text().count("begun") == 2
        assert consumer.err.read_text() == ""
    assert failed(shop) == before
    assert figures(shop) == {"waiting": 0, "running": 0, "resting": 0, "dead": 0}


def test_it_waits_ever_longer_for_a_server_that_is_unreachable(shop: Shop, tmp_path: Path) -> None:
    shop.send({"n": 1})
    port = int(shop.url.split(":")[2].partition("/")[0])
    with TcpProxy(port) as network:
        network.cut()
        url = f"http://127.0.0.1:{network.port}/api/rmq"
        began = time.monotonic()
        with consuming(shop, tmp_path, "1", url=url) as consumer:
            # After pauses of 1, 2 and 4 seconds.
            for tries, least in enumerate((0, 1, 3, 7), 1):
                eventually(
                    lambda tries=tries: len(consumer.err.read_text().splitlines()) >= tries,  # type: ignore[misc]
                    f"try {tries}",
                    60,
                )
                assert time.monotonic() - began >= least
            assert not consumer.says("done")
            network.mend()
            assert consumer.process.wait(60) == 0, consumer.err.read_text()
            assert consumer.says('done {"n": 1, "shop": 1}')
    assert figures(shop) == {"waiting": 0, "running": 0, "resting": 0, "dead": 0}


def test_after_a_lost_answer_it_works_on_what_it_holds(shop: Shop, tmp_path: Path) -> None:
    shop.send({"n": 1})
    port = int(shop.url.split(":")[2].partition("/")[0])
    before = failed(shop)
    with TcpProxy(port) as network:
        network.drop_reply(b"/prepare/")
        url = f"http://127.0.0.1:{network.port}/api/rmq"
        with consuming(shop, tmp_path, "1", url=url) as consumer:
            assert consumer.process.wait(60) == 0, consumer.err.read_text()
            assert consumer.says("prepare: ") and consumer.says('done {"n": 1, "shop": 1}')
    # Nothing timed out in between.
    assert failed(shop) == before
    assert figures(shop) == {"waiting": 0, "running": 0, "resting": 0, "dead": 0}


def test_sigterm_ends_it_after_the_message_in_hand(shop: Shop, tmp_path: Path) -> None:
    shop.send({"seconds": 2}, {"n": 2}, {"n": 3})
    with consuming(shop, tmp_path) as consumer:
        eventually(lambda: consumer.says("begun"), "the first message", 60)
        consumer.stop()
        assert consumer.process.returncode == 0, consumer.err.read_text()
        assert consumer.says('done {"seconds": 2') and not consumer.says('{"n": 2')
    # The others went back, and their retries are all there.
    found = shop.ask("GET", f"v1/topics/{TOPIC}/messages/")["results"]
    assert [(one["body"]["n"], one["retries_left"]) for one in found] == [(2, None), (3, None)]
    assert figures(shop) == {"waiting": 2, "running": 0, "resting": 0, "dead": 0}


def test_sigterm_ends_it_while_it_waits_and_while_the_server_is_unreachable(
    shop: Shop, tmp_path: Path
) -> None:
    shop.send({"n": 1})
    with consuming(shop, tmp_path) as consumer:
        eventually(lambda: consumer.says("done"), "the message", 60)
        assert consumer.stop() < 15
        assert consumer.process.returncode == 0, consumer.err.read_text()
    with consuming(shop, tmp_path, url="http://127.0.0.1:1/api/rmq") as consumer:
        eventually(lambda: consumer.says("prepare: "), "an error", 60)
        assert consumer.stop() < 15
        assert consumer.process.returncode == 0, consumer.err.read_text()
