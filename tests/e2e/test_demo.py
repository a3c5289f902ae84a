"""`python -m example_project.demo` from outside: what it prints, how it ends, and what it leaves behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from django_rmq.core.coordination.zookeeper import Ensemble, survey
from tests.support.commands import started
from tests.support.servers import ZooKeeperServer
from tests.support.workers import eventually

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("proc")]


class RunningDemo:
    """A demo with a folder of its own, and all it has printed so far."""

    def __init__(self, data: Path, *arguments: str, module: str, **given: str) -> None:
        self.data = data
        ours = (
            "REDIS_URL", "ZOOKEEPER_HOSTS", "SHOP_ZOOKEEPER", "RMQ_KEY_PREFIX", "SHOP_ORDER_SECONDS",
            "DJANGO_DEBUG",
        )  # fmt: skip
        environment = {name: value for name, value in os.environ.items() if name not in ours}
        environment |= {"SHOP_DATA": str(data), **given}
        self._printed = data.with_name(f"printed-{time.monotonic_ns()}")
        command = [sys.executable, "-u", "-m", module, *arguments]
        self.process = started(command, self._printed, environment, start_new_session=True)

    @property
    def output(self) -> str:
        return self._printed.read_text()

    def wait_for(self, pattern: str, seconds: float = 60) -> re.Match[str]:
        """Return the first match in what it prints; AssertionError with all of that after so many seconds, or at its end."""
        deadline = time.monotonic() + seconds
        while True:
            has_ended = self.process.poll() is not None
            if found := re.search(pattern, self.output, re.MULTILINE):
                return found
            assert not has_ended and time.monotonic() < deadline, f"no {pattern!r} in:\n{self.output}"
            time.sleep(0.05)

    def wait(self, seconds: float = 180) -> int:
        """Return its exit code."""
        return self.process.wait(seconds)

    def redis_answers(self) -> bool:
        """Whether the Redis that it said it started takes connections."""
        port = int(self.wait_for(r"^Redis: .* on port (\d+)$")[1])
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    def processes(self) -> list[str]:
        """The commands of all processes with this folder in their environment (Redis overwrites its own)."""
        found = []
        for folder in Path("/proc").iterdir():
            try:
                if folder.name.isdigit() and str(self.data).encode() in (folder / "environ").read_bytes():
                    found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                pass  # it ended meanwhile, or is not ours
        return found


@pytest.fixture
def start_demo(tmp_path: Path) -> Iterator[Callable[..., RunningDemo]]:
    demos: list[RunningDemo] = []

    def start(*arguments: str, module: str = "example_project.demo", **given: str) -> RunningDemo:
        arguments = ("--port", "0", *arguments)
        if module == "example_project.demo":
            arguments = ("--products", "200", *arguments)
        demos.append(RunningDemo(tmp_path / "shop", *arguments, module=module, **given))
        return demos[-1]

    yield start
    for demo in demos:
        if demo.process.poll() is None:
            demo.process.send_signal(signal.SIGTERM)
            demo.wait()


@pytest.mark.usefixtures("java")
def test_a_run_of_some_seconds_with_zookeeper_accounts_for_everything_and_leaves_no_process(
    start_demo: Callable[..., RunningDemo],
) -> None:
    def owned() -> dict[str, int]:
        ensemble = Ensemble(server.hosts, "/shop/rmq")
        return {holding.topic: holding.stop for holding in survey(ensemble).holdings}

    slots = {"price-changes": 64, "image-renders": 16, "order-timeouts": 16, "reports": 1, "memberships": 16}
    with ZooKeeperServer() as server:
        arguments = ("--seconds", "8", "--rate", "200")
        demo = start_demo(*arguments, SHOP_ZOOKEEPER="1", ZOOKEEPER_HOSTS=server.hosts)
        demo.wait_for(r"^ +\d+ s  sent ")
        began = time.monotonic()
        demo.wait_for(r"^Shop:")
        eventually(lambda: owned() == slots, "owning all slots", 30)
        demo.wait_for("^The traffic has stopped")
        assert 2 < time.monotonic() - began < 5 * 8
        assert demo.wait() == 0, demo.output
    assert "Every sent message is accounted for." in demo.output
    summary = dict(re.findall(r"^  ([a-z ]+): +(.*)$", demo.output, re.MULTILINE))
    count = {name: int(value.split()[0]) for name, value in summary.items() if value[0].isdigit()}
    changes, orders = map(int, re.findall(r"\d+", summary["sent"])[1:])
    assert count["sent"] == changes + orders
    assert changes > 300
    assert orders > 2
    assert count["closed"] + count["paid"] == orders
    assert 0 < count["merged"] < changes
    assert 0 < count["rendered"] <= changes
    assert count["retried"] >= 2
    assert count["dead"] == 1
    assert summary["ledger"] == "balanced in 100 slots"
    assert count["confirmed by mail"] == orders
    assert count["delivered early"] == count["not yet due or resting"] == 0
    assert demo.processes() == []
    assert not demo.redis_answers()


@pytest.mark.usefixtures("java")
def test_the_product_sets_alone_are_reconciled_and_leaves_no_process(
    start_demo: Callable[..., RunningDemo],
) -> None:
    # Long enough for a batch that computes sets while the sources still report.
    arguments = ("--seconds", "15", "--items", "60", "--rate", "40")
    demo = start_demo(*arguments, module="example_project.product_sets.demo")
    address = demo.wait_for(r"^Sets: +(http\S+/sets/)", 120)[1]
    demo.wait_for(r"sets Best rated: [1-9]", 300)
    with urllib.request.urlopen(address, timeout=30) as page:
        assert ">Joined<" in page.read().decode()
    assert demo.wait(600) == 0, demo.output
    summary = dict(re.findall(r"^  ([a-z ]+): +(.*)$", demo.output, re.MULTILINE))
    count = {name: int(value.split()[0]) for name, value in summary.items() if value[0].isdigit()}
    assert count["events written"] == count["events read"] > 4 * 60 + 15 * 40 / 2
    sent, merged = map(int, re.findall(r"\d+", summary["changes sent"]))
    assert count["changes consumed"] == sent - merged
    assert count["changes consumed"] < count["events written"]
    passed, folded = map(int, re.findall(r"\d+", summary["memberships sent"]))
    assert passed > folded
    assert "The rule of Best rated is edited: min rating 4" in demo.output
    assert "Everything is accounted for" in demo.output
    assert demo.processes() == []
    assert not demo.redis_answers()


def test_a_second_demo_on_the_same_folder_says_why_it_does_not_start_and_sigterm_ends_the_first(
    start_demo: Callable[..., RunningDemo],
) -> None:
    demo = start_demo("--seconds", "600")
    address = demo.wait_for(r"^Shop: +(http\S+)$")[1]
    with urllib.request.urlopen(address, timeout=30) as page:
        assert "The Price Tag" in page.read().decode()
    commands = " ".join(demo.processes())
    for part in ("runrmqconsumers", "runserver", "example_project.demo"):
        assert part in commands
    assert demo.redis_answers()
    second = start_demo()
    assert second.wait() == 1
    assert "another demo runs on" in second.output
    assert demo.process.poll() is None
    demo.process.send_signal(signal.SIGTERM)
    assert demo.wait() == 128 + signal.SIGTERM, demo.output
    assert demo.processes() == []
    assert not demo.redis_answers()


def test_prices_change_before_anything_else_is_ready_and_ctrl_c_is_the_ordinary_end(
    start_demo: Callable[..., RunningDemo],
) -> None:
    demo = start_demo()
    demo.wait_for(r"^Redis: ")
    first_line = time.monotonic()
    demo.wait_for(r"^ +\d+ s  sent [1-9]")
    assert time.monotonic() - first_line < 5 * 10
    demo.wait_for(r"^Shop:")
    demo.process.send_signal(signal.SIGINT)
    assert demo.wait() == 0, demo.output
    assert demo.output.index("  sent ") < demo.output.index("Shop: ") < demo.output.index("Summary")
    assert "balanced in 100 slots" in demo.output
    assert demo.processes() == []
    assert not demo.redis_answers()
