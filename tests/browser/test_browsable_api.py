"""REST in a real browser: the browsable API of Django REST framework, with the session of the admin."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import Shop

pytestmark = pytest.mark.slow

TOPIC = "item-changes"


def test_a_message_is_sent_looked_at_and_deleted(shop: Shop, log_in: Callable[[str], Page]) -> None:
    page = log_in("boss")
    expect(page.locator("#content-main")).to_be_visible()
    # The pages of the framework have styles in their HTML, which the policy of the shop refuses.
    page.watched.allow("inline style")  # type: ignore[attr-defined]
    page.watched.allow("CSP: style-src")  # type: ignore[attr-defined]
    messages = f"{shop.url}/api/rmq/v1/topics/{TOPIC}/messages/"
    page.goto(messages)
    page.locator("textarea[name=_content]").fill(json.dumps({"body": {"item": 1, "seen": "<i>x</i>"}}))
    page.get_by_role("button", name="POST").click()
    answer = page.locator(".response-info")
    expect(answer).to_contain_text("HTTP 202 Accepted")
    expect(answer).to_contain_text('"outcomes": {')
    found = page.request.get(messages, headers={"Accept": "application/json"}).json()["results"]
    (message,) = [one for one in found if one["body"] == {"item": 1, "seen": "<i>x</i>"}]
    page.goto(f"{messages}{message['id']}/")
    expect(answer).to_contain_text("<i>x</i>")
    page.get_by_role("button", name="DELETE").click()
    page.locator("#deleteModal .btn-danger").click()
    expect(answer).to_contain_text('"outcome": "deleted"')
