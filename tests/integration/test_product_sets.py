"""The product sets of the example project without Spark: items, members, labels, and their pages."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from django.test import Client

from django_rmq.conf import get_config
from django_rmq.core.model.body_codec import decode_body
from django_rmq.exceptions import InvalidRequest
from django_rmq.models import OutboxMessage
from django_rmq.outbox.relay import relay
from django_rmq.spark.pipelines import Context, pipelines
from django_rmq.testing import clock_from_now, drain, memory_broker
from example_project.prices.models import PRIORITIES, Grade, Product, Shop
from example_project.product_sets.feeds import Feeds
from example_project.product_sets.models import Batch, Item, Label, Member, ProductSet
from example_project.product_sets.sets import (
    CHANGES,
    MEMBERSHIPS,
    Evaluation,
    Event,
    create_first_sets,
    delete_set,
    differing_labels,
    differing_members,
    save_set,
    update_labels,
    write_evaluation,
    write_events,
)
from tests.support.sends import entries

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def broker() -> Iterator[None]:
    with memory_broker(clock_from_now()):
        yield


@pytest.fixture
def cheap() -> ProductSet:
    """A set of ten items that do not belong to it yet."""
    Item.objects.bulk_create(
        Item(sku=sku, title=f"Mug {sku}", price=Decimal(sku), stock=sku % 3) for sku in range(1, 11)
    )
    return ProductSet.objects.create(name="cheap", max_price=4)


def waiting(name: str) -> list[tuple[dict[str, Any], float]]:
    """The bodies and scores of the messages that wait in a topic."""
    topic = get_config().topic(name)
    found = [(decode_body(topic, entry.member), entry.score) for entry in entries(name)]
    return sorted(found, key=lambda pair: pair[0]["item"])


def waiting_items(name: str) -> list[int]:
    return [body["item"] for body, _ in waiting(name)]


def evaluated(product_set: ProductSet, *skus: int, items: Collection[int] = range(1, 11)) -> Evaluation:
    product_set.refresh_from_db()
    return Evaluation(items, {product_set.pk: product_set.revision}, {product_set.pk: set(skus)})


def test_the_newest_event_counts_whenever_it_comes() -> None:
    first = [Event("price", 1, 10, "9.99"), Event("stock", 1, 5, "3"), Event("rating", 2, 1, "4.5")]
    assert write_events(first) == 0
    assert write_events([Event("price", 1, 9, "1.00"), Event("stock", 1, 6, "0")]) == 0
    # As after a crash.
    assert write_events(first) == 0
    item = Item.objects.get(sku=1)
    assert (item.price, item.stock, item.rating, item.title) == (Decimal("9.99"), 0, None, "")
    assert Item.objects.get(sku=2).rating == Decimal("4.5")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("price", "-1"),
        ("price", "cheap"),
        ("price", ""),
        ("price", "12345678.00"),
        ("stock", "1.5"),
        ("rating", "99"),
        ("title", "x" * 81),
    ],
)
def test_a_value_that_an_item_cannot_have_is_counted_and_left_out(field: str, value: str) -> None:
    assert write_events([Event(field, 1, 1, value), Event("stock", 2, 1, "7")]) == 1
    assert [item.sku for item in Item.objects.all()] == [2]


def test_feeds_know_what_they_have_written(tmp_path: Path) -> None:
    feeds = Feeds(tmp_path, items=20, seed=3)
    feeds.report_all()
    feeds.report_changes(100)
    lines = sum(len(path.read_text().splitlines()) for path in tmp_path.iterdir())
    assert lines == feeds.written == 4 * 20 + 100
    assert all(len(values) == 4 for values in feeds.latest.values())


def test_new_bounds_have_all_items_evaluated_and_a_new_name_none(cheap: ProductSet) -> None:
    cheap.name = "very cheap"
    save_set(cheap)
    assert not waiting(CHANGES)
    cheap.max_price = Decimal(3)
    save_set(cheap)
    save_set(ProductSet(name="dear", min_rating=5))
    # The messages of both changes merge.
    assert waiting_items(CHANGES) == list(range(1, 11))
    cheap.refresh_from_db()
    assert cheap.revision == 2


def test_members_follow_an_evaluation_of_its_items_alone(cheap: ProductSet) -> None:
    assert write_evaluation("q", 0, evaluated(cheap, 1, 2, 3, 4), rows=12)
    assert differing_members() == {}
    Item.objects.filter(sku=1).update(price=50)
    Item.objects.filter(sku=9).update(price=1)
    assert differing_members() == {"cheap": {1, 9}}
    assert write_evaluation("q", 1, evaluated(cheap, 9, 999, items=[1, 9, 999]), rows=3)
    assert differing_members() == {}
    cheap.refresh_from_db()
    assert (cheap.joined, cheap.left, cheap.members.count()) == (5, 1, 4)


def test_a_batch_that_comes_again_is_not_written_again(cheap: ProductSet) -> None:
    assert write_evaluation("q", 0, evaluated(cheap, 1, 2), rows=10)
    assert not write_evaluation("q", 0, evaluated(cheap, 5, 6), rows=10)
    assert set(Member.objects.values_list("item_id", flat=True)) == {1, 2}
    assert write_evaluation("another checkpoint", 0, evaluated(cheap, 5), rows=10)


def test_an_evaluation_by_older_bounds_is_not_written(cheap: ProductSet) -> None:
    old = evaluated(cheap, 1, 2, 3, 4)
    cheap.max_price = Decimal(2)
    save_set(cheap)
    assert write_evaluation("q", 0, old, rows=10)
    newer = evaluated(cheap, 1)
    cheap.delete()
    assert write_evaluation("q", 1, newer, rows=10)
    assert not Member.objects.exists()


def test_a_value_that_nobody_has_reported_is_within_no_bound() -> None:
    item = Item(sku=1, title="Tall Mug")
    assert ProductSet(title_contains="mug").holds(item)
    assert not any(ProductSet(**bound).holds(item) for bound in ({"max_price": 1}, {"min_stock": 0}))
    assert not ProductSet(title_contains="lamp").holds(item)


def test_a_first_start_has_sets_and_a_second_one_leaves_them() -> None:
    create_first_sets()
    names = set(ProductSet.objects.values_list("name", flat=True))
    ProductSet.objects.filter(name="Best rated").delete()
    create_first_sets()
    assert set(ProductSet.objects.values_list("name", flat=True)) == names - {"Best rated"}


def test_a_transaction_that_is_rolled_back_sends_nothing(cheap: ProductSet) -> None:
    interrupted = mock.patch.object(Batch.objects, "create", side_effect=InterruptedError)
    with interrupted, pytest.raises(InterruptedError):
        write_evaluation("q", 0, evaluated(cheap, 1, 2), rows=10)
    assert not Member.objects.exists() and not OutboxMessage.objects.exists() and not waiting(MEMBERSHIPS)


def test_a_worker_sends_what_the_driver_committed_and_did_not_send(cheap: ProductSet) -> None:
    with mock.patch("django_rmq.sending.on_commit._flush"):
        write_evaluation("q", 0, evaluated(cheap, 1, 2), rows=10)
    assert not write_evaluation("q", 0, evaluated(cheap, 1, 2), rows=10)
    assert not waiting(MEMBERSHIPS)
    OutboxMessage.objects.update(due_ms=1)
    relay("default")
    assert waiting_items(MEMBERSHIPS) == [1, 2]
    assert not OutboxMessage.objects.exists()


def test_labels_follow_the_members_by_messages_alone(cheap: ProductSet) -> None:
    write_evaluation("q", 0, evaluated(cheap, 1, 2, 3), rows=10)
    assert not Label.objects.exists() and differing_labels() == {(sku, cheap.pk) for sku in (1, 2, 3)}
    assert drain(MEMBERSHIPS) == 3
    write_evaluation("q", 1, evaluated(cheap, 2, 4), rows=10)
    assert differing_labels() == {(sku, cheap.pk) for sku in (1, 3, 4)}
    assert drain(MEMBERSHIPS) == 3
    assert set(Label.objects.values_list("item_id", flat=True)) == {2, 4}
    # A message that comes late or twice, or names what does not exist, changes nothing.
    update_labels({(1, cheap.pk), (2, cheap.pk), (1, 999), (999, cheap.pk)})
    assert differing_labels() == set()


def test_the_items_of_key_accounts_come_first(cheap: ProductSet) -> None:
    for number, grade in enumerate(Grade, start=1):
        shop = Shop.objects.create(id=number, name=grade.label, grade=grade)
        Product.objects.create(sku=number, name="Mug", shop=shop, price=1)
    write_evaluation("q", 0, evaluated(cheap, 1, 2, 3, 4), rows=10)
    priorities = [PRIORITIES[grade] for grade in (*Grade, Grade.SMALL)]
    assert waiting(MEMBERSHIPS) == [
        ({"item": item, "set": cheap.pk}, priority) for item, priority in enumerate(priorities, start=1)
    ]
    assert PRIORITIES[Grade.KEY_ACCOUNT] > PRIORITIES[Grade.STANDARD]


def test_the_members_of_a_deleted_set_leave_it(cheap: ProductSet) -> None:
    write_evaluation("q", 0, evaluated(cheap, 1, 2), rows=10)
    drain(MEMBERSHIPS)
    delete_set(cheap)
    assert waiting_items(MEMBERSHIPS) == [1, 2]
    assert drain(MEMBERSHIPS) == 2
    assert not Label.objects.exists()


def test_a_spark_elsewhere_cannot_write_to_this_database() -> None:
    context = Context("product-sets", remote="sc://127.0.0.1:15002")
    with pytest.raises(InvalidRequest, match="use --master instead of --remote"):
        pipelines()["product-sets"]().run(context)


def test_the_page_lists_the_sets_with_their_newest_members(cheap: ProductSet, client: Client) -> None:
    assert "No members yet." in client.get("/sets/").content.decode()
    write_evaluation("q", 0, evaluated(cheap, 1, 2, 3), rows=10)
    drain(MEMBERSHIPS)
    write_evaluation("q", 1, evaluated(cheap, 2, 3, 4), rows=10)
    part = client.get("/sets/").content.decode()
    assert "<b>3</b> items · 4 joined · 1 left · max price 4.00" in part
    assert "<td>4 Mug 4</td>" in part
    assert (part.count("<td>yes</td>"), part.count(">waiting<")) == (2, 1)


def test_a_set_is_edited_in_the_admin(cheap: ProductSet, admin_client: Client) -> None:
    write_evaluation("q", 0, evaluated(cheap, 1, 2, 3, 4), rows=10)
    change = f"/admin/product_sets/productset/{cheap.pk}/change/"
    assert admin_client.post(change, {"name": "cheap", "max_price": "low"}).status_code == 200
    assert not waiting(CHANGES)
    assert admin_client.post(change, {"name": "cheap", "max_price": "3"}).status_code == 302
    assert len(waiting(CHANGES)) == 10
    cheap.refresh_from_db()
    # What Spark wrote while the form was open is still there.
    assert (cheap.max_price, cheap.revision, cheap.joined) == (Decimal(3), 2, 4)


def test_all_items_are_evaluated_again_on_request(cheap: ProductSet, admin_client: Client) -> None:
    form = {"action": "evaluate", "_selected_action": cheap.pk}
    page = admin_client.post("/admin/product_sets/productset/", form, follow=True).content.decode()
    assert "10 items will be evaluated again" in page
    assert len(waiting(CHANGES)) == 10
