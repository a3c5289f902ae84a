"""A standalone cluster of PySpark's own classes: a master and two workers, whose machines have a Python of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

from django_rmq.spark.java import java_home
from tests.spark.archive import FEW_TASKS
from tests.support.embedded_server import free_port
from tests.support.zookeeper import spark_jars

SECONDS = 60


def submit_options() -> str:
    """Return the options for the Java of a driver. Pytest imports this module before the tests' configuration sets them."""
    return os.environ.get("SPARK_SUBMIT_OPTS", "")


def java_options() -> str:
    """Return the options for a Java that lives for seconds: master, workers and executors are such."""
    return submit_options().replace(FEW_TASKS, "")


class Cluster:
    """``with Cluster(folder, python) as cluster``: the workers find ``python`` as python3 in their PATH."""

    def __init__(self, folder: Path, python: Path) -> None:
        self.folder = folder
        self.home = Path(os.environ.get("SPARK_HOME") or spark_jars().parent)
        self.master = f"spark://127.0.0.1:{free_port()}"
        self._python = python
        self._processes: list[subprocess.Popen[bytes]] = []

    def environment(self, python: Path) -> dict[str, str]:
        """Return the environment of a machine with this Python."""
        return {
            "PATH": f"{python.parent}:/usr/bin:/bin",
            "JAVA_HOME": str(java_home()),
            "SPARK_HOME": str(self.home),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "HOME": str(self.folder),
            "SPARK_SUBMIT_OPTS": submit_options(),
            "SPARK_DAEMON_JAVA_OPTS": java_options(),
        }

    def _start(self, name: str, *arguments: str) -> None:
        command = [str(self.home / "bin/spark-class"), f"org.apache.spark.deploy.{name}", *arguments]
        with (self.folder / "log").open("ab") as log:
            self._processes.append(
                subprocess.Popen(
                    command,
                    env=self.environment(self._python),
                    start_new_session=True,
                    stdout=log,
                    stderr=log,
                    cwd=self.folder,
                )
            )

    def __enter__(self) -> Self:
        host, port = self.master.removeprefix("spark://").split(":")
        self._start("master.Master", "--host", host, "--port", port, "--webui-port", str(free_port()))
        for number in (1, 2):
            self._start(
                *("worker.Worker", "--host", host, "--cores", "1", "--memory", "1g", "--webui-port"),
                *(str(free_port()), "--work-dir", str(self.folder / f"worker-{number}"), self.master),
            )
        end = time.monotonic() + SECONDS
        while (self.folder / "log").read_text().count("Successfully registered with master") < 2:
            assert time.monotonic() < end, (self.folder / "log").read_text()[-3_000:]
            time.sleep(0.2)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for process in reversed(self._processes):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)

    def below_workers(self, text: str) -> list[int]:
        """Return the processes that the two workers have started, directly or not, with ``text`` in their command lines."""
        parents: dict[int, int] = {}
        lines: dict[int, str] = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                parent = (folder / "stat").read_text().rpartition(") ")[2].split()[1]
                parents[int(folder.name)] = int(parent)
                lines[int(folder.name)] = (folder / "cmdline").read_bytes().decode(errors="replace")
        workers = {process.pid for process in self._processes[1:]}

        def descends(pid: int) -> bool:
            while pid in parents:
                pid = parents[pid]
                if pid in workers:
                    return True
            return False

        return [pid for pid, line in lines.items() if text in line and descends(pid)]

    def command(self, job: Path, *jobs: str, options: tuple[str, ...] = ()) -> list[str]:
        """Return the command that runs a job; ``jobs`` are its own arguments, ``options`` those of spark-submit."""
        conf = {
            "spark.ui.enabled": "false",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.executor.memory": "600m",
            "spark.executor.extraJavaOptions": java_options(),
            "spark.cores.max": "2",
            "spark.executor.cores": "1",
        }
        given = [part for name, value in conf.items() for part in ("--conf", f"{name}={value}")]
        submit = str(self.home / "bin/spark-submit")
        return [submit, "--master", self.master, *given, *options, str(job), *jobs]

    def submit(
        self, job: Path, python: Path, *options: str, jobs: tuple[str, ...] = (), **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a job on a machine with this Python, and wait for its end; else as ``command``."""
        return subprocess.run(
            self.command(job, *jobs, options=options),
            env={**self.environment(python), **variables},
            check=False,
            capture_output=True,
            text=True,
            timeout=480,
            cwd=self.folder,
        )
