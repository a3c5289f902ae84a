"""The site that `make docs` builds: addresses that other programs give to people lead to what they name."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml
from playwright.sync_api import Page, expect, sync_playwright

from tests.browser.conftest import CHROMIUMS, PATIENCE
from tests.support.commands import ROOT, output_of
from tests.support.servers import absent, serving

DOMAIN = "https://docs.example.com/"


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    output_of([sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", folder], seconds=300)
    return folder


def installed(file: str, commands: str) -> str:
    """Return a file as the sed command of its comment installs it."""
    (command,) = set(re.findall(r"sed -E '([^']+)'", commands))
    return output_of(["sed", "-E", command, file])


@pytest.mark.slow
def test_each_alert_leads_to_its_runbook_on_the_site(site: Path) -> None:
    rules = (ROOT / "monitoring/alerts.yml").read_text()
    runbooks = (ROOT / "docs/deploy/runbooks.md").read_text()
    groups = yaml.safe_load(installed("monitoring/alerts.yml", rules + runbooks))["groups"]
    addresses = [rule["annotations"]["runbook_url"] for group in groups for rule in group["rules"]]
    assert len(addresses) > 10
    for address in addresses:
        assert address.startswith(DOMAIN)
        parts = urlsplit(address)
        page = (site / parts.path.lstrip("/")).read_text()
        assert f'id="{parts.fragment}"' in page or f"id={parts.fragment}" in page, address


@pytest.mark.slow
def test_the_reference_has_signatures_and_options_on_the_site_too(site: Path) -> None:
    assert "fixed_time: datetime" in re.sub(r"<[^>]+>", "", (site / "reference/python.html").read_text())
    assert "--max-age" in (site / "reference/commands.html").read_text()


@pytest.mark.slow
def test_no_page_fetches_anything_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 80
    for page in pages:
        fetched = re.search(
            r'<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)="?https?://[^">]*', page.read_text()
        )
        assert fetched is None, f"{page}: {fetched}"


@pytest.fixture
def home(site: Path) -> Iterator[Page]:
    binary = next(filter(None, map(shutil.which, CHROMIUMS)), None)
    if binary is None:
        absent("no Chromium: install Debian's package chromium")
    with serving(SimpleHTTPRequestHandler, directory=str(site)) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=binary, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(f"{address}/index.html")
        yield page
        browser.close()


MAINTAINERS = {
    "architecture.html",
    "state_machine.html",
    "soak.html",
    "explanation/performance.html",
    "explanation/spark-performance.html",
}

SEARCHES = {
    "E040": "reference/checks.html",
    "django_rmq.E040": "reference/checks.html",
    "dead letter": "how-to/dead-messages.html",
    "MAX_RETRIES": "reference/settings.html",
    "cancel": "how-to/stop.html",
    "RmqRedisMemory": "deploy/runbooks.html",
    "debounce": "how-to/send.html",
    "schedules": "how-to/schedules.html",
    "W041": "reference/checks.html",
    "E041": "reference/checks.html",
    "once": "explanation/exactly-once.html",
    "loop_blocked": "reference/logging.html",
    "sentinel": "deploy/redis.html",
    "celery": "how-to/coming-from.html",
    "pyspark": "how-to/spark.html",
}
"""What somebody types, and the page that has to be among the first two."""


@pytest.mark.slow
def test_pages_for_maintainers_come_last_in_the_search(site: Path) -> None:
    entries = json.loads((site / "search/search_index.json").read_text())["docs"]
    boosts = {entry["location"].partition("#")[0]: entry.get("boost", 1) for entry in entries}
    low = {page for page, boost in boosts.items() if boost < 0.5}
    assert low == {page for page in boosts if page.startswith("decisions/")} | MAINTAINERS


@pytest.mark.slow
def test_the_search_finds_the_page_that_helps(home: Page) -> None:
    missed = {}
    # A page that is loaded for each search would build the index each time.
    box, found = home.locator("[data-md-component=search-query]"), home.locator(".md-search-result__item")
    for words, wanted in SEARCHES.items():
        box.fill("")
        box.press("End")  # the site searches at a key, for what is in the field then
        expect(found).to_have_count(0)
        box.fill(words)
        box.press("End")
        expect(found.first).to_be_attached(timeout=PATIENCE * 1000)
        links = [each.locator(".md-search-result__link").first for each in found.all()[:2]]
        first = [urlsplit(str(each.get_attribute("href"))).path.lstrip("/") for each in links]
        if wanted not in first:
            missed[words] = first
    assert missed == {}
