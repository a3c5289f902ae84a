"""What runs without Django, and with which PySpark; `make matrix` gives environments by LIGHT_PYTHON and PIPED_PYTHON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.spark.environments import ROOT, environment

WAYS = {"batch_write": "4.0", "batch_read": "4.0", "stream_write": "4.1", "stream_read": "4.2"}
"""Way in which topics are read and written -> the first PySpark that has it."""


def run(python: Path | str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a Python that knows nothing of this environment."""
    ours = {"PYTHONPATH", "PYSPARK_PYTHON", "DJANGO_SETTINGS_MODULE", "VIRTUAL_ENV"}
    if {"LIGHT_PYTHON", "PIPED_PYTHON"} & os.environ.keys():
        ours.add("SPARK_HOME")  # that environment has a PySpark of its own
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    return subprocess.run(
        [str(python), *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        env={**kept, **variables},
        cwd="/",
    )


def printed_by(script: str, name: str, python: Path | str, folder: Path, **variables: str) -> dict[str, Any]:
    """Return what a script prints as its last line: JSON, which a run of the matrix gets in the file that it names."""
    ran = run(python, str(ROOT / "tests/spark" / script), str(folder), **variables)
    assert ran.returncode == 0, ran.stderr[-3_000:]
    answer = ran.stdout.splitlines()[-1]
    if f"{name}_REPORT" in os.environ:
        Path(os.environ[f"{name}_REPORT"]).write_text(answer)
    found: dict[str, Any] = json.loads(answer)
    return found


def is_older(told: dict[str, Any], needed: str) -> bool:
    return tuple(map(int, told["pyspark"].split(".")[:2])) < tuple(map(int, needed.split(".")))


@pytest.fixture(scope="module")
def told(java: None, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("light")
    python = os.environ.get("LIGHT_PYTHON") or environment(folder / "environment")
    return printed_by("light.py", "LIGHT", python, folder, RMQ_URL=redis_url)


def test_the_environment_lacks_django(told: dict[str, Any]) -> None:
    assert not told["django"]
    # A cell of the matrix has hiredis.
    assert "LIGHT_PYTHON" in os.environ or not told["hiredis"]


@pytest.mark.parametrize("way", WAYS)
def test_each_way_works_or_says_which_pyspark_it_needs(told: dict[str, Any], way: str) -> None:
    if is_older(told, WAYS[way]):
        name = way.replace("_", " ") + "s"
        assert told[way] == f"ConfigurationError: {name} need PySpark {WAYS[way]}, this is {told['pyspark']}"
    else:
        assert told[way] == (2_000 if way == "stream_read" else 1_000)


@pytest.mark.parametrize(
    "missing", ["redis", "pyarrow", "django_rmq.spark.source", "pyspark", "pyspark.sql.datasource"]
)
def test_the_module_that_spark_looks_for_can_always_be_imported(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None\nimport pyspark_rmq; print(pyspark_rmq.__all__)"
    if not missing.startswith("pyspark"):
        code += "\ntry: pyspark_rmq.DefaultSource({})\nexcept ImportError as error: print(error)"
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    exported, *told = ran.stdout.splitlines()
    if missing.startswith("pyspark"):
        assert (exported, told) == ("[]", [])
    else:
        assert exported == "['DefaultSource']"
        assert f"but cannot be imported: ModuleNotFoundError: import of {missing} halted" in told[0]


WRITER = "from django_rmq.spark import writer; writer.StreamWriter({}, None, overwrite=False)"


@pytest.mark.parametrize(
    ("lacks", "needs", "said"),
    [
        (
            "streaming.datasource",
            "import django_rmq.spark.stream_reader",
            "stream reads need PySpark 4.2, this is ",
        ),
        (
            "streaming.datasource",
            "import django_rmq.spark.acknowledger",
            "stream reads need PySpark 4.2, this is ",
        ),
        ("datasource.DataSourceStreamArrowWriter", WRITER, "stream writes need PySpark 4.1"),
    ],
)
def test_an_older_pyspark_is_named(lacks: str, needs: str, said: str) -> None:
    lacks = f"pyspark.sql.{lacks}"
    owner, _, name = lacks.rpartition(".")
    forget = f"sys.modules[{lacks!r}] = None" if name.islower() else f"import {owner}; del {lacks}"
    code = f"import sys, pyspark.sql.datasource; {forget}\n{needs}"
    ran = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert f"ConfigurationError: {said}" in ran.stderr


# --- pipelines

WORKS = {
    **dict.fromkeys(("ingest", "report", "consume"), 20),
    **dict.fromkeys(("keep", "archive", "replay"), 6),
}
"""Pipeline -> the number that it leaves in Redis or in files, or prints. ``keep`` is ``archive --keep``."""

ACTS = ("replay and archive without --keep", "4.1")
NEEDS = {"consume": ("stream reads", "4.2"), "archive": ACTS, "replay": ACTS}
"""Pipeline -> what an older PySpark lacks, and the first one that has it."""


@pytest.fixture(scope="module")
def piped(java: None, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    python, folder = os.environ.get("PIPED_PYTHON", sys.executable), tmp_path_factory.mktemp("piped")
    return printed_by("piped.py", "PIPED", python, folder, RMQ_URL=redis_url, PYTHONPATH=str(ROOT))


def is_refused(piped: dict[str, Any], name: str) -> bool:
    return is_older(piped, NEEDS.get(name, ("", "4.0"))[1])


# With the PySpark of this environment, test_pipelines.py looks at each of them more closely.
@pytest.mark.deep
@pytest.mark.parametrize("name", WORKS)
def test_each_pipeline_works_or_says_which_pyspark_it_needs(piped: dict[str, Any], name: str) -> None:
    if is_refused(piped, name):
        what, needed = NEEDS[name]
        assert piped[name] == f"{what} need PySpark {needed}, this is {piped['pyspark']}"
    else:
        assert piped[name] == WORKS[name]


@pytest.mark.deep
def test_what_a_pipeline_refuses_is_left_as_it_was(piped: dict[str, Any]) -> None:
    kept, acted = is_refused(piped, "consume"), not is_refused(piped, "archive")
    assert piped["left"] == {
        "waiting": 20 if kept else 0,
        "dead": 0 if acted else 6,
        "archived": 6 if acted else 0,
    }
