"""How tasks reach a Redis that wants to know who comes: users with rights, TLS, options of connections."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.test import override_settings

from django_rmq import connections
from tests.spark.conftest import TOPICS, run_pipeline, topic
from tests.support.servers import RedisServer, TlsProxy, ask
from tests.support.workers import total

PREFIX = "mine:"
USER, PASSWORD = "spark", "p@ss/wörd%:"


@pytest.fixture(scope="module")
def guarded(certificates: Path) -> Iterator[tuple[RedisServer, TlsProxy]]:
    """A Redis behind TLS whose only user may touch the keys of one project."""
    with RedisServer() as server, TlsProxy(server.port, certificates) as proxy:
        rights = ["on", f">{PASSWORD}", f"~{PREFIX}*", f"~*_{{{PREFIX}*", "resetchannels", f"&{PREFIX}*"]
        rights += ["+@all", "-@admin", "-@dangerous", "+info", "+client|setname", "+client|setinfo"]
        ask(server.port, "ACL", "SETUSER", USER, "reset", *rights)
        ask(server.port, "ACL", "SETUSER", "default", "off")
        yield server, proxy


def settings(url: str, password: str, **pool: object) -> Any:
    options = {"USERNAME": USER, "PASSWORD": password, "CONNECTION_POOL_KWARGS": pool}
    caches = {
        "default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"},
        "rmq": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": url, "OPTIONS": options},
    }
    return override_settings(CACHES=caches, RMQ={"REDIS": "rmq", "KEY_PREFIX": PREFIX, "TOPICS": TOPICS})


def test_pipelines_log_in_over_tls_with_the_options_of_the_settings(
    spark: Any, guarded: tuple[RedisServer, TlsProxy], certificates: Path, tmp_path: Path
) -> None:
    _, proxy = guarded
    authority = str(certificates / "ca.pem")
    url = f"rediss://127.0.0.1:{proxy.port}/0"
    (tmp_path / "rows.csv").write_text("n\n" + "\n".join(map(str, range(100))))
    ingest = ("ingest", "events", tmp_path / "rows.csv", "--priority", "50")
    with settings(url, PASSWORD, ssl_ca_certs=authority, client_name="pipeline"):
        run_pipeline(*ingest)
        assert "events (priority, 4 slots): 100 store" in run_pipeline("report", "events")
        run_pipeline(
            *("consume", "events", "--parquet", tmp_path / "out"),
            *("--checkpoint", tmp_path / "checkpoint", "--available-now"),
        )
        assert spark.read.parquet(str(tmp_path / "out")).count() == 100
        assert total(connections.get_broker(), topic("events"), "acked") == 100
        connections.close()
    with settings(url, PASSWORD):
        assert "CERTIFICATE_VERIFY_FAILED" in run_pipeline(*ingest, code=3)
        connections.close()
    with settings(url, "wrong", ssl_ca_certs=authority):
        assert PASSWORD not in run_pipeline(*ingest, code=3)
        connections.close()


def test_options_of_a_program_say_who_comes(
    spark: Any, guarded: tuple[RedisServer, TlsProxy], certificates: Path, tmp_path: Path
) -> None:
    _, proxy = guarded
    authority = str(certificates / "ca.pem")
    with settings(f"rediss://127.0.0.1:{proxy.port}/0", PASSWORD, ssl_ca_certs=authority):
        connections.agree(topic("doubled"))
        connections.close()
    options = {
        "url": f"rediss://127.0.0.1:{proxy.port}/0",
        "prefix": PREFIX,
        "topic": "doubled",
        "username": USER,
        "password": PASSWORD,
        "connectionOptions": json.dumps({"ssl_ca_certs": authority}),
    }
    frame = spark.range(50).selectExpr("cast(id as string) as value", "100 as priority")
    frame.write.format("rmq").options(**options).mode("append").save()
    assert spark.read.format("rmq").options(**options).load().count() == 50
    stream = spark.readStream.format("rmq").options(**options).load()
    # A stream from one Redis to the same: each batch goes back to where it came from.
    back = stream.selectExpr("concat('1', cast(value as string)) as value", "100 as priority").writeStream
    back = back.format("rmq").options(**options).option("checkpointLocation", str(tmp_path / "checkpoint"))
    assert back.trigger(availableNow=True).start().awaitTermination(100)
    found = spark.read.format("rmq").options(**options).load().collect()
    assert sorted(int(row.value) for row in found) == sorted(int(f"1{n}") for n in range(50))
    wrong = spark.read.format("rmq").options(**{**options, "connectionOptions": "[]"})
    with pytest.raises(Exception, match="connectionOptions must be a JSON object"):
        wrong.load().count()
    wrong = spark.read.format("rmq").options(**{**options, "password": "guess"})
    with pytest.raises(Exception, match=r"(?i)password") as caught:
        wrong.load().count()
    assert "guess" not in str(caught.value)
