"""Clients that are generated from openapi.yaml, in Python and TypeScript, against a real server.

`make clients` makes the environments with the generators and runs these tests; `make check` calls it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import ROOT, output_of
from tests.support.servers import absent
from tests.support.shop_server import TOPIC, Shop, installed, running

HERE = Path(__file__).parent
MADE = ROOT / "build/clients"
DESCRIPTION = ROOT / "django_rmq/api/openapi.yaml"

SEEN = {
    "sent": {"stored": 3},
    "taken": [{"shop": 1, "n": 0}, {"shop": 1, "n": 1}],
    "committed": [{"ok": 1}, {"stale": 1}],
    "rolled_back": {"ok": 1},
    "dead": [[{"shop": 1, "n": 1}, "Timeout: no answer"]],
    "refused": ["invalid_message", "topic_not_found"],
}
"""What a client prints that has sent three messages, committed the first and rejected the second."""


COUNTED = {"sent": 3, "done": 1, "failed": 1}
"""By how much the counters of the topic have risen then."""


@pytest.fixture(scope="module")
def shop(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    with running(redis_url, tmp_path_factory.mktemp("shop")) as found:
        yield found


@pytest.fixture
def before(shop: Shop) -> dict[str, int]:
    """Empty the topic, and return its counters."""
    for state in ("waiting", "dead"):
        shop.ask("POST", f"v1/topics/{TOPIC}/purge/", {"state": state})
    counters = {one["topic"]: one for one in shop.ask("GET", "v1/stats/")["results"]}
    return {name: counters[TOPIC][name] for name in COUNTED}


def environment(name: str) -> Path:
    """Return the folder that `make clients` has made for a language."""
    if not (MADE / name / ".installed").exists():
        absent(f"there is no build/clients/{name}: say `make clients`")
    return MADE / name


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    return output_of(command, cwd=cwd, env={**os.environ, **variables})


def check(shop: Shop, before: dict[str, int], output: str) -> None:
    """Compare what the client printed, and what the server has then."""
    seen = json.loads(output)
    stats = seen.pop("stats")
    assert seen == SEEN
    assert {name: stats[name] - before[name] for name in COUNTED} == COUNTED
    found = shop.ask("GET", f"v1/topics/{TOPIC}/")
    assert (found["waiting"], found["running"], found["resting"], found["dead"]) == (1, 0, 0, 1)


def test_a_python_client_is_generated_and_works(shop: Shop, before: dict[str, int], tmp_path: Path) -> None:
    python = environment("python") / "bin/python"
    config = tmp_path / "config.yaml"
    config.write_text("post_hooks: []\n")
    client = tmp_path / "generated"
    generate = "openapi_python_client generate --fail-on-warning --meta none --path openapi.yaml"
    shutil.copy(DESCRIPTION, tmp_path)
    output = ("--output-path", client / "rmq_client", "--config", config)
    told = run(python, "-m", *generate.split(), *output, cwd=tmp_path)
    assert "warning" not in told.lower()
    variables = {"RMQ_URL": shop.url, "RMQ_TOKEN": shop.token, "PYTHONPATH": str(client)}
    look = "from importlib.util import find_spec as find; print(find('django'), find('django_rmq'))"
    assert run(python, "-c", look, cwd=tmp_path, **variables) == "None None\n"
    check(shop, before, run(python, HERE / "python/smoke.py", TOPIC, cwd=tmp_path, **variables))


def test_a_typescript_client_is_generated_and_works(shop: Shop, before: dict[str, int]) -> None:
    node = installed("node", "Node")
    folder = environment("typescript")
    for path in (HERE / "typescript/smoke.ts", HERE / "typescript/tsconfig.json", DESCRIPTION):
        shutil.copy(path, folder)
    for made in ("schema.d.ts", "smoke.js"):
        (folder / made).unlink(missing_ok=True)
    # As in docs/how-to/rest.md: fields of requests that have a default may be left out.
    generate = "openapi-typescript/bin/cli.js openapi.yaml --default-non-nullable false --output schema.d.ts"
    for command in (generate, "typescript/bin/tsc"):
        program, *options = command.split()
        run(node, folder / "node_modules" / program, *options, cwd=folder)
    variables = {"RMQ_URL": shop.url, "RMQ_TOKEN": shop.token}
    check(shop, before, run(node, "smoke.js", TOPIC, cwd=folder, **variables))


def test_the_versions_of_the_npm_packages_are_pinned_without_addresses() -> None:
    package: dict[str, Any] = json.loads((HERE / "typescript/package.json").read_text())
    assert all(version[0].isdigit() for version in package["devDependencies"].values())
    locked = json.loads((HERE / "typescript/pinned.json").read_text())["packages"]
    named = {name: one for name, one in locked.items() if name}
    assert {name.removeprefix("node_modules/"): one["version"] for name, one in named.items()}.items() >= (
        package["devDependencies"].items()
    )
    assert all("resolved" not in one and one["integrity"].startswith("sha512-") for one in named.values())
