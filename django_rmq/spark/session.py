"""A Spark session as our pipelines want it: local by default, or a cluster's, or a Spark Connect server's."""

from __future__ import annotations

import logging
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from django_rmq.exceptions import ConfigurationError
from django_rmq.spark.java import prepare_environment

LOCAL = "local[*]"
"""All cores of this machine."""

OF_A_SESSION = {"spark.sql.shuffle.partitions": "8", "spark.sql.session.timeZone": "UTC"}
"""What a session may say for itself, also where Spark runs already."""

DEFAULTS = {
    **OF_A_SESSION,
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # Without it Arrow batches go through a TCP port of their own.
    "spark.python.unix.domain.socket.enabled": "true",
}
JAVA_SECONDS = 20.0
"""How long a Java may take to end."""

OF_CONNECT = ("pandas", "grpc", "grpc_status", "zstandard")
"""What the client of a Spark Connect server imports besides."""

CONNECT_PORT = 15002
"""Where it listens unless told otherwise."""
CONNECT_SECONDS = 10.0

AT_HOME = {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
"""For a local master: it talks to itself only."""


def check_installed(remote: str | None = None) -> None:
    """Make sure that a session can be had. Raises ``ConfigurationError`` without PySpark, pyarrow or a Java.

    A Spark Connect server needs no Java here, and what its client needs instead.
    """
    for name in ("pyspark", "pyarrow"):
        if find_spec(name) is None:
            raise ConfigurationError(
                f'Spark needs {name}, which is not installed: pip install "django-redis-rmq[spark]"'
            )
    for name in OF_CONNECT if remote is not None else ():
        if find_spec(name) is None:
            raise ConfigurationError(
                f'A Spark Connect server needs {name}, which is not installed: pip install "django-redis-rmq[connect]"'
            )
    if remote is None:
        prepare_environment()


def open_session(
    name: str, *, master: str | None = None, remote: str | None = None, conf: Mapping[str, str] | None = None
) -> Any:
    """Return a session called ``name``; ``remote`` is the address of a Spark Connect server.

    Raises ``ConfigurationError`` where something is missing or Spark does not begin.
    """
    check_installed(remote)
    if remote is not None:
        _check_answers(remote)
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    from django_rmq.spark.source import RmqDataSource

    builder: Any = SparkSession.builder.appName(name)
    if remote is not None:
        chosen = {**OF_A_SESSION, **(conf or {})}
        builder = builder.remote(remote)
    else:
        master = master or LOCAL
        chosen = dict(conf or {})
        if not is_begun():
            chosen = {**DEFAULTS, **(AT_HOME if master.startswith("local") else {}), **chosen}
        builder = builder.master(master)
    for key, value in chosen.items():
        builder = builder.config(key, value)
    # Spark writes a traceback of Python's before it raises; the error says enough.
    logging.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL)
    ours = signal.getsignal(signal.SIGINT)
    try:
        session = builder.getOrCreate()
        if remote is not None:
            # Elsewhere Spark finds it by itself, through pyspark_rmq.
            session.dataSource.register(RmqDataSource)
    except (PySparkException, RuntimeError, OSError) as error:
        where = master if remote is None else _without_token(remote)
        raise ConfigurationError(f"Spark does not begin ({where}): {error}") from error
    if threading.current_thread() is threading.main_thread():
        # Spark puts a handler of its own in its place.
        signal.signal(signal.SIGINT, ours)
    if remote is None:
        session.sparkContext.setLogLevel("ERROR")
    return session


def _check_answers(remote: str) -> None:
    """Raise ``ConfigurationError`` unless somebody listens at the address of a Spark Connect server.

    Spark's own client would ask again for ten minutes without a word.
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
    """Return the address without the parameters behind it, of which one may be a token."""
    return remote.partition(";")[0]


def close_session(session: Any) -> None:
    """End a session, and the Java that was started for it: else that ends some time after this process."""
    from pyspark import SparkContext

    session.stop()
    shared: Any = SparkContext
    gateway = shared._gateway  # noqa: SLF001 - there is no public way to the process
    process = getattr(gateway, "proc", None)
    if gateway is None or process is None:
        return  # it runs elsewhere
    gateway.shutdown()
    shared._gateway = shared._jvm = None  # noqa: SLF001 - so that another session starts another Java
    process.stdin.close()
    try:
        process.wait(JAVA_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def is_begun() -> bool:
    """Return whether this process has a session already."""
    if "pyspark.sql" not in sys.modules:
        return False
    from pyspark.sql import SparkSession

    return SparkSession.getActiveSession() is not None


INFERS_PARTITIONS = "spark.sql.sources.partitionColumnTypeInference.enabled"


def stored_files(session: Any, path: str) -> Any:
    """Return the Parquet files of a folder as a frame, names of folders as text; None: there are none yet."""
    from pyspark.errors import AnalysisException
    from pyspark.sql import SparkSession

    before = session.conf.get(INFERS_PARTITIONS)
    # A topic may be called 007, which is no number.
    session.conf.set(INFERS_PARTITIONS, "false")
    try:
        found = session.read.option("basePath", path).parquet(path)
        found.schema  # noqa: B018 - a Spark Connect server looks at the files only when it is asked for something
        return found
    except AnalysisException as error:
        if error.getCondition() in ("PATH_NOT_FOUND", "UNABLE_TO_INFER_SCHEMA"):
            return None
        raise
    finally:
        if isinstance(session, SparkSession):
            # The session of a Spark Connect server is a class of its own, and looks at the files again for each job.
            session.conf.set(INFERS_PARTITIONS, before)


def describe(error: BaseException) -> tuple[str, str]:
    """Return what went wrong in a task or a query, as (the class of ours that was raised there or "", its sentence)."""
    text = str(error)
    name, sentence = "", ""
    for line in text.splitlines():
        head, found, rest = line.strip().partition(": ")
        if found and "django_rmq.exceptions." in head:
            name, sentence = head.rpartition(".")[2], rest
    if name:
        return name, sentence
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    _, raised, behind = text.partition("Traceback (most recent call last):\n")
    if raised and "[FOREACH_BATCH_USER_FUNCTION_ERROR]" in text:
        # What a function for batches raised is the first line of its traceback that is not indented.
        lines = [line for line in behind.splitlines() if line.strip() and not line[0].isspace()] or lines
    if type(error).__name__ == "Py4JJavaError":
        # The first line only says what was called; what Java has thrown comes after it.
        lines = [line.removeprefix(": ") for line in lines[1:]] or lines
    return "", lines[0] if lines else type(error).__name__


def is_sparks(error: BaseException) -> bool:
    """Return whether ``error`` came out of Spark."""
    return type(error).__module__.partition(".")[0] in ("pyspark", "py4j", "grpc")


__all__ = [
    "LOCAL",
    "check_installed",
    "close_session",
    "describe",
    "is_begun",
    "is_sparks",
    "open_session",
    "stored_files",
]
