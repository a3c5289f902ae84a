"""Schedules in the admin, by hand: what is shown, and pause, resume, run now, edit and reset."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.conftest import Shop, call, picture

pytestmark = pytest.mark.slow


@pytest.fixture
def filled(shop: Shop) -> Shop:
    shop.fill(call("schedules"))
    return shop


def row_of(page: Page, text: str) -> Locator:
    return page.locator("#content-main").get_by_role("row").filter(has_text=text)


def test_a_schedule_is_paused_resumed_run_edited_and_reset(filled: Shop, log_in: Any) -> None:
    page = log_in("boss")
    page.locator("[data-rmq-part=links]").get_by_role("link", name="Schedules").click()
    row = row_of(page, "daily-report")
    expect(row).to_contain_text("0 3 * * * Europe/Berlin")
    picture(page, "schedules-light")

    page.get_by_role("button", name="Pause daily-report").click()
    expect(row).to_contain_text("paused")
    page.get_by_role("button", name="Resume daily-report").click()
    expect(row).not_to_contain_text("paused")
    page.get_by_role("button", name="Run daily-report now").click()
    expect(page.locator(".messagelist")).to_contain_text("1 stored")

    page.get_by_role("link", name="Edit daily-report").click()
    page.get_by_label("Cron expression").fill("0 25 * * *")
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_role("alert")).to_contain_text("is not a cron expression")
    page.get_by_label("Cron expression").fill("0 5 * * *")
    page.get_by_role("button", name="Save").click()
    expect(row).to_contain_text("edited")
    expect(row).to_contain_text("settings: 0 3 * * * Europe/Berlin")
    page.get_by_role("button", name="Reset daily-report to the settings").click()
    expect(row).not_to_contain_text("edited")
