"""The pages in admin themes of others and without any style of Django's: what matters can be seen, and fits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser.conftest import PATIENCE, Shop, call, confirm, picture
from tests.browser.shop import THEMES
from tests.support.embedded_server import free_port

pytestmark = pytest.mark.slow

UNSTYLED = "unstyled"
"""Django's own admin, of which no style sheet arrives."""

TOPIC = "image-renders"
LEGIBLE = 4.5
"""The least contrast of text for the level AA of WCAG. That of the messages of unfold is 4.496."""

# The colour of each text, over what is painted behind it, as a contrast; and of each border beside its background.
MEASURE = """
() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (color) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, bottom) => [...[0, 1, 2].map((i) => top[i] * top[3] + bottom[i] * (1 - top[3])), 1];
  const paper = getComputedStyle(document.documentElement).colorScheme.startsWith("dark") ? [18, 18, 18, 1] : [255, 255, 255, 1];
  const behind = (element) => {
    const layers = [];
    for (let at = element; at; at = at.parentElement) layers.push(rgba(getComputedStyle(at).backgroundColor));
    return layers.reverse().reduce((bottom, top) => over(top, bottom), paper);
  };
  const light = (color) => {
    const [r, g, b] = color.slice(0, 3).map((c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (one, other) => {
    const [low, high] = [light(one), light(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  // The message of a deletion has a button that undoes it, outside of the page's own area.
  const ours = (selector) => document.querySelectorAll(`:is(.rmq, .rmq-undo) :is(${selector})`);
  const seen = (selector) => [...ours(selector)].filter((e) => e.checkVisibility());
  const texts = seen(".rmq-button, .rmq-badge[class*=rmq-is-], .rmq-dead, .rmq-is-alarm .rmq-tile-value").map((element) => {
    const back = behind(element);
    return {
      text: element.innerText, class: element.className,
      contrast: contrast(over(rgba(getComputedStyle(element).color), back), back),
      cut: element.matches(".rmq-button") && element.scrollWidth > element.clientWidth + 1,
    };
  });
  // The browser draws a checkbox by itself.
  const fields = ".rmq-field :is(input:not([type=checkbox]), select, textarea)";
  const bordered = `.rmq-tile, .rmq-scroll, .rmq-badge, .rmq-button, .rmq-confirm, ${fields}`;
  const borders = seen(bordered).map((element) => {
    const style = getComputedStyle(element), back = behind(element.parentElement);
    const line = contrast(over(rgba(style.borderTopColor), back), back), area = contrast(behind(element), back);
    return { class: element.className || element.name, width: parseFloat(style.borderTopWidth), contrast: Math.max(line, area) };
  });
  return { texts, borders, wider: document.documentElement.scrollWidth - document.documentElement.clientWidth };
}
"""


# The colour of each finding that is an alarm, and of its link, which a theme may colour as it does others.
ALARMS = """
() => [...document.querySelectorAll(".rmq-findings .rmq-is-alarm")]
  .map((line) => [line, ...line.querySelectorAll("a")].map((element) => getComputedStyle(element).color))
"""


class Themed(NamedTuple):
    """The shop's admin in a theme."""

    theme: str
    url: str


@pytest.fixture(scope="module")
def filled(shop: Shop) -> Shop:
    shop.fill(
        call(
            "dead", TOPIC, [{"sku": sku, "shop": 3} for sku in (8001, 8002)], "photos.errors.Lost: no photo"
        ),
        call("outbox", TOPIC, [{"sku": 8003, "shop": 3}], refused="MessageTooLarge: 70000 bytes"),
        call("schedules"),
    )
    return shop


@pytest.fixture(scope="module", params=[*THEMES, UNSTYLED])
def themed(request: pytest.FixtureRequest, filled: Shop) -> Iterator[Themed]:
    port = free_port()
    environment = {
        "DJANGO_SETTINGS_MODULE": "tests.browser.shop.themed",
        "SHOP_THEME": "django" if request.param == UNSTYLED else request.param,
    }
    filled.manage("migrate", "--verbosity", "0", **environment)
    process = filled.serve(port, **environment)
    yield Themed(request.param, f"http://127.0.0.1:{port}/admin/")
    filled.stop(process)


class Opened(NamedTuple):
    """A page of somebody who has logged in, in a theme."""

    theme: str
    page: Page
    topics: str

    def choose(self, scheme: Any) -> None:
        """Show the pages that are opened from now on light and wide, or dark and narrow; not every theme has both."""
        self.page.emulate_media(color_scheme=scheme)
        self.page.evaluate(
            "(scheme) => { localStorage.setItem('jazzmin-theme-mode', scheme);"
            " localStorage.setItem('adminTheme', JSON.stringify(scheme)) }",
            scheme,
        )
        self.page.set_viewport_size({"width": 1280 if scheme == "light" else 390, "height": 900})


@pytest.fixture(scope="module")
def opened(browser: Browser, themed: Themed) -> Iterator[Opened]:
    """One page for all tests of a theme, whose scripts and styles may complain."""
    context = browser.new_context(locale="en-GB")
    context.set_default_timeout(PATIENCE * 1000)
    page = context.new_page()
    if themed.theme == UNSTYLED:
        page.route("**/static/admin/css/*", lambda route: route.fulfill(body="", content_type="text/css"))
    topics = f"{themed.url}django_rmq/topic/"
    page.goto(f"{themed.url}login/?next={topics}")
    page.locator("[name=username]").fill("boss")
    page.locator("[name=password]").fill("boss")
    page.locator("[type=submit]").first.click()
    expect(page.locator(".rmq-tile").first).to_be_visible()
    yield Opened(themed.theme, page, topics)
    context.close()


def check(page: Page) -> dict[str, Any]:
    """Check what is seen of a page; return what was measured."""
    page.wait_for_load_state()
    found: dict[str, Any] = page.evaluate(MEASURE)
    assert [one for one in found["texts"] if round(one["contrast"], 2) < LEGIBLE or one["cut"]] == []
    assert [one for one in found["borders"] if one["width"] < 1 or one["contrast"] < 1.1] == []
    assert found["wider"] <= 0
    return found


def danger(page: Page) -> list[str]:
    """Return the names of the dangerous buttons of a page, after it was checked that they can be seen."""
    return [one["text"] for one in check(page)["texts"] if "rmq-is-danger" in one["class"]]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_dangerous_buttons_can_be_read_and_fields_have_borders(opened: Opened, scheme: Any) -> None:
    opened.choose(scheme)
    theme, page, topics = opened
    pages = ("", "schedules/", "workers/", "servers/", "background/", f"{TOPIC}/send/")
    for address in (*pages, f"{TOPIC}/change/?tab=slots"):
        page.goto(topics + address)
        check(page)
        alarms = page.evaluate(ALARMS)
        assert alarms or address
        assert all(len(set(colours)) == 1 for colours in alarms)
    page.goto(f"{topics}outbox/")
    assert danger(page) == ["Delete"]
    page.goto(f"{topics}{TOPIC}/change/?tab=dead")
    picture(page, f"theme-{theme}-{scheme}")
    assert danger(page) == ["Delete", "Purge"]
    page.get_by_role("button", name="Replay all").click()
    expect(page.locator(".rmq-confirm")).to_be_visible()
    assert [one["text"] for one in check(page)["texts"]] == [
        "Yes, do it",
        "Yes, in the background",
        "No, take me back",
    ]
    page.goto(f"{topics}{TOPIC}/change/?tab=dead")
    page.get_by_role("button", name="Purge").click()
    expect(page.locator(".rmq-confirm")).to_be_visible()
    assert danger(page) == ["Yes, do it"]
    page.goto(f"{topics}{TOPIC}/change/?tab=dead")
    page.locator("#content-main tbody th a").first.click()
    expect(page.get_by_role("heading", name="Why it died")).to_be_visible()
    assert danger(page) == ["Delete"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_deletion_is_undone_from_its_message_or_from_the_list(
    opened: Opened, filled: Shop, scheme: Any
) -> None:
    opened.choose(scheme)
    theme, page, topics = opened
    filled.fill(call("dead", "notes", ["themed 1", "themed 2"], "shop.undo.Themed: no"))
    page.goto(f"{topics}notes/change/?tab=dead&error=shop.undo.Themed")
    page.get_by_role("button", name="Delete all matches").click()
    confirm(page)
    expect(page.get_by_role("button", name="Undo", exact=True)).to_be_visible()
    assert "Undo" in [one["text"].strip() for one in check(page)["texts"]]
    picture(page, f"theme-undo-{theme}-{scheme}")
    if scheme == "light":
        page.get_by_role("button", name="Undo", exact=True).click()
    else:
        page.goto(f"{topics}background/")
        expect(page.get_by_role("region", name="Can be undone")).to_contain_text("by boss")
        check(page)
        picture(page, f"theme-undone-{theme}-{scheme}")
        page.get_by_role("button", name="Undo: Delete of notes", exact=True).first.click()
    expect(page.get_by_text("Undo: 2 brought back.").first).to_be_visible()


BREADCRUMBS = """
() => [...document.querySelectorAll(".breadcrumbs, .breadcrumbs a")].slice(0, 2).map((element) => {
  const style = getComputedStyle(element);
  return [style.color, style.backgroundColor];
})
"""


def test_breadcrumbs_look_like_those_of_the_theme_and_what_matters_is_in_sight(
    opened: Opened, themed: Themed
) -> None:
    opened.choose("light")
    theme, page, topics = opened
    page.goto(topics)
    page.wait_for_load_state()
    ours = page.evaluate(BREADCRUMBS)
    page.goto(f"{themed.url}auth/group/")
    page.wait_for_load_state()
    own = page.evaluate(BREADCRUMBS)
    # The others have a markup of their own, and ours has their plain colours.
    assert len(own) == (0 if theme in ("unfold", "jazzmin", "grappelli") else 2)
    assert ours == own or not own
    page.goto(topics)
    for name in page.locator("#content-main thead th").all_inner_texts():
        assert is_in_sight(page, name), name
    page.set_viewport_size({"width": 390, "height": 900})
    for name in ("Dead", "Oldest due", "Due"):
        assert is_in_sight(page, name), name
    page.goto(f"{topics}schedules/")
    for name in ("Run daily-report now", "Pause daily-report", "Edit daily-report"):
        box = page.get_by_label(name).bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 390


def is_in_sight(page: Page, column: str) -> bool:
    """Return whether a column of the list of topics is seen without scrolling aside."""
    return bool(
        page.evaluate(
            "(name) => { const head = [...document.querySelectorAll('.rmq-scroll th')].find((e) => e.innerText === name);"
            " const cell = head.getBoundingClientRect(), seen = head.closest('.rmq-scroll').getBoundingClientRect();"
            " return cell.right <= seen.right + 1 && cell.left >= seen.left - 1 }",
            column,
        )
    )
