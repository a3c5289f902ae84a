"""A cluster whose machines lack the package: each way of docs/how-to/spark-clusters.md onto them, and parts that are killed."""

from __future__ import annotations

import json
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.spark.clusters import Cluster
from tests.spark.conftest import MakeQueue
from tests.spark.environments import ROOT, environment, executors_wheel, zipped
from tests.spark.killing import is_right, killing
from tests.support.brokers import Broker
from tests.support.workers import client_of

JOB = ROOT / "tests/spark/shipped.py"
ON_ONE = ("--conf", "spark.cores.max=1")
"""One executor: enough to see what has come to a machine."""
AT_ONCE = ("--conf", "spark.task.maxFailures=1")
NOT_NEEDED = ("libarrow_flight.", "libarrow_s3.", "/include/", "/tests/")
"""Half of pyarrow, which no task loads."""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of the driver's machine."""
    return environment(tmp_path_factory.mktemp("driver") / "driver")


def told(ran: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr[-5_000:]}"
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    assert found["read"] == found["consumed"] == 200
    return found


@pytest.fixture
def job(queue: MakeQueue, tmp_path: Path) -> tuple[str, str]:
    """The arguments of the job: its topic, and its checkpoint."""
    return json.dumps(queue().options), str(tmp_path / "checkpoint")


# What is said is Spark's; what the format itself says is in test_versions.py.
@pytest.mark.deep
def test_machines_that_lack_the_package_say_so(cluster: Cluster, driver: Path, job: tuple[str, str]) -> None:
    ran = cluster.submit(
        *(JOB, driver, *ON_ONE, *AT_ONCE),
        jobs=(*job, "register"),
        PYSPARK_PYTHON="python3",
        PYSPARK_DRIVER_PYTHON=str(driver),
    )
    assert ran.returncode != 0 and "No module named 'django_rmq'" in ran.stdout + ran.stderr


def test_an_image_has_the_same_python_on_all_machines(
    cluster: Cluster, driver: Path, job: tuple[str, str]
) -> None:
    ran = cluster.submit(JOB, driver, jobs=(*job, "find"), PYSPARK_PYTHON=str(driver))
    assert told(ran)["tasks"] == [[str(driver.parents[1]), "redis"]]


def test_zips_go_with_the_job(cluster: Cluster, driver: Path, job: tuple[str, str], tmp_path: Path) -> None:
    ours = executors_wheel(tmp_path).rename(tmp_path / "pyspark_rmq.zip")
    files = f"{ours},{zipped('redis', tmp_path)}"
    ran = cluster.submit(
        *(JOB, driver, *ON_ONE, "--py-files", files),
        jobs=(*job, "register"),
        PYSPARK_PYTHON="python3",
        PYSPARK_DRIVER_PYTHON=str(driver),
    )
    (python, has), *others = told(ran)["tasks"]
    assert python.endswith("/bare") and has == "redis" and not others


# Spark brings the archive. With what is in it, the format runs as in the image.
@pytest.mark.deep
@pytest.mark.parametrize("names_driver", [False, True], ids=["spark", "platforms"])
def test_an_archive_goes_with_the_job_and_is_unpacked_beside_the_driver(
    cluster: Cluster, job: tuple[str, str], names_driver: bool
) -> None:
    relative = "./environment/bin/python"
    python = cluster.folder / relative
    if not python.exists():
        environment(cluster.folder / "environment", ("pyarrow", "redis"))
    archive = cluster.folder / "environment.tar.gz"
    if not archive.exists():
        # As venv-pack does.
        with tarfile.open(archive, "w:gz", dereference=True, compresslevel=1) as packed:
            packed.add(
                python.parents[1],
                ".",
                filter=lambda one: None if any(part in one.name for part in NOT_NEEDED) else one,
            )
    # Containers of YARN and of EMR Serverless have it where the driver runs, too.
    more: dict[str, Any] = {"PYSPARK_DRIVER_PYTHON": relative} if names_driver else {}
    ran = cluster.submit(
        *(JOB, python, *ON_ONE, "--archives", f"{archive}#environment"),
        *("--conf", f"spark.executorEnv.PYSPARK_PYTHON={relative}"),
        jobs=(*job, "find"),
        PYSPARK_PYTHON=relative,
        **more,
    )
    tasks = told(ran)["tasks"]
    assert {Path(python).name for python, _ in tasks} == {"environment"}
    # It is a copy of the executor's own.
    assert all("/worker-" in python and has == "redis" for python, has in tasks)


@pytest.mark.slow
def test_each_message_is_stored_once_whatever_dies(
    cluster: Cluster, redis_url: str, prefix: str, tmp_path: Path
) -> None:
    broker = Broker(client_of(redis_url), prefix)
    try:
        kills = ["python", "executor", "driver"]
        found = killing(cluster, tmp_path, broker, redis_url, 12_000, kills, executors=1)
    finally:
        broker.close()
    assert is_right(found, 12_000), found
    assert found["killed"] == {"python": 1, "executor": 1, "driver": 1}, found
    # The driver had not recorded the batch in which it died.
    assert found["repeated"] >= 1, found
