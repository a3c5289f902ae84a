"""The product sets of the example project on a real Spark: the same sets as in plain Python, and every count agrees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.test import override_settings

from django_rmq import connections
from django_rmq.core.model.topic import TopicType
from django_rmq.testing import drain
from example_project.product_sets.feeds import Feeds, write_file
from example_project.product_sets.models import Batch, Item, Label, Member, ProductSet
from example_project.product_sets.sets import (
    EVALUATION,
    INTAKE,
    MEMBERSHIPS,
    differing_labels,
    differing_members,
)
from tests.spark.conftest import Queue

SETS: list[dict[str, Any]] = [
    {},
    {"max_price": "19.99"},
    {"min_stock": 0},
    {"min_stock": 5, "min_rating": "3.5"},
    {"title_contains": "MUG"},
    {"title_contains": "%"},
    {"title_contains": "\\", "max_price": "9999999.99"},
]
ITEMS = [
    {"price": price, "stock": stock, "rating": rating, "title": title}
    for price in (None, Decimal("0.00"), Decimal("19.99"), Decimal("20.00"), Decimal("9999999.99"))
    for stock in (None, 0, 5, 2**31 - 1)
    for rating in (None, Decimal("3.5"), Decimal("4.6"))
    for title in ("", "Amber Tall Mug", "100% _a_ \\")
]


@pytest.mark.django_db(transaction=True)
def test_spark_and_plain_python_choose_the_same_items(spark: Any) -> None:
    from example_project.product_sets.queries import evaluate

    Item.objects.bulk_create(Item(sku=sku, **values) for sku, values in enumerate(ITEMS, start=1))
    for number, bounds in enumerate(SETS):
        ProductSet.objects.create(name=f"set {number}", **bounds)
    found = evaluate(spark, list(range(1, len(ITEMS) + 10)))
    assert set(found.items) == set(range(1, len(ITEMS) + 1))
    items = list(Item.objects.all())
    for product_set in ProductSet.objects.all():
        belonging = {item.sku for item in items if product_set.holds(item)}
        assert found.belonging[product_set.pk] == belonging, product_set.rule


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
    from example_project.product_sets.queries import evaluation, intake

    topic = queue(TopicType.RANGE_MERGE, slots=4, slot_basis="item")

    def run() -> tuple[Queue, Path]:
        reading = intake(spark, tmp_path / "feeds", {**topic.options, "timeRange": "1ms"})
        consuming = evaluation(spark, topic.options)
        for name, query in ((INTAKE, reading), (EVALUATION, consuming)):
            started = query.option("checkpointLocation", str(tmp_path / name)).trigger(availableNow=True)
            assert started.start().awaitTermination(240)
        return topic, tmp_path / "feeds"

    return run


def forget_newest(log: Path) -> None:
    """Take the record of the newest batch out of a log of Spark's."""
    newest = max(int(path.name) for path in log.iterdir() if path.name.isdigit())
    for path in (log / str(newest), log / f".{newest}.crc"):
        path.unlink(missing_ok=True)


@pytest.mark.django_db(transaction=True)
def test_events_become_members_and_every_count_agrees(
    flow: Callable[[], tuple[Queue, Path]], tmp_path: Path
) -> None:
    ProductSet.objects.create(name="cheap", max_price=50, min_stock=5)
    ProductSet.objects.create(name="mugs", title_contains="mug")
    feeds = Feeds(tmp_path / "feeds", items=60, seed=1)
    feeds.report_all()
    feeds.report_changes(300)
    topic, folder = flow()
    assert differing_members() == {}
    items = Item.objects.in_bulk()
    assert feeds.latest == {
        sku: {field: getattr(items[sku], field) for field in values} for sku, values in feeds.latest.items()
    }
    read = Batch.objects.filter(work=INTAKE)
    assert sum(read.values_list("rows", flat=True)) == feeds.written == 4 * 60 + 300
    # All events of an item are one message.
    assert topic.total("stored") == 60
    consumed = Batch.objects.filter(work=EVALUATION)
    assert sum(consumed.values_list("rows", flat=True)) == topic.total("claimed") == topic.total("stored")
    assert 0 < Member.objects.count() == sum(ProductSet.objects.values_list("joined", flat=True))
    # Each membership was sent with its batch, and the labels follow.
    assert Member.objects.count() == drain(MEMBERSHIPS, live=True) == Label.objects.count()
    assert differing_labels() == set()

    # What Spark had not noted as committed is not written again.
    before = list(Batch.objects.values_list("query", "number", "rows").order_by("id"))
    forget_newest(tmp_path / INTAKE / "commits")
    sent = topic.total("sent")
    # Late, wrong, and good.
    write_file(folder, "late", [("price", 1, 1, "0.01")])
    write_file(
        folder,
        "wrong",
        [("stock", 2, 2**60, -1), ("stock", 0, 2**60, 1), ("stock", 3, 2**60, "many"), ("size", 4, 1, 1)],
    )
    write_file(folder, "new", [("title", 61, 1, "Last Mug"), ("title", 62, 1, "x" * 81)])
    (folder / "broken.json").write_text("{\n")
    flow()
    assert consumed.latest("id").unusable == 0
    assert list(Batch.objects.values_list("query", "number", "rows").order_by("id"))[: len(before)] == before
    assert topic.total("sent") > sent + 4
    assert Item.objects.get(sku=1).price == feeds.latest[1]["price"]
    assert Item.objects.get(sku=2).stock == feeds.latest[2]["stock"]
    assert not Item.objects.filter(sku=62).exists()
    assert set(map(str, Member.objects.filter(item=61))) == {"61 Last Mug in mugs"}
    newest = read.latest("id")
    assert (newest.rows, newest.unusable) == (8, 6)
    assert differing_members() == {}
    assert topic.depth("store") == 0

    # A batch that was acknowledged is never replayed: as it would have no rows, sinks would replace what they have by nothing.
    forget_newest(tmp_path / EVALUATION / "commits")
    with pytest.raises(Exception, match="Start with a new checkpoint"):
        flow()
