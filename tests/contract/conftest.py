"""Every test of the contract runs on all brokers, with given time, and ends with balanced books."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from django_rmq.core.cluster.cluster_broker import Cluster
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.testing import Clock
from tests.contract.keyspaces import ClusterKeyspace, Keyspace, MemoryKeyspace, RedisKeyspace
from tests.contract.slots import CONSTANT, START_MS, TYPES, Drift, Make, Slot, drift
from tests.support.brokers import Broker, ClusterBroker, InMemoryBroker, OracleBroker
from tests.support.servers import RedisCluster
from tests.support.workers import cluster_of

BROKERS = os.environ.get("BROKERS", "redis memory cluster fakeredis").split()
ON_ONE_SERVER = pytest.mark.parametrize(
    "broker", [broker for broker in BROKERS if broker != "cluster"], indirect=True
)


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: Any) -> Iterator[None]:
    """Let the first broker run every case, and the others one case of each test.

    A Cluster and fakeredis run the same scripts, and add no rule. The oracle is held to the scripts in lockstep; `make quick`
    runs all cases on it.
    """
    yield
    begun: set[str] = set()
    cases = []
    for case in metafunc._calls:
        broker = case.params.get("broker", BROKERS[0])
        if broker == BROKERS[0] or broker not in begun:
            cases.append(case)
        begun.add(broker)
    metafunc._calls = cases


@pytest.fixture
def clock() -> Clock:
    return Clock(START_MS)


@pytest.fixture(scope="session")
def cluster_client(redis_cluster: RedisCluster) -> Iterator[Cluster]:
    client = cluster_of(redis_cluster)
    yield client
    client.close()


@pytest.fixture(params=BROKERS)
def broker(request: pytest.FixtureRequest, clock: Clock) -> Any:
    if request.param == "memory":
        return OracleBroker("m:", clock)
    if request.param == "cluster":
        return ClusterBroker(request.getfixturevalue("cluster_client"), f"t{uuid.uuid4().hex[:12]}:", clock)
    if request.param == "fakeredis":
        return InMemoryBroker(f"t{uuid.uuid4().hex[:12]}:", clock)
    client = request.getfixturevalue("redis_client")
    return Broker(client, request.getfixturevalue("prefix"), clock)


@pytest.fixture
def keyspace(broker: Any) -> Keyspace:
    if isinstance(broker, OracleBroker):
        return MemoryKeyspace(broker)
    if isinstance(broker, ClusterBroker):
        return ClusterKeyspace(broker.client, broker.prefix)
    return RedisKeyspace(broker.client, broker.prefix)


CHECKED = (
    "store", "prepare", "retry", "dead", "claim", "inflight", "deaths", "failures", "body", "prepare_body",
    "claim_body",
)  # fmt: skip


@pytest.fixture
def make_slot(broker: Any, keyspace: Keyspace, clock: Clock) -> Iterator[Make]:
    """Make slots of topics; after the test every ledger balances, but for what strangers put in."""
    made: list[Slot] = []

    def make(type: TopicType = TopicType.PRIORITY, *, index: int = 0, **options: Any) -> Slot:  # noqa: A002
        name = options.pop("name", f"topic{len(made)}")
        options = {"slots": 1 if index == 0 else 16, **options}
        slot = Slot(broker, keyspace, clock, Topic(name, type, **options), index)
        made.append(slot)
        return slot

    yield make
    for slot in made:
        assert drift(slot) == Drift(slot.strangers, 0, 0, 0), slot.audit_ledger()
        found = {name: set(held) for name, held in slot.read(*CHECKED).items()}
        assert found["inflight"] == found["prepare"]
        assert found["deaths"] == found["dead"]
        waiting = found["store"] | found["retry"]
        assert found["failures"] <= waiting | found["prepare"] | found["claim"]
        assert found["body"] <= waiting
        assert found["prepare_body"] <= found["prepare"]
        assert found["claim_body"] <= found["claim"]


KINDS = [
    pytest.param(
        {"type": kind, "identity": identity, "serial": serial, "backoff": CONSTANT},
        id=f"{kind.value}-{identity}-{gate}",
    )
    for kind, identity, (serial, gate) in product(
        TYPES, ["body", "key"], [(True, "serial"), (False, "shared")]
    )
]


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest, make_slot: Make) -> Make:
    """Make slots of one of the twelve kinds of topics."""
    return lambda **options: make_slot(**{**request.param, **options})


@pytest.fixture(params=KINDS)
def slot(request: pytest.FixtureRequest, make_slot: Make) -> Slot:
    """A slot of one of the twelve kinds of topics, or of those that ``slot_of_each`` names."""
    return make_slot(**request.param)
