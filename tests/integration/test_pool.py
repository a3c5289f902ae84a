"""The pool: connections rest between calls, and none is handed out that is not as new."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import redis

from django_rmq.conf import RedisServer
from django_rmq.connections.brokers import build_client
from django_rmq.core.redis.clients import Pool, RenewingPool
from tests.support import servers


@pytest.fixture
def pool(redis_url: str) -> Iterator[Pool]:
    found = Pool.from_url(redis_url, socket_timeout=5, protocol=2)
    yield found
    found.disconnect()


def ask(connection: Any, *command: Any) -> Any:
    connection.send_command(*command)
    return connection.read_response()


def client_id(pool: Pool) -> int:
    """Return how the server names the connection that is handed out next."""
    connection = pool.get_connection()
    try:
        return int(ask(connection, "CLIENT", "ID"))
    finally:
        pool.release(connection)


def test_what_was_used_last_is_handed_out_again(pool: Pool) -> None:
    first, second = pool.get_connection(), pool.get_connection()
    assert first is not second
    pool.release(first)
    pool.release(second)
    assert pool.get_connection() is second
    assert pool.get_connection() is first


def test_a_connection_that_the_server_has_closed_is_replaced(pool: Pool, redis_client: redis.Redis) -> None:
    before = client_id(pool)
    redis_client.execute_command("CLIENT", "KILL", "ID", before)
    after = client_id(pool)
    assert after > before
    assert client_id(pool) == after


def test_a_connection_with_an_unread_answer_is_replaced(pool: Pool) -> None:
    before = client_id(pool)
    connection = pool.get_connection()
    connection.send_command("PING")
    assert select.select([connection._sock], [], [], 5)[0]
    pool.release(connection)
    assert client_id(pool) > before


def test_one_that_its_user_has_closed_does_not_rest(pool: Pool) -> None:
    before = client_id(pool)
    connection = pool.get_connection()
    connection.disconnect()
    pool.release(connection)
    assert client_id(pool) > before


def test_to_disconnect_closes_what_rests(pool: Pool, redis_client: redis.Redis) -> None:
    before = client_id(pool)
    in_use, resting = pool.get_connection(), pool.get_connection()
    pool.release(resting)
    pool.disconnect(inuse_connections=False)
    assert ask(in_use, "CLIENT", "ID") == before
    pool.release(in_use)
    pool.disconnect()
    assert client_id(pool) > before


def test_no_more_connections_are_made_than_allowed(redis_url: str) -> None:
    pool = Pool.from_url(redis_url, max_connections=1, protocol=2)
    first = client_id(pool)
    assert client_id(pool) == first
    connection = pool.get_connection()
    with pytest.raises(redis.ConnectionError):
        pool.get_connection()
    connection.disconnect()
    pool.release(connection)
    assert client_id(pool) > first
    pool.disconnect()


def test_threads_never_share_a_connection(pool: Pool) -> None:
    threads, rounds = 8, 50
    together = Barrier(threads)

    def use(_: int) -> list[int]:
        together.wait(30)
        return [client_id(pool) for _ in range(rounds)]

    def echo(thread: int) -> bool:
        together.wait(30)
        for i in range(rounds):
            connection = pool.get_connection()
            told = ask(connection, "ECHO", f"{thread}:{i}")
            pool.release(connection)
            if told != f"{thread}:{i}".encode():
                return False
        return True

    with ThreadPoolExecutor(threads) as executor:
        seen = {each for found in executor.map(use, range(threads)) for each in found}
        assert len(seen) <= threads
        assert all(executor.map(echo, range(threads)))


def test_a_fork_leaves_the_connections_of_the_parent_alone(pool: Pool) -> None:
    ours = client_id(pool)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, b"%d" % client_id(pool))
        finally:
            os._exit(0)
    os.close(write)
    theirs = os.read(read, 100)
    os.close(read)
    os.waitpid(child, 0)
    assert int(theirs) > ours
    assert client_id(pool) == ours


def test_credentials_that_are_renewed_are_left_to_the_drivers_own_pool(redis_url: str) -> None:
    class Provider(redis.CredentialProvider):
        def get_credentials(self) -> tuple[str]:
            return ("",)

    assert type(build_client(RedisServer(redis_url), 1.0).connection_pool) is Pool
    server = RedisServer(redis_url, pool={"credential_provider": Provider()})
    assert type(build_client(server, 1.0).connection_pool) is RenewingPool


def test_a_client_works_through_the_socket_of_a_server(tmp_path: Path) -> None:
    socket = tmp_path / "redis.sock"
    with servers.RedisServer(unixsocket=str(socket)):
        client = build_client(RedisServer(f"unix://{socket}?db=3"), 1.0)
        assert client.set("a", "b") and client.get("a") == b"b"
        client.close()
