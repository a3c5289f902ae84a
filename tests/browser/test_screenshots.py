"""Pictures of the pages, light and dark, in build/screenshots: for a person to look at."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import Shop, call, picture

pytestmark = pytest.mark.slow

TRACEBACK = """requests.exceptions.ConnectTimeout: HTTPSConnectionPool(host='photos.example', port=443): timed out
Traceback (most recent call last):
  File "/srv/shop/prices/listeners.py", line 48, in render
    render_price(product, attempt=attempt)
  File "/srv/shop/prices/rendering.py", line 71, in render_price
    photo = fetch(product.photo_url, timeout=5)
requests.exceptions.ConnectTimeout: HTTPSConnectionPool(host='photos.example', port=443): timed out"""


@pytest.fixture(scope="module")
def filled(shop: Shop) -> Shop:
    shop.fill(
        call("dead", "image-renders", [{"sku": sku, "shop": 3} for sku in range(5000, 5032)], TRACEBACK),
        call(
            "dead",
            "order-timeouts",
            [
                {
                    "order": number,
                    "customer": {"name": "Ada Lovelace", "city": "London", "vip": True, "since": 1843},
                    "lines": [
                        {"sku": 17, "quantity": 2, "price": "12.50"},
                        {"sku": 4, "quantity": 1, "note": None},
                    ],
                }
                for number in (9001, 9002)
            ],
            "orders.errors.PaymentGatewayError: the gateway answered 502 three times",
        ),
        call("resting", "image-renders", [{"sku": sku, "shop": 3} for sku in range(6000, 6004)], TRACEBACK),
        call("in_flight", "order-timeouts", [{"order": 77}, {"order": 78}]),
        call("waiting", "image-renders", [{"sku": sku, "shop": sku % 9} for sku in range(1200)]),
        call("waiting", "order-timeouts", [{"order": number} for number in range(340)]),
        call("waiting", "price-changes", [{"sku": sku} for sku in range(4100)]),
        *(call("history", name, 30) for name in ("image-renders", "order-timeouts", "price-changes")),
        call("versions", ["2026.11.2", "2026.11.3"]),
    )
    return shop


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.deep)])
def test_pictures_are_taken(filled: Shop, log_in: Any, page: Page, scheme: Any) -> None:
    page.emulate_media(color_scheme=scheme)
    log_in("boss")

    def shot(name: str) -> None:
        picture(page, f"{name}-{scheme}")

    expect(page.get_by_role("heading", name="Topics")).to_be_visible()
    shot("dashboard")
    page.get_by_role("link", name="image-renders", exact=True).click()
    shot("topic")
    page.get_by_role("navigation", name="Views of this topic").get_by_role("link", name="Dead").click()
    page.get_by_label("Select message 2", exact=True).check()
    shot("dead")
    page.locator("#content-main").get_by_role("row").nth(2).get_by_role("link").first.click()
    shot("message")
    page.goto(f"{filled.admin}image-renders/change/")
    page.get_by_role("button", name="Pause", exact=True).click()
    page.goto(f"{filled.admin}image-renders/change/?tab=history")
    happened = page.get_by_role("region", name="What happened").get_by_role("listitem")
    expect(happened.filter(has_text="Version 2026.11.3")).to_be_visible()
    expect(happened.filter(has_text="Pause").first).to_be_visible()
    shot("history")
    page.goto(f"{filled.admin}image-renders/change/")
    page.get_by_role("button", name="Resume", exact=True).click()
    page.goto(f"{filled.admin}causes/")
    shot("causes")
    page.goto(filled.admin)
    page.get_by_role("searchbox", name="Find messages").fill("gateway")
    page.get_by_role("button", name="Find", exact=True).click()
    found = page.get_by_role("region", name="Messages").get_by_role("row")
    expect(found.nth(1)).to_contain_text("orders.errors.PaymentGatewayError")
    expect(found.nth(1)).to_contain_text("order-timeouts")
    shot("search")
    page.get_by_role("link", name="order-timeouts", exact=True).first.click()
    expect(page.get_by_label("Text")).to_have_value("gateway")
    page.goto(f"{filled.admin}image-renders/change/?tab=slots")
    shot("slots")
    page.goto(f"{filled.admin}order-timeouts/change/?tab=dead")
    expect(page.get_by_role("columnheader", name="customer.city")).to_be_visible()
    expect(page.get_by_role("cell", name="London").first).to_be_visible()
    shot("columns")
    page.locator("#content-main").get_by_role("row").nth(1).get_by_role("link").first.click()
    shot("message-json")
    page.goto(f"{filled.admin}order-timeouts/change/?tab=dead")
    page.get_by_role("button", name="Purge").click()
    shot("confirm")
    page.goto(f"{filled.admin}order-timeouts/send/")
    shot("send")
    page.goto(f"{filled.admin}order-timeouts/change/?tab=dead")
    page.set_viewport_size({"width": 390, "height": 844})
    shot("narrow")
    page.goto(f"{filled.admin}search/?q=gateway")
    shot("narrow-search")
    page.goto(filled.admin)
    shot("narrow-dashboard")
