"""Workers in the admin, by hand: one is quieted, resumed and stopped, and its pages can be read."""

from __future__ import annotations

from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from tests.browser.conftest import PATIENCE, SHOTS, Shop

pytestmark = pytest.mark.slow

PATIENT = 2 * PATIENCE * 1000
"""Milliseconds for a worker to start, or to obey with its next report."""


def look(page: Page, name: str) -> None:
    """Take pictures of a page as people have it, and check that it can be read."""
    SHOTS.mkdir(parents=True, exist_ok=True)
    for scheme, width in (("light", 1280), ("dark", 390)):
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        page.set_viewport_size({"width": width, "height": 900})
        page.screenshot(path=SHOTS / f"{name}-{scheme}.png", full_page=True)
        found = Axe().run(page, options={"runOnly": ["wcag2a", "wcag2aa", "wcag22aa", "best-practice"]})
        assert found.violations_count == 0, found.generate_report()
    page.set_viewport_size({"width": 1360, "height": 900})


def test_a_worker_is_quieted_resumed_and_stopped(shop: Shop, log_in: Any) -> None:
    process = shop.start("asked", "runrmqconsumers", "--threads", "2")
    try:
        page = log_in("boss")
        page.get_by_role("link", name="Workers").click()
        page.get_by_label("Refresh").select_option("2")
        quiet, resume = (page.get_by_role("button", name=f"{word} worker") for word in ("Quiet", "Resume"))
        expect(quiet).to_be_visible(timeout=PATIENT)
        look(page, "workers")

        quiet.click()
        expect(page.locator("#content-main")).to_contain_text("take no more messages?")
        look(page, "quiet")
        page.get_by_role("button", name="Yes, do it").click()
        expect(page.locator(".messagelist")).to_contain_text("asked to take no more messages")
        expect(resume).to_be_visible(timeout=PATIENT)
        # Other tests have workers here that take no requests.
        rows = page.get_by_role("region", name="Workers").locator("tbody tr")
        expect(rows.filter(has=resume)).to_contain_text("quiet")

        resume.click()
        expect(quiet).to_be_visible(timeout=PATIENT)
        page.get_by_role("button", name="Stop worker").click()
        expect(page.locator("#content-main")).to_contain_text("all processes of the command end")
        look(page, "stop")
        page.get_by_role("button", name="Yes, do it").click()
        assert process.wait(PATIENT / 1000) == 0, shop.log("asked")
        expect(page.get_by_role("button", name="Stop worker")).to_have_count(0, timeout=PATIENT)
    finally:
        shop.stop(process)
