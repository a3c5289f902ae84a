"""What Spark queries hold, by hand: the list, the question, and the return."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import Shop, call, picture

pytestmark = pytest.mark.slow

TOPIC = "image-renders"


@pytest.fixture(autouse=True)
def _let_go(shop: Shop) -> Iterator[None]:
    """Leave nothing claimed: other tests take messages of the same slots."""
    yield
    shop.manage("rmqclaims", TOPIC, "--return", "--no-input")


def held(shop: Shop, consumer: str) -> None:
    """Let a query hold 40 messages."""
    shop.fill(call("claimed", TOPIC, [{"sku": sku, "shop": sku % 7} for sku in range(9000, 9040)], consumer))


def test_claims_are_found_on_the_page_of_the_topic_and_returned(shop: Shop, log_in: Any) -> None:
    held(shop, "nightly")
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


def test_a_viewer_sees_claims_without_buttons(shop: Shop, log_in: Any) -> None:
    held(shop, "hourly")
    page = log_in("viewer")
    page.goto(f"{shop.admin}{TOPIC}/claims/")
    expect(page.locator("#content-main").get_by_role("row").filter(has_text="hourly")).to_have_count(1)
    expect(page.get_by_role("button", name="Return")).to_have_count(0)
