"""The settings of a topic by hand: the card is read, and its limits are changed and returned to the settings."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import Shop
from tests.browser.test_workers import look

pytestmark = pytest.mark.slow


def test_limits_are_changed_and_returned_to_the_settings(shop: Shop, log_in: Any) -> None:
    page = log_in("boss")
    page.goto(f"{shop.admin}notes/change/")
    page.get_by_role("link", name="Settings", exact=True).click()
    rows = page.get_by_role("region", name="Settings").locator("tbody tr")
    expect(rows.filter(has_text="SLOTS")).to_contain_text("this topic")
    expect(rows.filter(has_text="MAX_RETRIES")).to_contain_text("default")

    page.get_by_role("link", name="Change the limits").click()
    page.get_by_label("Messages per second").fill("2.5")
    look(page, "limits")
    page.get_by_role("button", name="Save").click()
    expect(page.locator(".messagelist")).to_contain_text("The limits were changed")
    expect(page.get_by_role("link", name="limits differ from the settings")).to_be_visible()
    expect(page.locator("#content-main")).to_contain_text("settings: no limit")
    look(page, "settings")

    page.get_by_role("button", name="Back to the settings").click()
    expect(page.locator(".messagelist")).to_contain_text("those of the settings")
    expect(page.get_by_role("link", name="limits differ from the settings")).to_have_count(0)
