"""What the README, CONTRIBUTING and the pages of docs/ say of the code is so."""

from __future__ import annotations

import ast
import re
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest
from django.dispatch import Signal
from django.test import override_settings

import django_rmq
from django_rmq import signals
from django_rmq.api import urls
from django_rmq.conf import settings_reader
from docs.site import reference
from docs.site import settings as table

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "django_rmq"
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text()
PAGES = sorted((ROOT / "docs").rglob("*.md"))
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]


def rooms_of_table(after: str) -> list[set[str]]:
    """The rooms of the first table after a text, by layer: a row without a layer's name belongs to the one above."""
    table = ARCHITECTURE.partition(after)[2].partition("|---|---|---|\n")[2].partition("\n\n")[0]
    layers: list[set[str]] = []
    for row in table.splitlines():
        layer, rooms = row.strip("|").split("|")[:2]
        if layer.strip():
            layers.append(set())
        layers[-1] |= set(re.findall(r"`(\w+)`", rooms))
    return layers


def rooms_of_contract(container: str) -> list[set[str]]:
    """The rooms of a contract's layers, from top to bottom."""
    (layers,) = [each["layers"] for each in CONTRACTS if each.get("containers") == [container]]
    return [set(re.findall(r"\w+", layer)) for layer in layers]


@pytest.mark.parametrize(
    ("after", "container"), [("## Rooms", "django_rmq"), ("**`core/`**", "django_rmq.core")]
)
def test_the_tables_of_rooms_are_the_contracts(after: str, container: str) -> None:
    said, checked = rooms_of_table(after), rooms_of_contract(container)
    assert set().union(*said) == set().union(*checked)
    at = {room: i for i, layer in enumerate(said) for room in layer}
    order = [{at[room] for room in layer} for layer in checked]
    assert all(max(above) <= min(below) for above, below in pairwise(order)), order


def test_the_architecture_names_each_file_and_script_of_a_slot() -> None:
    table = ARCHITECTURE.partition("## The scripts of a slot")[2].partition("\n## ")[0]
    named = dict(re.findall(r"^\| `(\w+)` \| ([^|]*) \|", table, re.MULTILINE))
    for path in (ROOT / "django_rmq/core/lua/slot").glob("*.lua"):
        scripts = re.findall(r"^-- script: (\w+)$", path.read_text(), re.MULTILINE)
        assert sorted(re.findall(r"`(\w+)`", named.pop(path.stem))) == sorted(scripts)
    assert not named


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md", "docs/state_machine.md"])
def test_paths_that_a_page_names_exist(page: str) -> None:
    named = re.findall(r"`((?:[\w.]+/)+[\w.]*)`", (ROOT / page).read_text())
    assert named
    homes = (ROOT, PACKAGE, PACKAGE / "core", ROOT / "tests")
    made = ("build/",)
    missing = [
        path
        for path in named
        if not path.startswith(made) and not any((home / path).exists() for home in homes)
    ]
    assert not missing


def test_every_folder_of_the_queue_says_what_it_is() -> None:
    folders = "conf connections core observability outbox schedules sending tasks typed_bodies worker"
    for folder in folders.split():
        for init in (PACKAGE / folder).rglob("__init__.py"):
            assert init.read_text().startswith('"""'), init


def test_each_setting_has_an_entry_that_says_what_the_code_takes() -> None:
    page = table.PAGE.read_text()
    assert table.filled(page) == page, "run: make reference"
    changed = page.replace("Default: `16`", "Default: `17`").replace("- Registered: yes\n", "")
    assert changed != page
    assert table.filled(changed) == page


def test_a_setting_without_an_entry_and_an_entry_without_a_setting_are_found() -> None:
    page = table.PAGE.read_text()
    with pytest.raises(ValueError, match="MAX_RETRIES"):
        table.filled(page.replace("\n### MAX_RETRIES\n", "\n"))
    with pytest.raises(ValueError, match="NEW_KEY"):
        table.filled(page + "\n### NEW_KEY\n")


EXAMPLE = re.compile(r"^### (.+)\n\n(?:- .*\n)*?- Example: `(.+)`$", re.MULTILINE)
WITH: dict[str, dict[str, object]] = {
    "UPCAST": {"BODY": "shop.events.PriceChanged"},
    "ORDER": {"TYPE": "fifo"},
    "ON_DUPLICATE": {"TYPE": "fifo"},
    "ORIGIN": {"IDENTITY": "key"},
    "TIME_RANGE": {"TYPE": "range_merge"},
    "DEBOUNCE": {"TYPE": "range_merge", "MAX_WAIT": "1m"},
    "MAX_WAIT": {"TYPE": "range_merge", "DEBOUNCE": True},
    "ACCUMULATE": {"TYPE": "range_merge", "IDENTITY": "key"},
    "OUTBOX of a topic": {"TYPE": "fixed_time"},
    "MAX_PREPARED": {"SERIAL": False},
    "DEFAULT_PRIORITY": {"TYPE": "priority"},
    "RETRY_PRIORITY": {"TYPE": "priority"},
    "SCHEDULES": {"TOPICS": {"reports": {"TYPE": "fixed_time", "IDENTITY": "key"}}},
    "COORDINATOR": {"ZOOKEEPER": {"HOSTS": "zk1:2181"}},
    "ZOOKEEPER: ACL": {"AUTH": ("digest", "shop:secret")},
}
"""What a key needs beside its example."""


def settings_with(heading: str, example: str) -> tuple[dict[str, object], dict[str, object]]:
    """Return RMQ and TASKS with the example of a key."""
    value = ast.literal_eval(f"{{{example}}}") | WITH.get(heading, {})
    section, _, key = heading.rpartition(": ")
    rmq: dict[str, object] = {"REDIS": "redis://localhost:6379/1"}
    if section == "TASKS":
        return rmq, {"default": {"BACKEND": "django_rmq.tasks.RMQBackend", "OPTIONS": value}}
    if section == "SCHEDULES":
        options = {"TOPIC": "reports", "EVERY": 60} | value
        if "CRON" in value:
            del options["EVERY"]
        topics = {"reports": {"TYPE": "fixed_time", "IDENTITY": "key"}}
        return {**rmq, "TOPICS": topics, "SCHEDULES": {"report": options}}, {}
    if section:
        hosts = {"HOSTS": "zk1:2181"} if section == "ZOOKEEPER" else {}
        return {**rmq, section: {**hosts, **value}}, {}
    if key in settings_reader.RMQ_KEYS:
        return {**rmq, **value}, {}
    return {**rmq, "TOPICS": {"orders": value}}, {}


def test_the_settings_are_read_with_each_example_and_none_is_missing() -> None:
    page = table.PAGE.read_text()
    examples = dict(EXAMPLE.findall(page))
    assert sorted(examples) == sorted(re.findall(r"^### (.+)$", page, re.MULTILINE))
    assert page.count("\n- Takes: ") == page.count("\n- Default: ") == len(examples), "an entry has two lists"
    for heading, example in examples.items():
        rmq, tasks = settings_with(heading, example)
        with override_settings(RMQ=rmq, TASKS=tasks):
            config, problems = settings_reader.read_settings()
        assert config is not None and not problems, (heading, [problem.message for problem in problems])


def test_an_example_that_the_settings_refuse_is_found() -> None:
    rmq, tasks = settings_with("SLOTS", '"SLOTS": 3')
    with override_settings(RMQ=rmq, TASKS=tasks):
        assert settings_reader.read_settings()[0] is None


def test_each_duration_and_size_of_the_settings_has_a_unit() -> None:
    for entry in re.findall(r"^### (.+\n\n(?:- .*\n)+)", table.PAGE.read_text(), re.MULTILINE):
        assert ("\n- Unit: seconds\n" in entry) == ("\n- Takes: a duration" in entry), entry
        heading = entry.partition("\n")[0].rpartition(": ")[2]
        assert heading not in table.UNITS or f"\n- Unit: {table.UNITS[heading]}\n" in entry


def test_headings_of_settings_have_anchors_of_their_own() -> None:
    slugs = [
        re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-")
        for heading in re.findall(r"^##+ (.+)$", table.PAGE.read_text(), re.MULTILINE)
    ]
    assert "max_retries" in slugs and "api-send_rate" in slugs
    assert len(slugs) == len(set(slugs)) > 90


@pytest.mark.parametrize("page", reference.PAGES, ids=lambda page: page.stem)
def test_a_page_of_the_reference_has_what_the_code_says(page: Path) -> None:
    written = page.read_text()
    assert reference.filled(written) == written, "run: make reference"
    emptied = reference.PART.sub(r"\1\3", written)
    assert len(emptied) < len(written) / 2
    assert reference.filled(emptied) == written


def test_the_python_page_has_every_public_name() -> None:
    page = (ROOT / "docs/reference/python.md").read_text()
    named = re.findall(r"^<!-- begin: django_rmq\.(\w+)[: ]", page, re.MULTILINE)
    assert sorted([*named, "__version__"]) == sorted(django_rmq.__all__)


def test_the_python_page_has_every_signal() -> None:
    page = (ROOT / "docs/reference/python.md").read_text().partition("## Signals")[2]
    sent = {name for name, value in vars(signals).items() if isinstance(value, Signal)}
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == sent


def test_the_page_of_commands_has_every_command() -> None:
    page = (ROOT / "docs/reference/commands.md").read_text()
    commands = {path.stem for path in (PACKAGE / "management/commands").glob("r*.py")}
    assert set(re.findall(r"^## `(\w+)`$", page, re.MULTILINE)) == commands
    assert set(re.findall(r"^<!-- begin: options of (\w+) -->$", page, re.MULTILINE)) == commands - {
        "runrmqpipeline"
    }


def test_the_glossary_has_one_short_meaning_for_each_word() -> None:
    page = (ROOT / "docs/reference/glossary.md").read_text()
    words = re.findall(r"^([a-z].*)\n:   ", page, re.MULTILINE)
    assert len(words) == len(set(words)) == page.count("\n:   ")
    assert {
        "in flight", "due", "delivered", "acknowledge", "commit", "time out", "expire", "replay", "owner",
        "lease", "epoch", "fenced", "slot", "claim", "relay", "tick", "receipt", "gate", "fetch", "capacity",
    } <= set(words)  # fmt: skip
    meanings = re.findall(r"^:   ((?:.+\n)+)", page, re.MULTILINE)
    assert max(len(meaning.split()) for meaning in meanings) < 30
    assert len(page.split()) < 1200


def test_the_home_page_has_every_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    table = (ROOT / "docs/index.md").read_text().partition("| extra |")[2].partition("\n\n")[0]
    rows = [row.split("|")[1] for row in table.splitlines()[2:]]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == set(extras)


def test_an_extra_that_a_page_asks_for_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pages = [ROOT / "README.md", *(page for page in PAGES if page.parent.name != "decisions")]
    asked = {name for page in pages for name in re.findall(r"\bextra\s+`(\w+)`", page.read_text())}
    assert len(asked) > 3
    assert asked <= set(extras)


def test_an_extra_in_a_command_is_in_quotes_because_zsh_expands_brackets() -> None:
    commands = {
        f"{page.relative_to(ROOT)}: {command}"
        for page in [ROOT / "README.md", *PAGES]
        for command in re.findall(r"pip install [^`\n]*?([\"']?[\w-]+\[)", page.read_text())
    }
    assert len(commands) > 5
    assert not [command for command in commands if command.partition(": ")[2][0] not in "\"'"]


def test_no_item_of_a_list_has_the_number_of_the_item_before_it() -> None:
    twice = re.compile(r"^(\d+)\. .*\n(?:   .*\n)*\1\. .*$", re.MULTILINE)
    found = {str(page.relative_to(ROOT)): twice.findall(page.read_text()) for page in PAGES}
    assert not {page: numbers for page, numbers in found.items() if numbers}


def test_the_readme_has_the_figures_of_the_performance_page() -> None:
    def rows(page: str) -> dict[str, list[str]]:
        cells = [
            [cell.strip() for cell in line.strip("|").split("|")]
            for line in (ROOT / page).read_text().splitlines()
        ]
        return {
            ",".join(row[-3:]): row for row in cells if all(map(re.compile(r"[\d,]{3,}").fullmatch, row[-3:]))
        }

    shown, measured = rows("README.md"), rows("docs/explanation/performance.md")
    assert len(shown) > 4
    for figures, row in shown.items():
        assert figures in measured, row
        assert measured[figures][1] in row[0], "the version"


def test_the_page_of_routes_has_every_route_and_no_other() -> None:
    table = (
        (ROOT / "docs/reference/rest.md")
        .read_text()
        .partition("## Routes")[2]
        .partition("\n\nPermissions")[0]
    )
    named = set(re.findall(r"`((?:[a-z]+/)+[a-z/{}]*)[?`]", table))
    routes = {re.sub(r"<str:(\w+)>", r"{\1}", route) for route, _ in urls.ROUTES.values()}
    assert named == routes | {"metrics/"}


def test_every_page_is_in_the_navigation_once() -> None:
    written = reference.NAVIGATION.read_text()
    assert reference.with_decisions(written) == written, "run: make reference"
    nav = written.partition("\nnav:\n")[2].partition("\n\n")[0]
    listed = re.findall(r"([\w/.-]+\.md)$", nav, re.MULTILINE)
    pages = [str(path.relative_to(ROOT / "docs")) for path in PAGES]
    assert sorted(listed) == pages
