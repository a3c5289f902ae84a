"""What a person does with the admin, in a real browser before the running shop."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser.conftest import PATIENCE, Shop, call, confirm, enter, picture, violations

pytestmark = pytest.mark.slow

LogIn = Callable[[str], Page]


@pytest.fixture
def consumers(shop: Shop) -> Iterator[None]:
    """Workers for the shop's topics, as long as the test lasts."""
    process = shop.start("consumers", "runrmqconsumers", "--threads", "2")
    yield
    shop.stop(process)


def tab(page: Page, name: str) -> Any:
    return page.get_by_role("navigation", name="Views of this topic").get_by_role("link", name=name)


def content(page: Page) -> Any:
    return page.locator("#content-main")


def rows(page: Page) -> Any:
    return content(page).locator("tbody tr")


def cell(page: Page, row: Any, column: str) -> Any:
    """Return the cell of a row below the head with this text."""
    heads = content(page).locator("thead th").all_inner_texts()
    return row.locator("th, td").nth(heads.index(column))


def open_dead(shop: Shop, page: Page, topic: str, query: str = "") -> None:
    page.goto(f"{shop.admin}{topic}/change/?tab=dead{query}")


# --- looking


def test_depths_move_by_themselves(shop: Shop, log_in: LogIn) -> None:
    page = log_in("boss")
    page.get_by_label("Refresh").select_option("2")
    row = rows(page).filter(has_text="letters")
    expect(row).to_contain_text("fixed_time")
    shop.fill(call("waiting", "letters", [{"number": number} for number in range(7)]))
    expect(cell(page, row, "Due")).to_contain_text("7 later")
    page.goto(f"{shop.admin}letters/change/")
    expect(tab(page, "Store")).to_contain_text("7")
    shop.fill(call("waiting", "letters", [{"number": number} for number in range(5)]))
    expect(tab(page, "Store")).to_contain_text("12")
    # The list stays as it is until somebody asks for it.
    expect(rows(page)).to_have_count(7)


def test_nothing_is_fetched_while_nobody_looks(shop: Shop, log_in: LogIn) -> None:
    page = log_in("boss")
    page.get_by_label("Refresh").select_option("2")
    with page.expect_response("**/topic/live/**"):
        pass
    page.evaluate(
        "Object.defineProperty(document, 'hidden', {value: true, configurable: true});"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.wait_for_timeout(5_000)
    assert asked == []
    with page.expect_response("**/topic/live/**"):
        page.evaluate("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")


def test_the_choice_of_refresh_is_remembered(shop: Shop, log_in: LogIn) -> None:
    page = log_in("boss")
    page.get_by_label("Refresh").select_option("0")
    page.reload()
    expect(page.get_by_label("Refresh")).to_have_value("0")


def test_worker_processes_are_shown_with_what_they_report(shop: Shop, log_in: LogIn, consumers: None) -> None:
    page = log_in("boss")
    page.get_by_role("link", name="Workers").click()
    expect(page.get_by_role("heading", name="Workers")).to_be_visible()
    page.get_by_label("Refresh").select_option("2")
    row = content(page).get_by_role("region", name="Workers").locator("tbody tr")
    expect(row).to_have_count(1)
    expect(cell(page, row, "Threads taken")).to_have_text("0 / 2")
    expect(cell(page, row, "Memory")).to_contain_text("MiB")
    expect(cell(page, row, "Topics")).to_contain_text("order-timeouts")
    picture(page, "workers-light")
    page.emulate_media(color_scheme="dark")
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    picture(page, "workers-narrow-dark")


# --- acting


def test_one_is_found_by_a_filter_and_replayed(shop: Shop, log_in: LogIn) -> None:
    shop.fill(
        call("dead", "letters", [{"to": "Ada"}, {"to": "Grace"}], "post.errors.NoStamp: a stamp is missing"),
        call("dead", "letters", [{"to": "Alan"}], "post.errors.NoAddress: where to?"),
    )
    page = log_in("boss")
    open_dead(shop, page, "letters")
    page.get_by_label("Error class").fill("NoStamp")
    page.get_by_role("button", name="Filter").click()
    expect(rows(page)).to_have_count(2)
    page.get_by_label("Text", exact=True).fill("Grace")
    page.get_by_role("button", name="Filter").click()
    expect(rows(page)).to_have_count(1)
    rows(page).get_by_role("link").first.click()
    expect(page.get_by_text('"Grace"')).to_be_visible()
    expect(page.get_by_text("a stamp is missing")).to_be_visible()
    page.get_by_role("button", name="Replay").click()
    expect(page.locator(".messagelist")).to_have_text(re.compile("Replay: 1 replayed."))
    # Back in the same list.
    expect(page.get_by_label("Text", exact=True)).to_have_value("Grace")
    expect(page.get_by_label("Error class")).to_have_value("NoStamp")
    expect(content(page).get_by_text("No messages match.")).to_be_visible()


def test_all_that_match_are_replayed_after_a_question(shop: Shop, log_in: LogIn) -> None:
    shop.fill(
        call("dead", "letters", [{"batch": number} for number in range(45)], "post.Strike: no post today"),
        call("dead", "letters", [{"other": 1}], "post.Lost: lost"),
    )
    page = log_in("boss")
    open_dead(shop, page, "letters", "&error=Strike")
    expect(rows(page)).to_have_count(20)
    page.get_by_role("link", name="Next page").click()
    expect(page.get_by_role("link", name="First page")).to_be_visible()
    page.get_by_role("button", name="Replay all").click()
    expect(page.get_by_text("Replay 45 dead messages of letters?")).to_be_visible()
    confirm(page, "Replay all: 45 replayed.")
    open_dead(shop, page, "letters", "&error=Lost")
    expect(rows(page)).to_have_count(1)


def test_selected_messages_are_deleted_after_a_question(shop: Shop, log_in: LogIn) -> None:
    # Other tests leave dead messages in this topic, and the box selects all that are listed.
    shop.fill(call("dead", "notes", [f"note {number}" for number in range(5)], "shop.Selected: no"))
    page = log_in("boss")
    open_dead(shop, page, "notes", "&error=Selected")
    page.get_by_label("Select all on this page").check()
    page.get_by_label("Select message 1", exact=True).uncheck()
    expect(page.locator("[data-rmq-selected]")).to_have_text("4")
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(page.get_by_text("Delete 4 messages of notes?")).to_be_visible()
    page.get_by_role("link", name="No, take me back").click()
    expect(rows(page)).to_have_count(5)
    page.get_by_label("Select all on this page").check()
    page.get_by_role("button", name="Delete", exact=True).click()
    confirm(page, "Delete: 5 deleted.")


def test_purge_wants_the_name_of_the_topic(shop: Shop, log_in: LogIn) -> None:
    shop.fill(call("waiting", "notes", [f"to be purged {number}" for number in range(30)]))
    page = log_in("boss")
    page.goto(f"{shop.admin}notes/change/?tab=store")
    page.get_by_role("button", name="Purge").click()
    expect(page.get_by_text(re.compile(r"Purge 30 messages of notes\?"))).to_be_visible()
    confirm(page)
    expect(page.get_by_text("This field is required.")).to_be_visible()
    page.get_by_label("Name of the topic").fill("note")
    confirm(page)
    expect(page.get_by_text("This is not the name of the topic.")).to_be_visible()
    page.get_by_label("Name of the topic").fill("notes")
    confirm(page, "Purge: 30 purged.")
    expect(page.get_by_text("No waiting messages.")).to_be_visible()
    page.get_by_role("link", name="Audit log").click()
    expect(page.locator("#change-history")).to_contain_text("30 purged")
    expect(page.locator("#change-history")).not_to_contain_text("to be purged")


def test_a_double_click_sends_one(shop: Shop, log_in: LogIn) -> None:
    page = log_in("boss")
    page.goto(f"{shop.admin}letters/send/")
    page.get_by_label("Body").fill('{"sent": "by hand"}')
    page.get_by_label("Due").fill("2040-01-02T03:04:05")
    page.get_by_role("button", name="Send").dblclick()
    expect(page.locator(".messagelist")).to_have_text(re.compile("Send: 1 stored."))
    page.goto(f"{shop.admin}letters/change/?tab=store&text=by+hand")
    expect(rows(page)).to_have_count(1)


# --- what comes from Redis is not trusted


XSS = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(2)>",
    '"><svg onload=alert(3)>',
    "'-alert(4)-'",
    "{{ 7|add:7 }}{% debug %}",
    "</title></pre></textarea><script>alert(5)</script>",
    "javascript:alert(6)",
    "<a href='javascript:alert(7)'>x</a>",
    "&lt;script&gt;alert(8)&lt;/script&gt;",
    "<iframe srcdoc='<script>alert(9)</script>'></iframe>",
    "\u202e<b>\u2066reversed",
    "\x1b[31m\x00\x08<style>*{display:none}</style>",
    "]]><!--<script>alert(10)//-->",
    "<meta http-equiv=refresh content='0;url=//evil.example'>",
    "\ufeff<base href=//evil.example>",
    "%3Cscript%3Ealert(11)%3C/script%3E",
]


STRANGE = """
(page) => [...page.querySelectorAll('#content script, #content img, #content iframe, #content style, #content base,'
  + '#content meta, #content b, [onerror], [onload], [srcdoc], a[href^="javascript:"]')].map((e) => e.outerHTML)
"""
STRANGE_IN_ANSWERS = f"""
async (addresses) => {{
  const found = [];
  for (const address of addresses) {{
    const answer = await fetch(address), page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const is_form = address.includes("/edit/"), form = page.querySelector("a[href*='/edit/']");
    const part = page.querySelector(is_form ? "#content textarea" : "#content-main");
    found.push([address, answer.ok && part ? ({STRANGE})(page) : ["no page"]]);
    if (form && !is_form) addresses.push(form.getAttribute("href"));
  }}
  return found;
}}
"""


def test_nothing_from_redis_becomes_markup_on_any_page(shop: Shop, log_in: LogIn) -> None:
    error = "\n".join(XSS)[:900]
    shop.fill(
        call("waiting", "letters", [{text: text} for text in XSS]),
        call("dead", "letters", [{"xss": text} for text in XSS], error),
        call("resting", "notes", [f"xss resting {text}" for text in XSS], f"<b>Class</b>: {error}"),
        call("in_flight", "letters", [{"flying": text} for text in XSS]),
        call("dead", "notes", [f"xss {text}" for text in XSS], error),
        call(
            "foreign",
            "notes",
            [*(text.encode("utf-8").decode("latin-1") for text in XSS), "\xff\xfe\x00", ""],
        ),
        call("worker", '"><img src=x onerror=alert(98)>', "letters"),
        call("user", "<script>alert(99)</script>", "*"),
    )
    page = log_in("<script>alert(99)</script>")
    messages: list[str] = []
    for topic, state in product(("letters", "notes"), ("dead", "store", "prepare", "retry")):
        page.goto(f"{shop.admin}{topic}/change/?tab={state}&text=%3Cscript%3Ealert(0)%3C/script%3E")
        check_clean(page)
        page.goto(f"{shop.admin}{topic}/change/?tab={state}")
        check_clean(page)
        links = rows(page).locator("th a").evaluate_all("all => all.map((each) => each.getAttribute('href'))")
        assert len(links) >= len(XSS) or (topic, state) in {("letters", "retry"), ("notes", "prepare")}
        messages += links
    page.goto(f"{shop.admin}letters/change/?tab=slots")
    expect(content(page).get_by_text("<img src=x onerror=alert(98)>")).to_be_visible()
    check_clean(page)
    # No script fills a part of the page of a message: what the server says is all that there is.
    found = page.evaluate(STRANGE_IN_ANSWERS, messages)
    assert len(found) > len(messages) > 6 * len(XSS)
    assert [one for one in found if one[1]] == []
    for address in messages[:: len(XSS)]:
        page.goto(shop.url + address)
        check_clean(page)
    page.goto(f"{shop.admin}letters/change/?tab=dead&error=%22%3E%3Cscript%3Ealert(0)%3C/script%3E")
    check_clean(page)
    page.goto(f"{shop.admin}letters/change/?tab=dead")
    page.get_by_label("Select all on this page").check()
    page.get_by_role("button", name="Delete", exact=True).click()
    check_clean(page)
    page.goto(f"{shop.admin}letters/history/")
    check_clean(page)


def check_clean(page: Page) -> None:
    """Only markup of ours is within the content, and nothing came from elsewhere. (Alerts fail the test by themselves.)"""
    assert page.evaluate(f"({STRANGE})(document)") == []
    assert page.url.startswith("http://127.0.0.1:")


# --- keyboard, contrast, languages


def test_everything_is_reached_by_the_keyboard(shop: Shop, log_in: LogIn) -> None:
    shop.fill(call("dead", "notes", ["by keyboard one", "by keyboard two"], "Refused: no"))
    page = log_in("boss")
    open_dead(shop, page, "notes", "&text=by+keyboard")
    expect(rows(page)).to_have_count(2)
    reached: list[str] = []
    for _ in range(80):
        page.keyboard.press("Tab")
        found = page.evaluate(
            "(() => { const e = document.activeElement; const s = getComputedStyle(e);"
            " return [e.getAttribute('aria-label') || e.innerText || e.name || '', s.outlineStyle, s.textDecorationLine,"
            " !!e.closest('#content-main')] })()"
        )
        if found[3]:
            reached.append(found[0].strip())
            assert found[1] != "none" or "underline" in found[2], found
        if "Select message 1" in reached[-1:]:
            page.keyboard.press("Space")
        if reached[-1:] == ["Replay"]:
            page.keyboard.press("Enter")
            break
    assert "Select message 1" in reached, reached
    expect(page.locator(".messagelist")).to_have_text(re.compile("Replay: 1 replayed."))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_have_no_violation_of_wcag_a_and_aa(
    shop: Shop, browser: Browser, scheme: Any, log_in: LogIn, page: Page
) -> None:
    shop.fill(
        call("dead", "letters", [{"axe": [1, "two", None, True]}], f"post.errors.{'Long' * 12}: dropped"),
        call("dead", "letters", [{"axe": number} for number in (101, 102)], "post.errors.Lost: dropped"),
        call("waiting", "letters", [{"axe": number} for number in range(30)]),
        call("history", "letters", 3),
    )
    page.emulate_media(color_scheme=scheme)
    # axe brings its own styles into the page: the policy is judged by the other tests.
    page.watched.allow("")  # type: ignore[attr-defined]
    log_in("boss")
    addresses = [
        shop.admin,
        f"{shop.admin}servers/",
        *(f"{shop.admin}letters/change/?tab={name}" for name in ("store", "dead", "slots", "history")),
        f"{shop.admin}letters/send/",
        f"{shop.admin}workers/",
        f"{shop.admin}running/",
        f"{shop.admin}search/?q=axe",
        f"{shop.admin}causes/",
    ]
    open_dead(shop, page, "letters", "&text=axe")
    addresses.append(shop.url + str(rows(page).locator("th a").first.get_attribute("href")))
    found = []
    for address in addresses:
        page.goto(address)
        found += [(address, violation) for violation in violations_of_content(page)]
    page.set_viewport_size({"width": 390, "height": 844})
    # What a narrow page arranges differently has the same colours.
    for address in addresses if scheme == "light" else ():
        page.goto(address)
        found += [(f"narrow {address}", violation) for violation in violations_of_content(page)]
    page.goto(f"{shop.admin}letters/change/?tab=dead")
    page.get_by_role("button", name="Purge").click()
    found += [("purge", violation) for violation in violations_of_content(page)]
    assert found == []


def violations_of_content(page: Page) -> list[str]:
    dark = page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    # The other rules ask for nothing that a scheme changes.
    rules = ("color-contrast", "link-in-text-block") if dark else ()
    return violations(page, rules=rules, within="#content")


# --- trouble


def test_redis_away_is_a_banner_within_three_seconds(shop: Shop, log_in: LogIn) -> None:
    page = log_in("boss")
    page.get_by_label("Refresh").select_option("2")
    with page.expect_response("**/topic/live/**"):
        pass
    page.watched.allow("503")  # type: ignore[attr-defined]
    os.kill(shop.redis.pid, signal.SIGSTOP)
    try:
        expect(page.locator("[data-rmq-live]")).to_have_attribute("data-state", "away")
        # The figures fade, and the page says of when they are, and which server does not answer.
        expect(page.locator("[data-rmq-part=dashboard]")).to_have_css("opacity", "0.5")
        expect(page).to_have_title(re.compile("^⚠ "))
        warning = page.locator("[data-rmq-warning]")
        expect(warning).to_contain_text(re.compile(r"These figures are those of \d+:\d\d:\d\d"))
        expect(warning).to_contain_text(f":{shop.redis.port}")
        picture(page, "stale-light")
        began = time.monotonic()
        page.reload()
        assert time.monotonic() - began < 5 * 3
        expect(page.get_by_role("alert")).to_contain_text("Redis is unavailable.")
    finally:
        os.kill(shop.redis.pid, signal.SIGCONT)
    page.get_by_role("link", name="Try again").click()
    expect(rows(page).first).to_be_visible(timeout=PATIENCE * 1000)


def test_figures_that_are_current_again_no_longer_fade(shop: Shop, log_in: LogIn) -> None:
    page = log_in("boss")
    page.get_by_label("Refresh").select_option("2")
    page.watched.allow("ERR_FAILED")  # type: ignore[attr-defined]
    page.route("**/topic/live/**", lambda route: route.abort())
    expect(page.locator("[data-rmq-warning]")).to_contain_text("The web server does not respond.")
    page.unroute("**/topic/live/**")
    expect(page.locator("[data-rmq-warning]")).to_be_hidden()
    expect(page.locator("[data-rmq-part=dashboard]")).to_have_css("opacity", "1")
    expect(page).to_have_title(re.compile(r"^(\(\d+\) )?Topics"))


def test_an_ended_session_says_log_in_again(shop: Shop, log_in: LogIn) -> None:
    page = log_in("boss")
    page.goto(f"{shop.admin}letters/change/?tab=history")
    page.get_by_label("Refresh").select_option("2")
    page.context.clear_cookies()
    warning = page.locator("[data-rmq-warning]")
    expect(warning).to_contain_text("Your session has ended")
    expect(page.locator("[data-rmq-part=figures]")).to_have_css("opacity", "0.5")
    warning.get_by_role("link", name="Log in again").click()
    enter(page)
    expect(page).to_have_url(re.compile("letters/change/.*tab=history"))
