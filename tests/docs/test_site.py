"""The site that `make docs` builds: addresses that other programs give to people lead to what they name."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOMAIN = "https://docs.example.com/"


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


def installed(file: str, commands: str) -> str:
    """Return a file as the sed command of its comment installs it."""
    (command,) = set(re.findall(r"sed -E '([^']+)'", commands))
    done = subprocess.run(
        ["sed", "-E", command, str(ROOT / file)], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout


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
