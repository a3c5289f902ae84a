"""What the package uses of other libraries without their documenting it: it is there, and upper bounds keep it there.

`make lowest` runs this with the oldest versions that pyproject.toml allows, `make test` with the newest.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import re
import socket
import threading
import tomllib
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio
from django.core.management.base import BaseCommand
from django.http import HttpRequest
from kazoo.protocol.serialization import Auth
from packaging.requirements import Requirement
from pyspark import SparkContext
from rest_framework.request import Request

from django_rmq.tasks import NATIVE, PACKAGE, framework, is_installed

ROOT = Path(__file__).parents[2]

OWNERS = {
    "django_rmq/api/metrics_view.py": "djangorestframework",
    "django_rmq/core/redis/clients.py": "redis",
    "django_rmq/core/redis/shared_connection.py": "redis",
    "django_rmq/spark/java.py": "pyspark",
}
"""File that reads a private attribute -> the distribution whose it is."""

OF_PYTHON = {"django_rmq/core/worker_processes/child_process.py"}
"""Files that read private attributes of the standard library."""

UNDOCUMENTED = {"kazoo"}
"""Distributions of which a module is used that their documentation leaves out."""


def test_every_file_that_reads_a_private_attribute_is_known() -> None:
    packages = [*(ROOT / "django_rmq").rglob("*.py"), *(ROOT / "pyspark_rmq").rglob("*.py")]
    # Without this comment `make lint` refuses a private attribute.
    marked = {
        str(path.relative_to(ROOT)) for path in packages if re.search("noqa:.*SLF001", path.read_text())
    }
    assert marked == set(OWNERS) | OF_PYTHON


def test_python_ends_its_threads_and_runs_exit_handlers_by_these_names() -> None:
    assert callable(threading._shutdown)  # type: ignore[attr-defined]
    assert callable(atexit._run_exitfuncs)


def test_what_is_used_without_being_documented_has_an_upper_bound() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [
        *project["dependencies"],
        *(one for extra in project["optional-dependencies"].values() for one in extra),
    ]
    needed = [Requirement(line) for line in lines]
    owners = set(OWNERS.values()) | UNDOCUMENTED
    bounded = {one.name for one in needed if any(bound.operator == "<" for bound in one.specifier)}
    assert owners <= {one.name for one in needed}
    assert owners - bounded == set()


def test_a_connection_of_redis_py_has_a_socket_and_a_process(redis_url: str) -> None:
    connection: Any = redis.ConnectionPool.from_url(redis_url).make_connection()
    sockets = [connection._sock]
    connection.connect()
    sockets.append(connection._sock)
    assert connection.pid == os.getpid()
    assert connection.can_read() is False
    connection.disconnect()
    sockets.append(connection._sock)
    assert [type(each) for each in sockets] == [type(None), socket.socket, type(None)]


def test_a_subscription_of_redis_py_has_a_connection_with_a_socket(redis_client: redis.Redis) -> None:
    pubsub = redis_client.pubsub()
    pubsub.subscribe("private-names")
    assert pubsub.connection is not None
    assert pubsub.connection._sock.fileno() > 0
    pubsub.close()


def test_an_async_connection_of_redis_py_has_a_writer_with_a_socket(redis_url: str) -> None:
    async def descriptor() -> int:
        connection: Any = redis.asyncio.ConnectionPool.from_url(redis_url).make_connection()
        await connection.connect()
        found: int = connection._writer.get_extra_info("socket").fileno()
        await connection.disconnect()
        return found

    assert asyncio.run(descriptor()) > 0


def test_a_request_of_the_rest_framework_has_the_request_of_django() -> None:
    request = HttpRequest()
    assert Request(request)._request is request


def test_a_context_of_spark_has_a_gateway_and_a_java() -> None:
    assert {"_gateway", "_jvm"} <= vars(SparkContext).keys()


def test_kazoo_logs_credentials_in_a_type_of_their_own() -> None:
    assert Auth(0, "digest", "rmq:secret").auth == "rmq:secret"


def test_a_command_of_django_knows_whether_a_shell_called_it() -> None:
    called = []

    class Command(BaseCommand):
        requires_system_checks = []

        def handle(self: Any, *_: object, **__: object) -> None:
            called.append(self._called_from_command_line)

    command = Command()
    command.execute(
        **dict.fromkeys(("force_color", "no_color", "skip_checks", "stdout", "stderr", "verbosity"))
    )
    command.run_from_argv(["manage.py", "command"])
    assert called == [False, True]


@pytest.mark.parametrize("package", [each for each in (NATIVE, PACKAGE) if is_installed(each)])
@pytest.mark.parametrize("name", ["task_started", "task_finished"])
def test_a_framework_of_tasks_writes_its_lines_by_receivers_of_these_names(package: str, name: str) -> None:
    signals = framework(package).signals
    own = id(getattr(signals, f"log_{name}"))
    assert own in [receiver[0][0] for receiver in getattr(signals, name).receivers]
