"""Which pipelines run with which PySpark; an environment of its own is given by PIPED_PYTHON (`make matrix`)."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.spark.environments import ROOT
from tests.spark.test_light import run

# With the PySpark of this environment, test_pipelines.py looks at each of them more closely.
pytestmark = pytest.mark.deep

WORKS = {
    "ingest": 20,
    "report": 20,
    "consume": 20,
    "deaths": 6,
    "keep": 6,
    "archive": 6,
    "replay": 6,
}
"""Pipeline -> the number that it leaves in Redis or in files, or prints. ``keep`` is ``archive --keep``."""

ACTS = ("replay and archive without --keep", "4.1")
NEEDS = {"consume": ("stream reads", "4.2"), "archive": ACTS, "replay": ACTS}
"""Pipeline -> what an older PySpark lacks, and the first one that has it."""


@pytest.fixture(scope="module")
def told(java: None, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What tests/spark/piped.py has printed."""
    python = os.environ.get("PIPED_PYTHON", sys.executable)
    folder = tmp_path_factory.mktemp("piped")
    ran = run(
        python, str(ROOT / "tests/spark/piped.py"), str(folder), RMQ_URL=redis_url, PYTHONPATH=str(ROOT)
    )
    assert ran.returncode == 0, ran.stderr[-3_000:]
    answer = ran.stdout.splitlines()[-1]
    if "PIPED_REPORT" in os.environ:
        Path(os.environ["PIPED_REPORT"]).write_text(answer)
    found: dict[str, Any] = json.loads(answer)
    return found


def is_refused(told: dict[str, Any], name: str) -> bool:
    needed = NEEDS.get(name, ("", "4.0"))[1]
    return tuple(map(int, told["pyspark"].split(".")[:2])) < tuple(map(int, needed.split(".")))


@pytest.mark.parametrize("name", WORKS)
def test_each_pipeline_works_or_says_which_pyspark_it_needs(told: dict[str, Any], name: str) -> None:
    if is_refused(told, name):
        what, needed = NEEDS[name]
        assert told[name] == f"{what} need PySpark {needed}, this is {told['pyspark']}"
    else:
        assert told[name] == WORKS[name]


def test_what_a_pipeline_refuses_is_left_as_it_was(told: dict[str, Any]) -> None:
    kept, acted = is_refused(told, "consume"), not is_refused(told, "archive")
    assert told["left"] == {
        "waiting": 20 if kept else 0,
        "dead": 0 if acted else 6,
        "archived": 6 if acted else 0,
    }
