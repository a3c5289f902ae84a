"""A slot that another worker has acquired for a moment is acquired again as soon as it is known to be ours."""

from __future__ import annotations

import uuid
from functools import partial
from typing import Any

import pytest

from django_rmq.core.coordination.redis_coordinator import RedisCoordinator
from django_rmq.core.coordination.zookeeper import Ensemble, ZooKeeperCoordinator
from tests.brokers import OracleBroker
from tests.flapping import miss_an_assignment
from tests.party import SESSION


@pytest.mark.slow
def test_a_worker_that_missed_an_assignment_goes_on_with_its_slots(broker: Any) -> None:
    miss_an_assignment(broker, partial(RedisCoordinator, broker, session_seconds=SESSION), 2)


@pytest.mark.slow
def test_the_same_with_zookeeper(zookeeper: str) -> None:
    ensemble = Ensemble(zookeeper, f"/t{uuid.uuid4().hex[:12]}", SESSION)
    make = partial(ZooKeeperCoordinator, ensemble, registered=dict, token=uuid.uuid4().hex)
    miss_an_assignment(OracleBroker(), make, 2)
