"""An action in the background by hand: it is started and left, and a worker that comes later does it."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import Shop, call
from tests.browser.test_workers import PATIENT, look

pytestmark = pytest.mark.slow


def test_a_purge_is_left_to_a_worker(shop: Shop, log_in: Any) -> None:
    shop.fill(
        call("dead", "letters", [{"background": number} for number in range(40)], "post.errors.Lost: away")
    )
    page = log_in("boss")
    page.goto(f"{shop.admin}letters/change/?tab=dead&error=post.errors.Lost")
    page.get_by_role("button", name="Delete all matches").click()
    look(page, "background-question")
    page.get_by_role("button", name="Yes, in the background").click()
    expect(page.locator(".messagelist")).to_contain_text("you can leave this page")
    row = page.get_by_role("region", name="In the background").locator("tbody tr").first
    expect(row).to_contain_text("40")
    look(page, "background")
    page.get_by_label("Refresh").select_option("2")
    process = shop.start("background", "runrmqconsumers", "--threads", "1")
    try:
        expect(row).to_contain_text("40 deleted", timeout=PATIENT)
    finally:
        shop.stop(process)
    expect(row.get_by_role("button", name="Stop")).to_have_count(0)


def test_a_replay_is_stopped_while_it_runs(shop: Shop, log_in: Any) -> None:
    # Of a topic of its own: what was replayed waits there.
    shop.fill(call("dead", "cards", [{"stopped": n} for n in range(200)], "post.errors.Late: away"))
    page = log_in("boss")
    page.goto(f"{shop.admin}cards/change/?tab=dead&error=post.errors.Late")
    page.get_by_role("button", name="Replay all").click()
    page.get_by_label("per second").fill("4")
    page.get_by_role("button", name="Yes, in the background").click()
    page.get_by_label("Refresh").select_option("2")
    row = page.get_by_role("region", name="In the background").locator("tbody tr").first
    process = shop.start("stopped", "runrmqconsumers", "--threads", "1")
    try:
        expect(row).to_contain_text("replayed", timeout=PATIENT)
        row.get_by_role("button", name="Stop").click()
        expect(page.locator(".messagelist")).to_contain_text("What it has done stays done")
        expect(row).to_contain_text("Replay all stopped", timeout=PATIENT)
        # The list may be the one from just before the end, so it is read again.
        page.reload()
        done = row.get_by_role("cell").filter(has_text="replayed").inner_text()
    finally:
        shop.stop(process)
    replayed = int(done.partition(" of ")[0])
    assert 0 < replayed < 200 and "stopped by boss" in done
    page.goto(f"{shop.admin}cards/history/")
    expect(page.locator("#content")).to_contain_text(f"stopped by boss): {replayed} replayed")
