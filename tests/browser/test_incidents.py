"""What goes wrong at night is said on the first screen: each of eight incidents, of real servers and workers."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from playwright.sync_api import Locator, Page, expect

from tests.browser.conftest import Shop, call, picture, running_shop
from tests.support.workers import eventually

pytestmark = pytest.mark.slow

GOAL_SECONDS = 15.0
"""Seconds after which an open dashboard says what has happened. A machine that others use gets five times as many."""

THREADS = 2


@pytest.fixture(scope="module")
def shop(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    """A shop of its own: what happens here would be seen on the pages of the other tests for an hour."""
    with running_shop(tmp_path_factory.mktemp("night"), settings="incidents.settings") as running:
        yield running


class FirstScreen:
    """The dashboard of a person who only looks."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.findings: Locator = page.locator("[data-rmq-part=findings]")

    def count(self) -> int:
        """Return the number of findings in the title of the page."""
        found = re.match(r"\((\d+)\) ", self.page.title())
        return int(found[1]) if found else 0

    def says(self, sentence: str, before: int) -> int:
        """Wait until a line says this and the title counts more than ``before``; return what it counts."""
        began = time.monotonic()
        line = self.findings.locator("li.rmq-is-alarm").filter(has_text=sentence)
        expect(line.first).to_be_in_viewport(timeout=5 * GOAL_SECONDS * 1000)
        print(f"{time.monotonic() - began:5.1f} s: {line.first.inner_text()}")
        eventually(lambda: self.count() > before, "a higher number in the title")
        return self.count()


def test_each_incident_of_a_night_is_on_the_first_screen(shop: Shop, log_in: Any) -> None:
    worker = shop.start("night", "runrmqconsumers", "--threads", str(THREADS))
    page = log_in("boss")
    page.get_by_label("Refresh").select_option("2")
    screen = FirstScreen(page)
    # The worker has begun when each topic has one.
    expect(screen.findings).to_contain_text("Nothing needs attention", timeout=5 * GOAL_SECONDS * 1000)
    assert screen.count() == 0

    shop.fill(call("dead", "cards", [{"number": number} for number in range(40)], "Lost: no answer"))
    seen = screen.says("cards: 40 messages are dead", 0)

    shop.fill(call("running", "slow", {"import": 1}, 1_000.0))
    seen = screen.says("slow: the longest delivery has run for", seen)

    shop.fill(call("late", "letters", [{"number": 1}], 900.0))
    seen = screen.says("letters: the oldest message has been due for", seen)

    refused = "MessageTooLarge: the body has 70000 bytes"
    shop.fill(
        call("outbox", "image-renders", [{"sku": sku, "shop": 3} for sku in range(19)], refused=refused)
    )
    seen = screen.says("image-renders: 19 messages in the outbox were refused", seen)

    shop.fill(call("dying_schedule", "mailing", "nightly"))
    seen = screen.says("the latest of its runs that ended is dead", seen)

    # All threads of the only worker wait for a service that never answers, and other messages wait behind them.
    shop.fill(
        call("usual", "hung", 0.05),
        call("late", "hung", [{"number": number} for number in range(4 * THREADS)], 0.0),
        call("threads_taken", THREADS),
        call("late", "behind", [{"number": number} for number in range(50)], 900.0),
    )
    seen = screen.says("behind: the oldest message has been due for", seen)
    seen = screen.says("1 worker is stuck: all its threads are in calls that take unusually long", seen)

    os.killpg(worker.pid, signal.SIGKILL)
    seen = screen.says("1 worker vanished in the last hour", seen)
    expect(screen.findings).to_contain_text("no live worker serves it")

    with redis.Redis.from_url(shop.redis.url) as client:
        client.config_set("maxmemory", "1mb")
    screen.says("Redis refuses writes: its memory is full", seen)
    expect(page.locator("link[data-rmq-favicon]")).to_have_attribute("href", re.compile(r"findings-\d+\.svg"))
    picture(page, "incidents-light")
