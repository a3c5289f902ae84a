"""Joining and leaving sets in the example project: what is noted, sent on and shown, without Spark."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import Any
from unittest import mock

import pytest
from django.db import transaction
from django.test import Client

from django_rmq.conf import get_config
from django_rmq.connections import get_broker
from django_rmq.core.model.body_codec import decode_body
from django_rmq.models import OutboxMessage
from django_rmq.outbox.relay import relay
from django_rmq.testing import clock_from_now, drain, memory_broker
from example_project.prices.models import Grade, Product, Shop
from example_project.selection import changes
from example_project.selection.changes import TOPIC, differing_labels, relabel
from example_project.selection.models import Change, Item, Label, Member, ProductSet
from example_project.selection.sets import Evaluation, delete_set, evaluate_all, save_set, settle
from tests.brokers import direct

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
    return ProductSet.objects.create(name="cheap", rule="price < 5 and not stock = 9")


def evaluated(product_set: ProductSet, *skus: int) -> Evaluation:
    facts = {item.sku: item.facts for item in Item.objects.all()}
    product_set.refresh_from_db()
    return Evaluation(list(facts), {product_set.pk: product_set.revision}, {product_set.pk: set(skus)}, facts)


def waiting() -> dict[tuple[int, int], float]:
    """(item, set) of the messages that wait -> their priorities."""
    topic, broker = get_config().topic(TOPIC), direct(get_broker())
    found = {}
    for slot in range(topic.slots):
        for entry in broker.peek(topic, slot, "store").entries:
            body = decode_body(topic, entry.member)
            found[body["item"], body["set"]] = entry.score
    return found


def test_whoever_joins_or_leaves_is_noted_with_the_reason_and_sent_on(cheap: ProductSet) -> None:
    settle("q", 0, evaluated(cheap, 1, 2), rows=10)
    settle("q", 1, evaluated(cheap, 2, 3), rows=10)
    noted = [(change.item_id, change.joined, change.why) for change in Change.objects.order_by("pk")]
    assert noted == [
        (1, True, "price 1.00, stock 1"),
        (2, True, "price 2.00, stock 2"),
        (3, True, "price 3.00, stock 0"),
        (1, False, "price 1.00, stock 1"),
    ]
    assert str(Change.objects.first()) == "1 Mug 1 left cheap"
    # Item 1 has joined and left: one message, which says neither.
    assert set(waiting()) == {(1, cheap.pk), (2, cheap.pk), (3, cheap.pk)}


def test_what_nobody_has_told_is_a_reason_too(cheap: ProductSet) -> None:
    cheap.rule = "rating is not known or title starts with 'a'"
    save_set(cheap)
    settle("q", 0, evaluated(cheap, 1), rows=10)
    assert Change.objects.get().why == "no rating, title mug 1"


def test_a_transaction_that_is_rolled_back_sends_nothing(cheap: ProductSet) -> None:
    with (
        mock.patch("example_project.selection.sets.note", side_effect=InterruptedError),
        pytest.raises(InterruptedError),
    ):
        settle("q", 0, evaluated(cheap, 1, 2), rows=10)
    assert not Member.objects.exists() and not Change.objects.exists()
    assert not OutboxMessage.objects.exists() and not waiting()


def test_what_a_driver_did_not_live_to_send_is_sent_by_a_worker(cheap: ProductSet) -> None:
    # It dies between the commit and the send; the batch that is done again then finds that it has been written.
    with mock.patch("django_rmq.sending.on_commit._flush"):
        settle("q", 0, evaluated(cheap, 1, 2), rows=10)
    assert settle("q", 0, evaluated(cheap, 1, 2), rows=10) is None
    assert not waiting()
    OutboxMessage.objects.update(due_ms=1)
    relay("default")
    assert set(waiting()) == {(1, cheap.pk), (2, cheap.pk)}
    assert not OutboxMessage.objects.exists()


def test_labels_follow_the_members_by_messages_alone(cheap: ProductSet) -> None:
    settle("q", 0, evaluated(cheap, 1, 2, 3), rows=10)
    assert not Label.objects.exists() and differing_labels() == {(sku, cheap.pk) for sku in (1, 2, 3)}
    assert drain(TOPIC) == 3
    settle("q", 1, evaluated(cheap, 2, 4), rows=10)
    assert differing_labels() == {(sku, cheap.pk) for sku in (1, 3, 4)}
    assert drain(TOPIC) == 3
    assert set(Label.objects.values_list("item_id", flat=True)) == {2, 4}
    assert str(Label.objects.get(item=2)) == "2 Mug 2 labelled cheap"
    assert differing_labels() == set()
    assert all(change.seconds is not None for change in Change.objects.all())


def test_a_message_that_comes_twice_or_late_changes_nothing(cheap: ProductSet) -> None:
    settle("q", 0, evaluated(cheap, 1, 2), rows=10)
    drain(TOPIC)
    before = list(Label.objects.values_list()), list(Change.objects.values_list())
    relabel({(1, cheap.pk), (2, cheap.pk), (3, cheap.pk), (1, 999), (999, cheap.pk)})
    assert (list(Label.objects.values_list()), list(Change.objects.values_list())) == before


def test_a_message_is_about_its_item_in_its_set_alone(cheap: ProductSet) -> None:
    dear = ProductSet.objects.create(name="dear", rule="price > 5")
    settle("q", 0, evaluated(cheap, 1, 2), rows=10)
    settle("q", 1, evaluated(dear, 1, 2), rows=10)
    relabel({(1, cheap.pk), (2, dear.pk)})
    assert set(Label.objects.values_list("item_id", "product_set_id")) == {(1, cheap.pk), (2, dear.pk)}
    assert set(Change.objects.filter(labelled_at=None).values_list("item_id", "product_set_id")) == {
        (2, cheap.pk),
        (1, dear.pk),
    }


def test_the_items_of_key_accounts_come_first(cheap: ProductSet) -> None:
    for number, grade in enumerate(Grade, start=1):
        shop = Shop.objects.create(id=number, name=grade.label, grade=grade)
        Product.objects.create(sku=number, name="Mug", shop=shop, price=1)
    settle("q", 0, evaluated(cheap, 1, 2, 3, 4), rows=10)
    assert waiting() == {
        (1, cheap.pk): changes.PRIORITIES[Grade.KEY_ACCOUNT],
        (2, cheap.pk): changes.PRIORITIES[Grade.STANDARD],
        (3, cheap.pk): changes.PRIORITIES[Grade.SMALL],
        (4, cheap.pk): changes.PRIORITIES[Grade.SMALL],
    }
    assert changes.PRIORITIES[Grade.KEY_ACCOUNT] > changes.PRIORITIES[Grade.STANDARD]


def test_changes_of_key_accounts_are_collected_for_less_time(cheap: ProductSet) -> None:
    shops = [Shop.objects.create(id=pk, name=f"{pk}", grade=grade) for pk, grade in enumerate(Grade, start=1)]
    Product.objects.bulk_create(
        Product(sku=sku, name="Mug", shop=shop, price=1) for sku, shop in enumerate(shops, start=1)
    )
    evaluate_all()
    topic, broker = get_config().topic("selection-changes"), direct(get_broker())
    entries = [entry for slot in range(topic.slots) for entry in broker.peek(topic, slot, "store").entries]
    due = {decode_body(topic, entry.member)["item"]: entry.score for entry in entries}
    assert len(due) == 10 and len(set(due.values())) == 2
    assert min(due, key=lambda sku: due[sku]) == 1
    assert due[2] - due[1] == 2000 - changes.KEY_ACCOUNT_WAIT.total_seconds() * 1000


def test_the_members_of_a_set_that_rests_or_is_deleted_leave_it(cheap: ProductSet) -> None:
    settle("q", 0, evaluated(cheap, 1, 2), rows=10)
    drain(TOPIC)
    cheap.refresh_from_db()
    cheap.active = False
    save_set(cheap)
    assert set(waiting()) == {(1, cheap.pk), (2, cheap.pk)}
    assert {change.why for change in cheap.changes.filter(joined=False)} == {"the set is not active"}
    drain(TOPIC)
    assert not Label.objects.exists()
    cheap.active = True
    save_set(cheap)
    settle("q", 1, evaluated(cheap, 3), rows=10)
    drain(TOPIC)
    pk = cheap.pk
    delete_set(cheap)
    assert set(waiting()) == {(3, pk)}
    assert drain(TOPIC) == 1
    assert not Label.objects.exists() and not Change.objects.exists()


def test_the_newest_changes_of_each_set_are_kept(cheap: ProductSet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "KEPT", 3)
    quiet = ProductSet.objects.create(name="quiet", rule="price < 5")
    settle("q", 0, evaluated(quiet, 1), rows=10)
    for number in range(1, 6):
        settle("q", number, evaluated(cheap, number), rows=10)
    newest = [(change.item_id, change.joined) for change in cheap.changes.all()]
    assert newest == [(4, False), (5, True), (3, False)]
    assert quiet.changes.count() == 1


def test_more_items_than_one_statement_takes_may_leave_at_once(
    cheap: ProductSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle("q", 0, evaluated(cheap, *range(1, 11)), rows=10)
    monkeypatch.setattr(changes, "MOST_ITEMS", 4)
    cheap.refresh_from_db()
    cheap.active = False
    save_set(cheap)
    cheap.refresh_from_db()
    assert (cheap.left, Member.objects.count(), cheap.changes.filter(joined=False).count()) == (10, 0, 10)


# --- pages


def test_the_page_lists_the_sets_with_their_last_changes(cheap: ProductSet, client: Client) -> None:
    ProductSet.objects.create(name="<b>other</b>", rule="price < 5", active=False)
    page = client.get("/sets/").content.decode()
    assert "No changes yet." in page and "&lt;b&gt;other&lt;/b&gt;" in page and "not active" in page
    settle("q", 0, evaluated(cheap, *range(1, 10)), rows=10)
    drain(TOPIC)
    settle("q", 1, evaluated(cheap, *range(1, 9)), rows=10)
    part = client.get("/sets/list/").content.decode()
    assert "<b>8</b> items · 9 joined · 1 left" in part
    assert "<td>9 Mug 9</td>" in part and "price 9.00, stock 0" in part
    assert part.count("s later") == 5 and part.count(">waiting<") == 1
    assert "Batch 1 at" in part and "<b>1</b> changes wait" in part


def test_the_page_says_so_where_there_are_no_sets(client: Client) -> None:
    assert "No product sets yet." in client.get("/sets/").content.decode()


def test_the_page_asks_a_fixed_number_of_queries_for_each_set(
    cheap: ProductSet, client: Client, django_assert_num_queries: Any
) -> None:
    settle("q", 0, evaluated(cheap, *range(1, 10)), rows=10)
    with django_assert_num_queries(4):
        client.get("/sets/list/")


def test_a_set_that_is_deleted_in_the_admin_tells_everyone(cheap: ProductSet, admin_client: Client) -> None:
    settle("q", 0, evaluated(cheap, 1), rows=10)
    drain(TOPIC)
    listing = "/admin/selection/productset/"
    form = {"action": "delete_selected", "_selected_action": cheap.pk, "post": "yes"}
    assert admin_client.post(listing, form).status_code == 302
    assert list(waiting()) == [(1, cheap.pk)]
    assert not ProductSet.objects.exists()


def test_moves_are_of_the_transaction_around_them(cheap: ProductSet) -> None:
    with transaction.atomic():
        changes.move(cheap, {1: "because"}, {})
        assert not waiting() and OutboxMessage.objects.count() == 1
    assert waiting() and not OutboxMessage.objects.exists()
