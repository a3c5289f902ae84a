"""The wheel holds the whole package: Lua, templates, static files and translations too."""

from __future__ import annotations

import re
import shutil
import sys
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import hatch_build
from tests.support.commands import ROOT, completed, output_of

PACKAGE = ROOT / "django_rmq"


def built(project: Path, folder: Path) -> zipfile.ZipFile:
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    output_of(command, cwd=project)
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return built(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    return Parser().parsestr(wheel.read("django_redis_rmq-0.1.0.dist-info/METADATA").decode())


def test_the_distribution_for_executors_is_what_the_core_and_spark_are_without_pipelines(
    tmp_path: Path,
) -> None:
    wheel = built(ROOT / "deploy/pyspark-rmq", tmp_path)
    top = ("__init__.py", "durations.py", "exceptions.py", "py.typed")
    expected = {f"django_rmq/{name}" for name in top} | {
        str(path.relative_to(ROOT))
        for folder in ("django_rmq/core", "django_rmq/spark", "pyspark_rmq")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and not {"__pycache__", "pipelines"} & {*path.parts}
    }
    info = "pyspark_rmq-0.1.0.dist-info"
    assert {name for name in wheel.namelist() if not name.startswith(info)} == expected
    metadata = Parser().parsestr(wheel.read(f"{info}/METADATA").decode())
    assert len(metadata.get_all("Project-URL", [])) == 4
    needed = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert sorted(needed) == ["pyarrow>=18", "redis<9,>=6"]


def test_the_wheel_holds_every_file_of_the_package(wheel: zipfile.ZipFile) -> None:
    expected = {
        str(path.relative_to(ROOT))
        for package in (PACKAGE, ROOT / "pyspark_rmq")
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {"django_rmq/py.typed", "pyspark_rmq/py.typed", "django_rmq/core/lua/_basics.lua"} <= expected
    assert expected <= set(wheel.namelist())


def test_the_wheel_holds_nothing_but_the_package(wheel: zipfile.ZipFile) -> None:
    assert {name.partition("/")[0] for name in wheel.namelist()} == {
        "django_rmq",
        "pyspark_rmq",
        "django_redis_rmq-0.1.0.dist-info",
    }


def test_the_core_asks_for_its_five_libraries_and_no_more(metadata: Message) -> None:
    needed = {
        re.split("[<>]", line)[0] for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line
    }
    assert needed == {"django", "django-redis", "djangorestframework", "kazoo", "redis[hiredis]"}


def test_the_extras_are_those_of_users(metadata: Message) -> None:
    # test_snapshot.py shows them, test_papers.py finds them on the home page.
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(metadata.get_all("Provides-Extra", [])) == set(declared)


def test_pytest_finds_the_plugin_of_the_wheel(wheel: zipfile.ZipFile) -> None:
    entry_points = wheel.read("django_redis_rmq-0.1.0.dist-info/entry_points.txt").decode()
    assert "[pytest11]\ndjango_rmq = django_rmq.pytest_plugin" in entry_points
    assert "django_rmq/pytest_plugin.py" in wheel.namelist()


def test_the_index_page_has_addresses_and_no_link_that_leads_nowhere_from_there(metadata: Message) -> None:
    urls = dict(line.split(", ") for line in metadata.get_all("Project-URL", []))
    assert urls.keys() == {"Documentation", "Source", "Issues", "Changelog"}
    text = re.sub(r"^```.*?^```$", "", str(metadata.get_payload()), flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'\b(?:src|href)="([^"]+)"', text)
    assert len(targets) > 10
    own = rf"{re.escape(urls['Source'])}/(?:blob|raw|tree)/v0\.1\.0/"
    for target in targets:
        assert target.startswith(("https://", "#")), target
        if target.startswith(urls["Source"]):
            path = re.sub(own, "", target.partition("#")[0])
            assert (ROOT / path).exists(), target


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ("[a](b.md#c)", "[a](https://r/blob/v1/b.md#c)"),
        ("![a](b.png)", "![a](https://r/raw/v1/b.png)"),
        ("[![a](b.png)](c/)", "[![a](https://r/raw/v1/b.png)](https://r/tree/v1/c/)"),
        (
            '<img src="b.png"> <a href="c.md">',
            '<img src="https://r/raw/v1/b.png"> <a href="https://r/blob/v1/c.md">',
        ),
        ("[a](https://b) [c](#d) [e](mailto:f@g)", "[a](https://b) [c](#d) [e](mailto:f@g)"),
        ("```python\nx = [a](b)\n```", "```python\nx = [a](b)\n```"),
    ],
)
def test_links_of_the_long_description_lead_into_the_repository(page: str, expected: str) -> None:
    assert hatch_build.with_absolute_links(page, "https://r", "v1") == expected


@pytest.mark.parametrize(
    ("repository", "documentation", "refused"),
    [
        ("https://repository.invalid/x", "https://docs.example.org", ["repository"]),
        ("http://code.example.org/x", "", ["repository", "documentation"]),
        ("https://code.example.org/x", "https://docs.example.org/", []),
    ],
)
def test_a_release_needs_the_addresses_of_the_project(
    tmp_path: Path, repository: str, documentation: str, refused: list[str]
) -> None:
    shutil.copy(ROOT / "hatch_build.py", tmp_path)
    project = (ROOT / "pyproject.toml").read_text()
    for name, address in (("repository", repository), ("documentation", documentation)):
        project = re.sub(rf'^{name} = ".*"$', f'{name} = "{address}"', project, flags=re.MULTILINE)
    (tmp_path / "pyproject.toml").write_text(project)
    done = completed([sys.executable, "hatch_build.py"], cwd=tmp_path)
    assert done.returncode == bool(refused), done.stderr
    assert re.findall(r"(\w+) = '", done.stderr) == refused


def test_make_dist_begins_with_the_check_of_the_addresses() -> None:
    recipe = (ROOT / "Makefile").read_text().partition("\ndist: ")[2]
    assert recipe.splitlines()[1] == "\t$(BIN)/python hatch_build.py"
