"""The outbox in the admin, by hand: what it shows, and a retry and a deletion of what is in it."""

from __future__ import annotations

import re
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.conftest import Shop, call, picture

pytestmark = pytest.mark.slow

TOPIC = "image-renders"
REASON = "MessageTooLarge: body has 70000 bytes; topic image-renders allows MAX_BODY = 65536"


@pytest.fixture
def filled(shop: Shop) -> Shop:
    shop.fill(
        call("outbox", TOPIC, [{"sku": 101, "shop": 3}, {"sku": 102, "shop": 3}]),
        call("outbox", TOPIC, [{"sku": 103, "shop": 4}], refused=REASON),
    )
    return shop


def row_of(page: Page, text: str) -> Locator:
    return page.locator("#content-main").get_by_role("row").filter(has_text=text)


def test_what_is_in_the_outbox_is_shown_retried_and_deleted(filled: Shop, log_in: Any) -> None:
    page = log_in("boss")
    way = page.locator("[data-rmq-part=links]").get_by_role("link", name="Outbox")
    expect(way).to_contain_text("1 refused")
    expect(way).to_have_class(re.compile("rmq-is-alarm"))
    way.click()
    expect(row_of(page, "101")).to_contain_text(TOPIC)
    expect(row_of(page, "103")).to_contain_text(REASON)
    expect(row_of(page, "103")).to_contain_text("refused")
    picture(page, "outbox-light")

    page.get_by_label("State").select_option(label="Refused")
    page.get_by_role("button", name="Filter").click()
    expect(row_of(page, "101")).to_have_count(0)
    row_of(page, "103").get_by_role("checkbox").check()
    page.get_by_role("button", name="Retry").click()
    expect(page.locator(".messagelist")).to_contain_text("1")
    expect(row_of(page, "103").get_by_text("refused")).to_have_count(0)

    row_of(page, "102").get_by_role("checkbox").check()
    page.get_by_role("button", name="Delete").click()
    expect(page.locator("#content-main")).to_contain_text("It will never be sent")
    page.get_by_role("button", name="Yes, do it").click()
    expect(row_of(page, "102")).to_have_count(0)
    expect(row_of(page, "101")).to_have_count(1)
