"""A real Chromium before the running example project. Tests touch data through pages or a process of its own only."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

from tests.support import preloaded
from tests.support.commands import ROOT, output_of
from tests.support.embedded_server import free_port
from tests.support.servers import RedisServer, absent

SHOTS = ROOT / "build" / "screenshots"
CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATIENCE = 30.0
"""Seconds for a server to start, or a page to show something: on two busy cores."""

expect.set_options(timeout=PATIENCE * 1000)


Call = tuple[str, tuple[Any, ...], dict[str, Any]]


def call(name: str, *arguments: Any, **options: Any) -> Call:
    """Return a call of a function of `shop/fill.py`."""
    return name, arguments, options


class Shop:
    """The running shop: Redis, database, web server, and consumers when asked for."""

    def __init__(self, data: Path, redis: RedisServer, settings: str) -> None:
        self.data = data
        self.redis = redis
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.admin = f"{self.url}/admin/django_rmq/topic/"
        self.environment = {
            **os.environ,
            "DJANGO_SETTINGS_MODULE": f"tests.browser.shop.{settings}",
            "DJANGO_DEBUG": "1",
            "REDIS_URL": redis.url,
            "RMQ_KEY_PREFIX": "browser:",
            "SHOP_DATA": str(data),
        }
        self._started: list[preloaded.Program] = []

    def manage(self, *arguments: str, **environment: str) -> str:
        """Run a command of manage.py and return what it printed."""
        return self._run(*preloaded.python(), "manage.py", *arguments, **environment)

    def fill(self, *calls: Call) -> None:
        """Make calls of `shop/fill.py` in a process of its own."""
        self._run(*preloaded.python(), "-m", "tests.browser.shop.fill", json.dumps(calls))

    def start(self, name: str, *arguments: str, **environment: str) -> preloaded.Program:
        """Start a command of manage.py; it ends with the shop."""
        with (self.data / f"{name}.log").open("ab") as log:
            command = ["-u", "manage.py", *arguments]
            whole = self.environment | environment
            process = preloaded.Program(command, cwd=ROOT, env=whole, output=log.fileno())
        self._started.append(process)
        return process

    def log(self, name: str) -> str:
        return (self.data / f"{name}.log").read_text(errors="replace")

    def serve(self, port: int = 0, **environment: str) -> preloaded.Program:
        """Start a web server, on another port or with another environment if wanted; return when it answers."""
        port = port or self.port
        name = f"web-{port}"
        process = self.start(name, "runserver", "--noreload", f"127.0.0.1:{port}", **environment)
        deadline = time.monotonic() + PATIENCE
        while True:
            assert process.poll() is None, self.log(name)
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/admin/login/", timeout=PATIENCE).close()
            except urllib.error.HTTPError:
                raise
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
            else:
                return process

    def stop(self, process: preloaded.Program) -> None:
        """End a process as an operator does."""
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def close(self) -> None:
        for process in reversed(self._started):
            self.stop(process)

    def _run(self, *command: str, **environment: str) -> str:
        return output_of(command, self.environment | environment)


@pytest.fixture(scope="session")
def chromium() -> str:
    """The path of the system's Chromium."""
    found = [path for name in CHROMIUMS if (path := shutil.which(name))]
    return found[0] if found else absent(f"no Chromium: none of {', '.join(CHROMIUMS)} is on PATH")


# Not for the whole session: while Playwright is open, its event loop counts as running in this thread.
@pytest.fixture(scope="package")
def browser(chromium: str) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        sandbox = [] if os.geteuid() else ["--no-sandbox"]  # Chromium refuses to sandbox root's processes
        running = playwright.chromium.launch(
            executable_path=chromium, args=[*sandbox, "--disable-dev-shm-usage", "--disable-gpu"]
        )
        yield running
        running.close()


@contextmanager
def running_shop(data: Path, *calls: Call, settings: str = "settings") -> Iterator[Shop]:
    """Run a shop in which the user boss may do everything, after these calls of `shop/fill.py`."""
    with RedisServer() as server:
        running = Shop(data, server, settings)
        try:
            running.manage("migrate", "--verbosity", "0")
            running.fill(call("user", "boss", "*"), *calls)
            running.serve()
            yield running
        finally:
            running.close()


@pytest.fixture(scope="package")
def shop(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    with running_shop(tmp_path_factory.mktemp("shop")) as running:
        running.manage("seed_shop", "--products", "60")
        yield running


def picture(page: Page, name: str) -> None:
    """Let a page come to rest, and take a picture of all of it, for a person to look at. In CI nobody does."""
    # The colours of Django's links change slowly, also when the scheme does.
    page.evaluate(
        "Promise.allSettled(document.getAnimations()"
        ".filter((each) => each instanceof CSSTransition).map((each) => each.finished))"
    )
    if "CI" not in os.environ:
        SHOTS.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=SHOTS / f"{name}.png", full_page=True)


AA = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa")
"""axe's tags of the rules of WCAG 2.2 for the levels A and AA."""


def violations(
    page: Page, tags: Iterable[str] = AA, *, rules: Iterable[str] = (), within: str | None = None
) -> list[str]:
    """Return what axe finds wrong with a page, or with the part of it that ``within`` selects."""
    chosen = {"type": "rule", "values": list(rules)} if rules else {"type": "tag", "values": list(tags)}
    # To describe what is right as well takes half of the time.
    options = {"runOnly": chosen, "resultTypes": ["violations"]}
    context = None if within is None else {"include": [[within]]}
    return [
        f"{violation['id']}: {[node['html'][:200] for node in violation['nodes'][:3]]}"
        for violation in Axe().run(page, context=context, options=options).response["violations"]
    ]


class Watched:
    """What a page complained about: its console, its errors, and what its security policy refused."""

    def __init__(self, page: Page) -> None:
        self.complaints: list[str] = []
        self.allowed: list[str] = []
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        page.on("dialog", self._dialog)

    def allow(self, part: str) -> None:
        """Let the console say this: what the browser itself notes of an answer that a test has asked for."""
        self.allowed.append(part)

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(f"{message.type}: {message.text} ({message.location.get('url')})")

    def _dialog(self, dialog: Any) -> None:
        self.complaints.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def check(self) -> None:
        left = [
            complaint for complaint in self.complaints if not any(part in complaint for part in self.allowed)
        ]
        assert left == []


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page in a browser that remembers nothing; the test fails if its console or its policy complained."""
    context = browser.new_context(viewport={"width": 1360, "height": 900}, locale="en-GB")
    context.set_default_timeout(PATIENCE * 1000)
    context.add_init_script(
        "addEventListener('securitypolicyviolation', (event) => console.error('CSP: ' + event.violatedDirective"
        " + ' ' + event.blockedURI + ' ' + event.sample))"
    )
    opened = context.new_page()
    watched = Watched(opened)
    opened.watched = watched  # type: ignore[attr-defined]
    yield opened
    context.close()
    watched.check()


def enter(page: Page, name: str = "boss") -> None:
    """Fill in the login page."""
    page.get_by_label("Username").fill(name)
    page.get_by_label("Password").fill(name)
    page.get_by_role("button", name="Log in").click()


def confirm(page: Page, says: str = "") -> None:
    """Answer the question of a page, after which a message says this."""
    page.get_by_role("button", name="Yes, do it").click()
    if says:
        expect(page.locator(".messagelist")).to_contain_text(says)


@pytest.fixture
def log_in(shop: Shop, page: Page) -> Any:

    def log_in_as(name: str) -> Page:
        page.goto(f"{shop.url}/admin/login/?next=/admin/django_rmq/topic/")
        enter(page, name)
        return page

    return log_in_as
