"""The page of the product sets: what it shows, and that it follows."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import Shop, call, picture, violations

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_sets_are_shown_with_their_newest_members(shop: Shop, page: Page, scheme: Any) -> None:
    shop.fill(call("product_sets", 8, labelled=5))
    page.emulate_media(color_scheme=scheme)
    page.goto(shop.url)
    page.get_by_role("link", name="Sets").click()
    section = page.locator("section").filter(has_text="Best rated")
    expect(section.get_by_role("row")).to_have_count(7)
    expect(section.get_by_role("row").nth(1)).to_contain_text("Amber Glazed Mug 8")
    expect(section.get_by_role("row").nth(1)).to_contain_text("waiting")
    picture(page, f"sets-{scheme}")
    page.set_viewport_size({"width": 390, "height": 844})
    picture(page, f"narrow-sets-{scheme}")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_the_page_follows_without_a_reload(shop: Shop, page: Page) -> None:
    shop.fill(call("product_sets", 3, labelled=3))
    page.goto(f"{shop.url}/sets/")
    section = page.locator("section").filter(has_text="Best rated")
    expect(section).to_contain_text("3 items")
    shop.fill(call("product_sets", 4, labelled=3))
    expect(section).to_contain_text("4 items")
    expect(section.get_by_role("row").nth(1)).to_contain_text("4 Amber")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_has_no_violation_of_wcag_a_and_aa(shop: Shop, page: Page, scheme: Any) -> None:
    shop.fill(call("product_sets", 3, labelled=1))
    page.emulate_media(color_scheme=scheme)
    # axe brings its own styles into the page: the policy is judged by the other tests.
    page.watched.allow("")  # type: ignore[attr-defined]
    page.goto(f"{shop.url}/sets/")
    assert violations(page) == []
