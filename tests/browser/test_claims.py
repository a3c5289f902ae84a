"""What Spark queries hold, by hand: the list, the question, and the return."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import Shop, call, picture

pytestmark = pytest.mark.slow

TOPIC = "image-renders"


def test_claims_are_found_on_the_page_of_the_topic_and_returned(shop: Shop, log_in: Any) -> None:
    bodies = [{"sku": sku, "shop": sku % 7} for sku in range(9000, 9040)]
    shop.fill(call("claimed", TOPIC, bodies, "nightly"))
    page = log_in("boss")
    page.get_by_role("link", name=TOPIC, exact=True).click()
    page.get_by_role("navigation", name="Views of this topic").get_by_role("link", name="Claimed").click()
    page.get_by_role("link", name="Claims by query").click()
    row = page.locator("#content-main").get_by_role("row").filter(has_text="nightly")
    expect(row).to_contain_text("in a batch")
    expect(row).to_contain_text("40")
    picture(page, "claims-light")
    row.get_by_role("button", name="Return", exact=True).click()
    expect(page.locator("#content-main")).to_contain_text("Return 40 messages of nightly?")
    picture(page, "claims-question-light")
    page.get_by_role("button", name="Yes, do it").click()
    expect(page.locator(".messagelist")).to_contain_text("40 returned")
    expect(page.locator("#content-main")).to_contain_text("No Spark query holds messages of this topic.")
