"""The README and the page Hello, followed by a stranger: a new folder, a Redis, a worker process.

``pip install`` is the only command that is not run: the package is in the path.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.commands import ROOT, output_of, started
from tests.support.servers import RedisServer
from tests.support.workers import eventually

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"\A# ([\w/]+\.py)\n")
ADDRESS = "redis://localhost:6379/1"

SAID = {"README.md": "The price of 1 has changed", "docs/tutorial/hello.md": "Hello Ada"}
"""Page → what the worker prints, once."""


def blocks(page: str) -> list[tuple[str, str]]:
    """Return the blocks of a page up to its first send: language and text."""
    found = []
    for language, text in BLOCK.findall((ROOT / page).read_text()):
        found.append((language, text))
        if language == "sh" and "send_message(" in text:
            return found
    raise AssertionError(f"{page} sends nothing")


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer(appendonly=True) as found:
        yield found


class Stranger:
    """Does what a page says, in an empty folder."""

    def __init__(self, folder: Path, redis_url: str) -> None:
        self.folder, self.redis_url = folder, redis_url
        self.worker: subprocess.Popen[bytes] | None = None
        path = f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        self.environment.pop("DJANGO_SETTINGS_MODULE", None)
        (folder / "bin").mkdir()
        (folder / "bin/pip").write_text("#!/bin/sh\n")
        (folder / "bin/pip").chmod(0o755)

    def follow(self, language: str, text: str) -> None:
        if language == "python":
            self.paste(text)
        elif language == "sh" and "runrmqconsumers" in text:
            self.start(text.partition("#")[0].split())
        elif language == "sh":
            output_of(["sh", "-eu"], cwd=self.folder, env=self.environment, input=text)

    def paste(self, text: str) -> None:
        """Put a block where its first line says, at the end of what is there."""
        named = FILE.match(text)
        assert named, text
        with (self.folder / named[1]).open("a") as file:
            file.write(text.replace(ADDRESS, self.redis_url))

    def start(self, command: list[str]) -> None:
        """Start the worker, and keep what it prints."""
        assert self.worker is None
        self.worker = started(command, self.folder / "printed", self.environment, cwd=self.folder)

    @property
    def printed(self) -> list[str]:
        return (self.folder / "printed").read_text().splitlines()

    def stop(self) -> int:
        """End the worker; return its exit code."""
        assert self.worker is not None
        self.worker.terminate()
        return self.worker.wait(60)


@pytest.mark.parametrize("page", SAID)
def test_what_the_page_shows_runs_in_a_new_project(tmp_path: Path, server: RedisServer, page: str) -> None:
    stranger = Stranger(tmp_path, server.url)
    try:
        for language, text in blocks(page):
            stranger.follow(language, text)
        eventually(lambda: SAID[page] in stranger.printed, repr(SAID[page]))
    finally:
        if stranger.worker is not None:
            code = stranger.stop()
    assert code == 0
    # Equal messages are one call, as the README promises; and nothing was said that worries.
    assert stranger.printed.count(SAID[page]) == 1
    assert not [line for line in stranger.printed if "WARNING" in line or "ERROR" in line]


@pytest.mark.parametrize(
    ("extra", "used"), [("testing", "django_rmq.testing import"), ("schedules", r"@schedule\([^)]*cron=")]
)
def test_a_page_for_beginners_names_the_extra_of_what_it_shows(extra: str, used: str) -> None:
    pages = [*(ROOT / "docs/tutorial").glob("*.md"), ROOT / "docs/how-to/recipes.md", ROOT / "README.md"]
    using = [page for page in pages if re.search(used, page.read_text())]
    assert using
    for page in using:
        assert re.search(rf"\[{extra}\]|`{extra}`", page.read_text()), page


def test_the_home_page_shows_the_blocks_of_the_readme() -> None:
    assert blocks("docs/index.md") == blocks("README.md")
    home, readme = (set(BLOCK.findall((ROOT / page).read_text())) for page in ("docs/index.md", "README.md"))
    assert home < readme
