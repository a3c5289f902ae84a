"""What a person has deleted is brought back by hand: at once, and from the list of what can be undone."""

from __future__ import annotations

import re
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser.conftest import Shop, call
from tests.browser.test_workers import look

pytestmark = pytest.mark.slow


def test_deleted_messages_come_back(shop: Shop, log_in: Any) -> None:
    shop.fill(call("dead", "notes", [f"undo {number}" for number in range(3)], "shop.undo.Scripted: no"))
    page = log_in("boss")
    delete_and_undo(shop, page, "shop.undo.Scripted", takes_pictures=True)


def test_deleted_messages_come_back_without_javascript(shop: Shop, browser: Browser, log_in: Any) -> None:
    shop.fill(call("dead", "notes", [f"undo {number}" for number in range(3)], "shop.undo.Plain: no"))
    plain = browser.new_context(
        storage_state=log_in("boss").context.storage_state(), java_script_enabled=False
    )
    try:
        delete_and_undo(shop, plain.new_page(), "shop.undo.Plain")
    finally:
        plain.close()


def delete_and_undo(shop: Shop, page: Page, error: str, *, takes_pictures: bool = False) -> None:
    address = f"{shop.admin}notes/change/?tab=dead&error={error}"
    page.goto(address)
    expect(page.get_by_text("undo 1").first).to_be_visible()
    page.get_by_role("button", name="Delete all matches").click()
    expect(page.get_by_text("Deleted messages can be brought back for one hour")).to_be_visible()
    page.get_by_role("button", name="Yes, do it").click()
    expect(page.locator(".messagelist")).to_have_text(re.compile("3 deleted"))
    if takes_pictures:
        look(page, "undo-offered")
    expect(page.get_by_text("undo 1")).to_have_count(0)
    page.get_by_role("button", name="Undo").click()
    expect(page.locator(".messagelist")).to_have_text(re.compile("Undo: 3 brought back."))
    expect(page.get_by_text("undo 1").first).to_be_visible()


def test_the_list_of_what_can_be_undone(shop: Shop, log_in: Any) -> None:
    shop.fill(call("dead", "notes", ["listed 1", "listed 2"], "shop.undo.Listed: no"))
    page = log_in("boss")
    page.goto(f"{shop.admin}notes/change/?tab=dead&error=shop.undo.Listed")
    page.get_by_role("button", name="Delete all matches").click()
    page.get_by_role("button", name="Yes, do it").click()
    page.goto(f"{shop.admin}background/")
    region = page.get_by_role("region", name="Can be undone")
    expect(region).to_contain_text("by boss")
    look(page, "undo-list")
    region.get_by_role("button", name="Undo: Delete of notes").first.click()
    expect(page.locator(".messagelist")).to_have_text(re.compile("Undo: 2 brought back."))
    look(page, "undo-done")
