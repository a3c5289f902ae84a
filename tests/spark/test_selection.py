"""The example project's selection on a real Spark: the same rules as in plain Python, and the whole flow reconciled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from django.conf import settings
from django.test import override_settings

from django_rmq import connections
from django_rmq.core.model.topic import TopicType
from django_rmq.testing import drain
from example_project.prices.models import Grade, Product, Shop
from example_project.selection import changes, rules
from example_project.selection.changes import differing_labels
from example_project.selection.feeds import Feeds, write_file
from example_project.selection.models import Batch, Change, Item, Label, Member, ProductSet, Work
from example_project.selection.sets import differing_sets
from example_project.selection.sources import SOURCES
from tests.spark.conftest import Queue

RULES = (
    "price < 20",
    "not price < 20",
    "price >= 19.99 and price <= 100.5",
    "stock = 0 or stock in (1, 2, 20)",
    "stock != 5",
    "rating between 3.5 and 4.5",
    'title contains "MUG"',
    "title starts with 'amber' and not title contains \"lamp\"",
    'title in ("straße", "fern tall vase")',
    'title != "straße"',
    'title contains "%" or title contains "_" or title contains "\\"',
    "rating is known and stock is not known",
    "not (price > 5 and (stock > 5 or not rating > 3))",
    "price > 999999999.9999",
    "price > -1",
)
FACTS: list[dict[str, Any]] = [
    {"price": price, "stock": stock, "rating": rating, "title": title}
    for price in (None, Decimal("0.00"), Decimal("19.99"), Decimal("20.00"), Decimal("9999999.99"))
    for stock in (None, 0, 5, 20, 2**31 - 1)
    for rating in (None, Decimal("3.5"), Decimal("4.6"))
    for title in (None, "straße".casefold(), "amber tall mug", "fern tall vase", "100% _a_ \\")
]


def test_spark_and_plain_python_give_the_same_answers(spark: Any) -> None:
    from example_project.selection.columns import column_of
    from example_project.selection.fetching import FACTS as SCHEMA

    parsed = [rules.parse(text) for text in RULES]
    table = pa.Table.from_pylist([{"sku": sku, **facts} for sku, facts in enumerate(FACTS)], SCHEMA)
    columns = [column_of(rule).alias(f"r{i}") for i, rule in enumerate(parsed)]
    rows = spark.createDataFrame(table).select("sku", *columns).collect()
    assert len(rows) == len(FACTS)
    for i, rule in enumerate(parsed):
        found = {row.sku for row in rows if row[f"r{i}"]}
        assert found == {sku for sku, facts in enumerate(FACTS) if rule.holds(facts)}, RULES[i]
        assert all(row[f"r{i}"] is not None for row in rows)


@pytest.fixture
def shop(redis_url: str, prefix: str) -> Iterator[None]:
    """The topics of the example project in the Redis of the tests."""
    with override_settings(RMQ={**settings.RMQ, "REDIS": redis_url, "KEY_PREFIX": prefix}):
        yield
        connections.close()


@pytest.fixture
def flow(
    spark: Any, shop: None, queue: Callable[..., Queue], tmp_path: Path
) -> Callable[[], tuple[Queue, Path]]:
    """Runs both queries over what is there, each from its checkpoint."""
    from example_project.selection.engine import intake, selecting

    topic = queue(TopicType.RANGE_MERGE, slots=4, slot_basis="item")

    def run() -> tuple[Queue, Path]:
        feeding = intake(spark, tmp_path / "feeds", {**topic.options, "timeRange": "1ms"})
        choosing = selecting(spark, topic.options)
        for name, query in (("intake", feeding), ("selection", choosing)):
            started = (
                query.option("checkpointLocation", str(tmp_path / name)).trigger(availableNow=True).start()
            )
            assert started.awaitTermination(240)
        return topic, tmp_path / "feeds"

    return run


@pytest.mark.django_db(transaction=True)
def test_reports_about_the_items_of_key_accounts_are_due_first(
    spark: Any, shop: None, queue: Callable[..., Queue], tmp_path: Path
) -> None:
    from example_project.selection.engine import intake

    seller = Shop.objects.create(id=1, name="Harbour & Sons", grade=Grade.KEY_ACCOUNT)
    Product.objects.create(sku=2, name="Mug", shop=seller, price=1)
    topic = queue(TopicType.RANGE_MERGE, slots=4, slot_basis="item")
    Feeds(tmp_path / "feeds", items=3, seed=1).report_all()
    query = intake(spark, tmp_path / "feeds", {**topic.options, "timeRange": "1m"})
    started = query.option("checkpointLocation", str(tmp_path / "intake")).trigger(availableNow=True).start()
    assert started.awaitTermination(240)
    pages = topic.each("peek", "store")
    due = sorted((entry.score, entry.member) for page in pages for entry in page.entries)
    assert due[0][1] == b'{"item":2}'
    assert len(due) == 3 and due[1][0] - due[0][0] > 30_000


def forget_newest(log: Path) -> None:
    """Take the record of the newest batch out of a log of Spark's."""
    newest = max(int(path.name) for path in log.iterdir() if path.name.isdigit())
    for path in (log / str(newest), log / f".{newest}.crc"):
        path.unlink(missing_ok=True)


@pytest.mark.django_db(transaction=True)
def test_events_become_members_and_every_count_agrees(
    flow: Callable[[], tuple[Queue, Path]], tmp_path: Path
) -> None:
    for i, rule in enumerate(
        ("price < 50 and stock >= 5", 'title contains "mug"', "not rating > 4 or stock = 0")
    ):
        ProductSet.objects.create(name=f"set {i}", rule=rule)
    feeds = Feeds(tmp_path / "feeds", items=300, seed=1)
    feeds.report_all()
    feeds.report_changes(2_000)
    topic, folder = flow()
    assert differing_sets() == {}
    assert {sku: item.facts for sku, item in Item.objects.in_bulk().items()} == {
        sku: {**facts, "title": facts["title"].casefold()} for sku, facts in feeds.latest.items()
    }
    taken = Batch.objects.filter(work=Work.INTAKE)
    assert sum(taken.values_list("rows", flat=True)) == feeds.written.total() == 4 * 300 + 2_000
    # What four sources say of an item is one message.
    assert topic.total("stored") == 300
    selected = Batch.objects.filter(work=Work.SELECTION)
    assert sum(selected.values_list("rows", flat=True)) == topic.total("claimed") == topic.total("stored")
    assert 0 < Member.objects.count() == sum(ProductSet.objects.values_list("joined", flat=True))
    # Each was sent on with its batch, and the labels follow.
    assert Change.objects.count() == drain(changes.TOPIC, live=True) == Label.objects.count()
    assert differing_labels() == set()
    for change in Change.objects.select_related("item", "product_set"):
        why = rules.reason(change.product_set.parsed, change.item.facts)
        assert (change.joined, change.why) == (True, why)

    # What Spark had not noted as committed is not written again.
    before = list(Batch.objects.values_list("query", "number", "rows").order_by("id"))
    forget_newest(tmp_path / "intake" / "commits")
    sent = topic.total("sent")
    # Late, wrong, and good.
    catalogue, suppliers, warehouse, _ = SOURCES
    write_file(folder, suppliers, "late", [(1, 1, Decimal("0.01"))])
    write_file(folder, warehouse, "wrong", [(2, 2**60, -1), (0, 2**60, 1), (3, 2**60, "many"), ("", "", "")])
    write_file(folder, catalogue, "new", [(301, 1, "Last Mug"), (302, 1, "x" * 81)])
    # As an older version has sent them.
    topic.send([{"item": 2, "source": "suppliers"}], time_range=1)
    flow()
    assert selected.latest("id").unusable == 0
    assert list(Batch.objects.values_list("query", "number", "rows").order_by("id"))[: len(before)] == before
    assert topic.total("sent") > sent + 4
    assert Item.objects.get(sku=1).price == feeds.latest[1]["price"]
    assert Item.objects.get(sku=2).stock == feeds.latest[2]["stock"]
    assert not Item.objects.filter(sku=302).exists()
    assert set(map(str, Member.objects.filter(item=301))) == {
        "301 Last Mug in set 1",
        "301 Last Mug in set 2",
    }
    fresh = Batch.objects.filter(work=Work.INTAKE).latest("id")
    assert (fresh.rows, fresh.unusable, fresh.items) == (7, 5, 4)
    assert differing_sets() == {}
    assert topic.depth("store") == 0

    # A batch that was acknowledged is never replayed: as it would have no rows, sinks would replace what they have by nothing.
    forget_newest(tmp_path / "selection" / "commits")
    with pytest.raises(Exception, match="Start with a new checkpoint"):
        flow()
