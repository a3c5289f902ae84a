"""The scripts of topics with OUTCOME_RETENTION under the faults of ``test_faults``: lost replies, full servers, foreign types."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from django_rmq.core import lua
from django_rmq.core.model.replies import digest
from django_rmq.exceptions import ServerUnavailable, WrongType
from tests.contract.slots import Drift, Slot, drift
from tests.integration.test_faults import (
    ACTS,
    REPEATED,
    TOLD_TWICE,
    comparable,
    connect,
    memory_full,
    raw,
    slot_of,
    spoil,
    stage,
    through,
)
from tests.support.servers import RedisServer, TcpProxy

KEPT = sorted({name.removesuffix(lua.SECOND) for name in lua.all_names() if name.endswith(lua.SECOND)})
each = pytest.mark.parametrize("script", [*KEPT, "progress"])


def kept(client: redis.Redis, prefix: str) -> Slot:
    return slot_of(client, prefix, outcome_retention_ms=3_600_000)


@pytest.fixture(scope="module")
def small_server() -> Iterator[redis.Redis]:
    with RedisServer(maxmemory_policy="noeviction") as server, connect(server.url) as client:
        yield client


@each
def test_a_call_whose_reply_was_lost_and_its_repetition_have_one_effect(
    redis_client: redis.Redis, prefix: str, script: str
) -> None:
    once, slot = kept(redis_client, f"{prefix}once:"), kept(redis_client, f"{prefix}lost:")
    receipts = [stage(once, script), stage(slot, script)]
    assert receipts[0] == receipts[1]
    ACTS[script](once, receipts[0])
    form = script if script == "progress" else script + lua.SECOND
    with (
        TcpProxy(redis_client.connection_pool.connection_kwargs["port"]) as proxy,
        connect(proxy.url) as client,
    ):
        slot.broker.load_scripts()
        proxy.drop_reply(containing=lua.load(form).sha)
        with pytest.raises(ServerUnavailable):
            ACTS[script](through(slot, client), receipts[0])
        proxy.wait_for_drop()
    if script != "prepare":
        assert ACTS[script](slot, receipts[0]) == REPEATED[script]
    assert comparable(once, *TOLD_TWICE) == comparable(slot, *TOLD_TWICE)
    assert drift(slot) == drift(once) == Drift(0, 0, 0, 0)


@each
def test_on_a_full_server_outcomes_are_kept_as_always(
    small_server: redis.Redis, prefix: str, script: str
) -> None:
    free, full = kept(small_server, f"{prefix}free:"), kept(small_server, f"{prefix}full:")
    receipt = stage(free, script)
    assert stage(full, script) == receipt
    answer = ACTS[script](free, receipt)
    with memory_full(small_server):
        assert ACTS[script](full, receipt) == answer
    assert comparable(full) == comparable(free)
    assert full.hash("outcomes").keys() == full.zset("outcome_times").keys()
    if script in ("commit", "progress"):
        assert digest(b"flying") in full.hash("outcomes")


@each
def test_keys_of_a_foreign_type_are_named_and_nothing_changes(
    redis_client: redis.Redis, prefix: str, script: str
) -> None:
    slot = kept(redis_client, prefix)
    receipt = stage(slot, script)
    sets = slot.keys.outcome_times, slot.keys.delivery_outcomes
    for key, kinds in ((slot.keys.outcomes, ("string", "zset")), *((key, ("list", "hash")) for key in sets)):
        for how in kinds:
            whole = redis_client.dump(key)
            spoil(redis_client, key, how)
            before = raw(redis_client, prefix)
            with pytest.raises(WrongType) as caught:
                ACTS[script](slot, receipt)
            assert f"{key.decode()} is a {how}, not a " in str(caught.value)
            assert raw(redis_client, prefix) == before
            redis_client.delete(key)
            if whole:
                redis_client.restore(key, 0, whole)
