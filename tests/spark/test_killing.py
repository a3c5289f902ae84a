"""A query on a standalone cluster loses nothing and repeats exactly when its driver, executors and Python workers die."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.spark.clusters import Cluster
from tests.spark.killing import is_right, killing
from tests.support.brokers import Broker
from tests.support.workers import client_of

pytestmark = pytest.mark.slow


def test_each_message_is_stored_once_whatever_dies(
    cluster: Cluster, redis_url: str, prefix: str, tmp_path: Path
) -> None:
    broker = Broker(client_of(redis_url), prefix)
    try:
        kills = ["python", "executor", "driver"]
        found = killing(cluster, tmp_path, broker, redis_url, 12_000, kills, executors=1)
    finally:
        broker.close()
    assert is_right(found, 12_000), found
    assert found["killed"] == {"python": 1, "executor": 1, "driver": 1}, found
    # The driver had not recorded the batch in which it died.
    assert found["repeated"] >= 1, found
