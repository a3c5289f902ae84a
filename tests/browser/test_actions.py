"""What people do in the admin, by hand: settings, schedules, workers, the outbox, claims, actions in the background, and undo."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import redis
from playwright.sync_api import Browser, Locator, Page, expect

from tests.browser.conftest import PATIENCE, Shop, call, confirm, enter, picture, running_shop, violations

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


@pytest.fixture
def scheduled(shop: Shop) -> Shop:
    shop.fill(call("schedules"))
    return shop


def row_of(page: Page, text: str) -> Locator:
    return page.locator("#content-main").get_by_role("row").filter(has_text=text)


def test_a_schedule_is_paused_resumed_run_edited_and_reset(scheduled: Shop, log_in: Any) -> None:
    page = log_in("boss")
    page.locator("[data-rmq-part=links]").get_by_role("link", name="Schedules").click()
    row = row_of(page, "daily-report")
    expect(row).to_contain_text("0 3 * * * Europe/Berlin")
    picture(page, "schedules-light")

    page.get_by_role("button", name="Pause daily-report").click()
    expect(row).to_contain_text("paused")
    page.get_by_role("button", name="Resume daily-report").click()
    expect(row).not_to_contain_text("paused")
    posts: list[str] = []
    page.on("request", lambda request: posts.append(request.url) if request.method == "POST" else None)
    with closing(redis.Redis.from_url(scheduled.redis.url)) as client:
        client.client_pause(1_000)
    page.get_by_role("button", name="Run daily-report now").evaluate(
        "button => { button.click(); setTimeout(() => button.click(), 200); }"
    )
    expect(page.locator(".messagelist")).to_contain_text("1 stored")
    assert len(posts) == 1, "a second press runs it again"

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
    late = call("late", "hung", [{"number": 1}], 0.0)
    with running_shop(tmp_path, late, settings="incidents.settings") as running:
        yield running


def test_a_worker_is_asked_where_a_listener_hangs(hung: Shop, page: Page) -> None:
    hung.start("hangs", "runrmqconsumers", "--threads", "1")
    page.goto(f"{hung.url}/admin/login/?next=/admin/django_rmq/topic/running/")
    enter(page)
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
        confirm(page, "asked to take no more messages")
        expect(resume).to_be_visible(timeout=PATIENT)
        # Other tests have workers here that take no requests.
        rows = page.get_by_role("region", name="Workers").locator("tbody tr")
        expect(rows.filter(has=resume)).to_contain_text("quiet")

        resume.click()
        expect(quiet).to_be_visible(timeout=PATIENT)
        page.get_by_role("button", name="Stop worker").click()
        expect(page.locator("#content-main")).to_contain_text("all processes of the command end")
        confirm(page)
        assert process.wait(PATIENT / 1000) == 0, shop.log("asked")
        expect(page.get_by_role("button", name="Stop worker")).to_have_count(0, timeout=PATIENT)
    finally:
        shop.stop(process)


TOPIC = "image-renders"
REASON = "MessageTooLarge: body has 70000 bytes; topic image-renders allows MAX_BODY = 65536"


@pytest.fixture
def filled(shop: Shop) -> Shop:
    shop.fill(
        call("outbox", TOPIC, [{"sku": 101, "shop": 3}, {"sku": 102, "shop": 3}]),
        call("outbox", TOPIC, [{"sku": 103, "shop": 4}], refused=REASON),
    )
    return shop


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
    confirm(page)
    expect(row_of(page, "102")).to_have_count(0)
    expect(row_of(page, "101")).to_have_count(1)


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
    confirm(page, "40 returned")
    expect(page.locator("#content-main")).to_contain_text("No Spark query holds messages of this topic.")


def test_a_purge_is_left_to_a_worker(shop: Shop, log_in: Any) -> None:
    shop.fill(
        call("dead", "letters", [{"background": number} for number in range(40)], "post.errors.Lost: away")
    )
    page = log_in("boss")
    page.goto(f"{shop.admin}letters/change/?tab=dead&error=post.errors.Lost")
    page.get_by_role("button", name="Delete all matches").click()
    look(page, "background-question")
    page.get_by_role("button", name="Yes, in the background").click()
    expect(page.locator(".messagelist")).to_contain_text("you can leave this page")
    row = page.get_by_role("region", name="In the background").locator("tbody tr").first
    expect(row).to_contain_text("40")
    look(page, "background")
    page.get_by_label("Refresh").select_option("2")
    process = shop.start("background", "runrmqconsumers", "--threads", "1")
    try:
        expect(row).to_contain_text("40 deleted", timeout=PATIENT)
    finally:
        shop.stop(process)
    expect(row.get_by_role("button", name="Stop")).to_have_count(0)


def test_a_replay_is_stopped_while_it_runs(shop: Shop, log_in: Any) -> None:
    # Of a topic of its own: what was replayed waits there.
    shop.fill(call("dead", "cards", [{"stopped": n} for n in range(200)], "post.errors.Late: away"))
    page = log_in("boss")
    page.goto(f"{shop.admin}cards/change/?tab=dead&error=post.errors.Late")
    page.get_by_role("button", name="Replay all").click()
    page.get_by_label("per second").fill("4")
    page.get_by_role("button", name="Yes, in the background").click()
    page.get_by_label("Refresh").select_option("2")
    row = page.get_by_role("region", name="In the background").locator("tbody tr").first
    process = shop.start("stopped", "runrmqconsumers", "--threads", "1")
    try:
        expect(row).to_contain_text("replayed", timeout=PATIENT)
        row.get_by_role("button", name="Stop").click()
        expect(page.locator(".messagelist")).to_contain_text("What it has done stays done")
        expect(row).to_contain_text("Replay all stopped", timeout=PATIENT)
        # The list may be the one from just before the end, so it is read again.
        page.reload()
        done = row.get_by_role("cell").filter(has_text="replayed").inner_text()
    finally:
        shop.stop(process)
    replayed = int(done.partition(" of ")[0])
    assert 0 < replayed < 200 and "stopped by boss" in done
    page.goto(f"{shop.admin}cards/history/")
    expect(page.locator("#content")).to_contain_text(f"stopped by boss): {replayed} replayed")


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
    confirm(page, "3 deleted")
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
    confirm(page)
    page.goto(f"{shop.admin}background/")
    region = page.get_by_role("region", name="Can be undone")
    expect(region).to_contain_text("by boss")
    look(page, "undo-list")
    region.get_by_role("button", name="Undo: Delete of notes").first.click()
    expect(page.locator(".messagelist")).to_have_text(re.compile("Undo: 2 brought back."))
    look(page, "undo-done")
