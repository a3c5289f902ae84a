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
