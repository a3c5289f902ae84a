"""Workers in the admin, by hand: one is quieted, resumed and stopped, and its pages can be read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import PATIENCE, Shop, call, picture, violations
from tests.support.servers import RedisServer

pytestmark = pytest.mark.slow

PATIENT = 2 * PATIENCE * 1000
"""Milliseconds for a worker to start, or to obey with its next report."""


def look(page: Page, name: str) -> None:
    """Take pictures of a page as people have it, and check that it can be read."""
    for scheme, width in (("light", 1280), ("dark", 390)):
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        page.set_viewport_size({"width": width, "height": 900})
        picture(page, f"{name}-{scheme}")
        assert violations(page, ("wcag2a", "wcag2aa", "wcag22aa", "best-practice")) == []
        hidden = page.locator(".rmq-scroll").evaluate_all(
            "all => all.map(one => one.scrollWidth - one.clientWidth)"
        )
        assert max(hidden, default=0) <= 0, f"a table of {name} is {max(hidden)} pixels wider than its page"
    page.set_viewport_size({"width": 1360, "height": 900})


@pytest.fixture
def hung(chromium: str, tmp_path: Path) -> Iterator[Shop]:
    """A shop of its own, whose topics have a listener that hangs."""
    with RedisServer() as server:
        running = Shop(tmp_path, server)
        running.environment["DJANGO_SETTINGS_MODULE"] = "tests.browser.shop.incidents.settings"
        try:
            running.manage("migrate", "--verbosity", "0")
            running.fill(call("user", "boss", "*"), call("late", "hung", [{"number": 1}], 0.0))
            running.serve()
            yield running
        finally:
            running.close()


def test_a_worker_is_asked_where_a_listener_hangs(hung: Shop, page: Page) -> None:
    hung.start("hangs", "runrmqconsumers", "--threads", "1")
    page.goto(f"{hung.url}/admin/login/?next=/admin/django_rmq/topic/running/")
    page.get_by_label("Username").fill("boss")
    page.get_by_label("Password").fill("boss")
    page.get_by_role("button", name="Log in").click()
    page.get_by_label("Refresh").select_option("2")
    ask = page.get_by_role("button", name="Show the stack of")
    expect(ask).to_be_visible(timeout=PATIENT)
    look(page, "running")

    ask.click()
    expect(page.get_by_role("heading", name="Stack", exact=True)).to_be_visible()
    stack = page.locator("[data-rmq-part=stack] pre")
    expect(stack).to_contain_text("wait_for_ever", timeout=PATIENT)
    expect(stack).to_contain_text("threading.Event().wait()")
    expect(page.get_by_role("button", name="Ask again")).to_be_visible()
    look(page, "stack")
    # The same in another language, and without a script: the page as it is loaded has the answer.
    assert page.context.browser is not None
    chinese = page.context.browser.new_context(
        locale="zh-CN",
        extra_http_headers={"Accept-Language": "zh-Hans"},
        storage_state=page.context.storage_state(),
        java_script_enabled=False,
    )
    try:
        other = chinese.new_page()
        other.goto(page.url)
        expect(other.locator("[data-rmq-part=stack] pre")).to_contain_text("wait_for_ever")
        expect(other.locator("#content-main")).to_contain_text("调用栈")
        picture(other, "stack-zh")
    finally:
        chinese.close()


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
        page.get_by_role("button", name="Yes, do it").click()
        assert process.wait(PATIENT / 1000) == 0, shop.log("asked")
        expect(page.get_by_role("button", name="Stop worker")).to_have_count(0, timeout=PATIENT)
    finally:
        shop.stop(process)
