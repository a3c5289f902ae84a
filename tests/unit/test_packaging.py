"""The wheel holds the whole package: Lua, templates, static files and translations too."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "django_rmq"


def built(project: Path, folder: Path) -> zipfile.ZipFile:
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=project, check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return built(ROOT, tmp_path_factory.mktemp("wheel"))


def test_the_distribution_for_executors_is_what_the_core_and_spark_are(tmp_path: Path) -> None:
    wheel = built(ROOT / "deploy/pyspark-rmq", tmp_path)
    expected = {"django_rmq/__init__.py", "django_rmq/exceptions.py", "django_rmq/py.typed"} | {
        str(path.relative_to(ROOT))
        for folder in ("django_rmq/core", "django_rmq/spark", "pyspark_rmq")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    info = "pyspark_rmq-0.1.0.dist-info"
    assert {name for name in wheel.namelist() if not name.startswith(info)} == expected
    metadata = Parser().parsestr(wheel.read(f"{info}/METADATA").decode())
    needed = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert sorted(needed) == ["pyarrow>=18", "redis<9,>=6"]


def test_the_wheel_holds_every_file_of_the_package(wheel: zipfile.ZipFile) -> None:
    expected = {
        str(path.relative_to(ROOT))
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {"django_rmq/py.typed", "django_rmq/core/scripts/_now.lua"} <= expected
    assert expected <= set(wheel.namelist())


def test_the_wheel_holds_nothing_but_the_package(wheel: zipfile.ZipFile) -> None:
    assert {name.partition("/")[0] for name in wheel.namelist()} == {
        "django_rmq",
        "pyspark_rmq",
        "django_redis_rmq-0.1.0.dist-info",
    }


def test_the_core_asks_for_its_five_libraries_and_no_more(wheel: zipfile.ZipFile) -> None:
    metadata = Parser().parsestr(wheel.read("django_redis_rmq-0.1.0.dist-info/METADATA").decode())
    needed = {
        re.split("[<>]", line)[0] for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line
    }
    assert needed == {"django", "django-redis", "djangorestframework", "kazoo", "redis[hiredis]"}


def test_the_extras_are_those_of_users(wheel: zipfile.ZipFile) -> None:
    metadata = Parser().parsestr(wheel.read("django_redis_rmq-0.1.0.dist-info/METADATA").decode())
    extras = {
        "cli",
        "connect",
        "demo",
        "health",
        "openapi",
        "otel",
        "prometheus",
        "schedules",
        "spark",
        "tasks",
        "typed",
    }
    assert set(metadata.get_all("Provides-Extra", [])) == extras
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs/index.md").read_text(), re.MULTILINE)
    assert extras <= {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_pytest_finds_the_plugin_of_the_wheel(wheel: zipfile.ZipFile) -> None:
    entry_points = wheel.read("django_redis_rmq-0.1.0.dist-info/entry_points.txt").decode()
    assert "[pytest11]\ndjango_rmq = django_rmq.pytest_plugin" in entry_points
    assert "django_rmq/pytest_plugin.py" in wheel.namelist()
