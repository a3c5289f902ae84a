"""What every test may ask for: a Redis, a client, a key prefix of its own; and Hypothesis' two profiles."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import uuid
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import redis
from django.conf import settings as django_settings
from django.db import connections
from django.test import TransactionTestCase
from hypothesis import HealthCheck, settings
from redis.backoff import NoBackoff
from redis.retry import Retry

from django_rmq.connections import SOCKET_TIMEOUTS
from django_rmq.core.log import LogThrottle
from django_rmq.exceptions import ConfigurationError
from django_rmq.spark.java import java_home
from django_rmq.tasks import is_native
from tests.spark import archive
from tests.support.databases import SERVERS, empty_tables
from tests.support.servers import RedisCluster, RedisServer, ZooKeeperServer, absent, running_servers
from tests.support.slot_transitions import check_transitions
from tests.support.zookeeper import spark_jars

# A real server and two shared cores: how long one example takes says nothing about the rules.
settings.register_profile(
    "slice",
    deadline=None,
    max_examples=50,
    stateful_step_count=30,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("proof", settings.get_profile("slice"), max_examples=1000, stateful_step_count=100)
settings.load_profile("slice")


REAL_WAITS = dict(SOCKET_TIMEOUTS)


def pytest_configure() -> None:
    for name, value in archive.environment().items():
        os.environ.setdefault(name, value)
    # Tests have the topics that they declare; those of the shop ask for its tasks.
    package = "django.tasks" if is_native() else "django_tasks"
    django_settings.TASKS = {"default": {"BACKEND": f"{package}.backends.immediate.ImmediateBackend"}}
    # The default takes a quarter of a second for each password.
    django_settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
    # pytest-django and the cases of the tests derive from it, and Django has no setting for what empties a database.
    TransactionTestCase._fixture_teardown = empty_tables  # type: ignore[attr-defined]
    check_transitions()
    # A busy machine can pause for a second. Redis is not unavailable then.
    SOCKET_TIMEOUTS.update(dict.fromkeys(SOCKET_TIMEOUTS, 10.0))


SLOW = {"browser", "clients", "e2e", "spark", "types"}
"""Folders in which every test is slow."""


BROKERS = {"redis", "memory", "cluster", "fakeredis"}
"""What tests call the brokers that they run on."""
UNASKED = BROKERS - set(os.environ.get("BROKERS", " ".join(BROKERS)).split())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is slow because of where it is, and leave out the brokers that BROKERS does not name."""
    for item in items:
        if SLOW & set(item.path.parts[-3:-1]):
            item.add_marker(pytest.mark.slow)
    left_out = [item for item in items if UNASKED & _texts(item)] if UNASKED else []
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not UNASKED & _texts(item)]


def pytest_collection_finish() -> None:
    """Keep the modules and cases, which stay to the end, out of each collection of garbage."""
    gc.freeze()


def _texts(item: pytest.Item) -> set[str]:
    """Return the texts among the parameters of a case."""
    given = getattr(item, "callspec", None)
    return {value for value in given.params.values() if isinstance(value, str)} if given else set()


_modules: set[str] = set()
_complaints: list[LogThrottle] = []
"""The complaints of the modules that were looked at."""


@pytest.fixture(autouse=True)
def fresh_complaints() -> Iterator[None]:
    """What one test let fail hides no log line of the next one."""
    yield
    if len(sys.modules) != len(_modules):
        for name in sys.modules.keys() - _modules:
            ours = vars(sys.modules[name]).values() if name.startswith("django_rmq") else ()
            _complaints.extend(found for found in ours if isinstance(found, LogThrottle))
        _modules.update(sys.modules)
    for complaints in _complaints:
        complaints._streaks.clear()


@pytest.fixture
def real_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of how long a process waits for Redis: as in a deployment."""
    for purpose, seconds in REAL_WAITS.items():
        monkeypatch.setitem(SOCKET_TIMEOUTS, purpose, seconds)


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """The Redis that all tests share: REDIS_URL, else one started for this run."""
    given = os.environ.get("REDIS_URL")
    if given:
        yield given
        return
    with RedisServer() as server:
        yield server.url


@pytest.fixture(scope="session")
def django_db_modify_db_settings() -> Iterator[None]:
    """Run the tests on the database that TEST_DATABASE names: sqlite (the default), postgres or mariadb."""
    kind = os.environ.get("TEST_DATABASE", "sqlite")
    if kind == "sqlite":
        yield
        return
    with SERVERS[kind]() as server:
        # Whatever has imported the project may have made the wrapper of the connection.
        connections.settings["default"].update(server.settings)
        del connections["default"]
        assert connections["default"].settings_dict["PORT"] == str(server.port)
        yield


@pytest.fixture(scope="session")
def zookeeper() -> Iterator[str]:
    """The hosts of the ZooKeeper that tests share: ZOOKEEPER_HOSTS, else one started for this run."""
    given = os.environ.get("ZOOKEEPER_HOSTS")
    if given:
        yield given
        return
    needs_java()
    with ZooKeeperServer() as server:
        yield server.hosts


def needs_java() -> None:
    """Skip with the reason where ZooKeeper cannot be started; in CI that is an error."""
    try:
        java_home()
        spark_jars()
    except ConfigurationError as error:
        absent(str(error))


@pytest.fixture(scope="session")
def java() -> None:
    """For tests that start a ZooKeeper of their own."""
    needs_java()


@pytest.fixture(scope="session")
def proc() -> None:
    """For tests that look at the processes of Linux."""
    if not Path("/proc/self/fd").exists():
        absent("there is no /proc, in which processes are found and their open files counted")


@pytest.fixture(scope="session")
def redis_client(redis_url: str) -> Iterator[redis.Redis]:
    """A plain client that returns bytes and never repeats a command by itself."""
    client = redis.Redis.from_url(redis_url, socket_timeout=60, retry=Retry(NoBackoff(), 0))
    yield client
    client.close()


@pytest.fixture(scope="session")
def redis_cluster() -> Iterator[RedisCluster]:
    """A Redis Cluster that the tests share which do not harm it: three primaries, no replicas."""
    with RedisCluster(replicas=False, node_timeout_ms=60_000) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CA, a server's certificate for 127.0.0.1 and a client's."""
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=60)

    try:
        openssl("version")
    except FileNotFoundError:
        absent("there is no openssl to make certificates with")
    new_key = ("req", "-newkey", "rsa:2048", "-nodes")
    openssl(*new_key, "-x509", "-days", "2", "-subj", "/CN=test CA", "-keyout", "ca.key", "-out", "ca.pem")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    for who in ("server", "client"):
        openssl(*new_key, "-subj", f"/CN={who}", "-keyout", f"{who}.key", "-out", f"{who}.csr")
        openssl(
            *("x509", "-req", "-days", "2", "-in", f"{who}.csr", "-CA", "ca.pem", "-CAkey", "ca.key"),
            *("-CAcreateserial", "-extfile", "names", "-out", f"{who}.pem"),
        )
    (folder / "server.both.pem").write_text(
        (folder / "server.key").read_text() + (folder / "server.pem").read_text()
    )
    return folder


@pytest.fixture
def prefix(redis_client: redis.Redis) -> Iterator[str]:
    """A key prefix that no other test has; every key with it in its name is gone after the test."""
    unique = f"t{uuid.uuid4().hex[:12]}:"
    yield unique
    keys = list(redis_client.scan_iter(match=f"*{unique}*", count=1000))
    for start in range(0, len(keys), 1000):
        redis_client.unlink(*keys[start : start + 1000])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Put the end of each running server's log into the report of a failed test."""
    report = yield
    if report.failed:
        for server in running_servers:
            report.sections.append((f"{type(server).__name__} on port {server.port}", server.log()[-4000:]))
    return report
