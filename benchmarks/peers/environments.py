"""The environment of each queue: installed under ``build/peers`` with pinned hashes, and its driver run there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
OURS = ("rmq", "tasks_rmq")
PINS = {"tasks_db": "django-tasks-db", "tasks_huey": "huey", "tasks_rq": "django-tasks-rq"}
"""Peer -> the package whose version counts, where it has another name."""

Result = dict[str, Any]
"""What the driver of one queue found, or an ``error``."""


class Unavailable(Exception):
    """A peer that cannot be installed here."""


def run_driver(name: str, arguments: Sequence[int], settings: Mapping[str, float]) -> Result:
    """Return what the driver of ``name`` found in its environment with these settings, or an ``error``."""
    driver = "tasks_driver" if name.startswith("tasks_") else f"{name}_driver"
    variables = {key: str(value) for key, value in settings.items()}
    variables |= {"PYTHONPATH": str(FOLDER), "PEER_TASKS": name.removeprefix("tasks_")}
    try:
        python = sys.executable if name in OURS else str(environment(name))
        ran = subprocess.run(
            [python, "-m", driver, *map(str, arguments)],
            cwd=FOLDER,
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": "not done after 300 s"}
    except Unavailable as error:
        return {"error": str(error)}
    if ran.returncode:
        return {"error": (ran.stderr.strip().splitlines() or ["no output"])[-1][:200]}
    return {**json.loads(ran.stdout.strip().splitlines()[-1]), "version": version(name)}


def requirements(name: str) -> Path:
    return FOLDER / "requirements" / f"{name}.txt"


def version(name: str) -> str:
    """Return the version that is pinned."""
    if name in OURS:
        from django_rmq import __version__

        return __version__
    pin = re.search(rf"^{PINS.get(name, name)}==(\S+)", requirements(name).read_text(), re.MULTILINE)
    return pin[1] if pin else "?"


def environment(name: str) -> Path:
    """Return the Python of the environment of ``name``, made again if what it requires has changed."""
    home, wanted = ROOT / "build" / "peers" / name, requirements(name)
    python, mark = home / "bin" / "python", home / ".required"
    if mark.exists() and mark.read_text() == wanted.read_text():
        return python
    venv.create(home, clear=True, with_pip=True)
    pip = f"-m pip install --quiet --disable-pip-version-check --require-hashes -r {wanted}"
    ran = subprocess.run([python, *pip.split()], capture_output=True, text=True, timeout=300, check=False)
    if ran.returncode:
        raise Unavailable(f"cannot be installed: {(ran.stderr.strip().splitlines() or ['?'])[-1][:200]}")
    mark.write_text(wanted.read_text())
    return python
