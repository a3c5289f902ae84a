"""A cluster whose machines lack the package: each way of docs/how-to/spark-clusters.md onto them, and parts that are killed."""

from __future__ import annotations

import json
import subprocess
import tarfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from django.test import override_settings

from django_rmq import connections, send_messages
from django_rmq.conf import get_config
from tests.spark.clusters import Cluster
from tests.spark.conftest import MakeQueue
from tests.spark.environments import ROOT, environment, executors_wheel, zipped
from tests.spark.flights import PARTS, TOPIC, TOPICS, Trial, ledger
from tests.support.servers import RedisServer

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
def test_each_message_is_stored_once_and_each_batch_is_whole_whatever_dies(
    cluster: Cluster, tmp_path: Path
) -> None:
    count, out = 2_000, tmp_path / "out"
    before: dict[int, set[str]] = {}

    def batches() -> dict[int, set[str]]:
        """Return the messages of each batch in the files, in which each is once."""
        rows = pyarrow.parquet.read_table(out).to_pylist() if out.exists() else []
        found: defaultdict[int, set[str]] = defaultdict(set)
        for row in rows:
            found[row["batch"]].add(row["value"])
        assert sum(map(len, found.values())) == len(rows) == len(set().union(*found.values()))
        return found

    class Watched(Trial):
        def _kill(self, part: str, driver: subprocess.Popen[bytes]) -> bool:
            killed = super()._kill(part, driver)
            if killed and part == "driver":
                before.update(batches())
            return killed

    with (
        RedisServer(appendonly=True, appendfsync="always") as server,
        override_settings(RMQ={"REDIS": server.url, "TOPICS": TOPICS}),
    ):
        connections.get_broker("worker").define(get_config().topic(TOPIC))
        send_messages(TOPIC, list(range(count)))
        trial = Watched(cluster, server, tmp_path, len(PARTS))
        trial.run("slowly")
        assert ledger()["acked"] == count
        connections.close()
    assert trial.killed == dict.fromkeys(PARTS, 1)
    found = batches()
    assert set().union(*found.values()) == {str(n) for n in range(count)}
    # What was there when the driver died was whole.
    assert {number: found[number] for number in before} == before
