"""Items, sets and their members in the example project, without Spark; and the pages of its admin."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.exceptions import ValidationError
from django.core.management import call_command
from django.test import Client
from rich.console import Console

from django_rmq.conf import get_config
from django_rmq.connections import get_broker
from django_rmq.core.model.body_codec import decode_body
from django_rmq.exceptions import InvalidRequest
from django_rmq.pipelines import Context, pipelines
from django_rmq.testing import clock_from_now, drain, memory_broker
from example_project.selection.changes import MOST_ITEMS
from example_project.selection.facts import KEPT, Event, is_noted, note, take_in
from example_project.selection.feeds import Feeds
from example_project.selection.models import Batch, Change, Item, Label, Member, ProductSet, Work
from example_project.selection.sets import TOPIC, Evaluation, differing_sets, save_set, settle
from example_project.selection.showing import Showing
from example_project.selection.sources import SOURCES
from tests.brokers import direct

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def broker() -> Iterator[None]:
    with memory_broker(clock_from_now()):
        yield


@pytest.fixture
def items() -> None:
    Item.objects.bulk_create(
        Item(sku=sku, title=f"Mug {sku}", price=Decimal(sku), stock=sku % 3) for sku in range(1, 11)
    )


def waiting() -> list[dict[str, Any]]:
    """The bodies in the topic, by item."""
    topic = get_config().topic(TOPIC)
    bodies = [
        decode_body(topic, entry.member)
        for slot in range(topic.slots)
        for entry in direct(get_broker()).peek(topic, slot, "store").entries
    ]
    return sorted(bodies, key=lambda body: body["item"])


def evaluated(product_set: ProductSet, *skus: int, looked_at: Any = range(1, 11)) -> Evaluation:
    facts = {item.sku: item.facts for item in Item.objects.filter(sku__in=looked_at)}
    return Evaluation(looked_at, {product_set.pk: product_set.revision}, {product_set.pk: set(skus)}, facts)


# --- facts


def test_the_newest_event_of_a_source_counts_whenever_it_comes() -> None:
    first = [
        Event("suppliers", 1, 10, "9.99"),
        Event("warehouse", 1, 5, "3"),
        Event("reviews", 2, 1, "4.5"),
    ]
    assert take_in(first) == 0
    assert take_in([Event("suppliers", 1, 9, "1.00"), Event("warehouse", 1, 6, "0")]) == 0
    # As after a crash.
    assert take_in(first) == 0
    item = Item.objects.get(sku=1)
    assert (item.price, item.stock, item.rating, item.title) == (Decimal("9.99"), 0, None, "")
    assert item.facts == {"price": Decimal("9.99"), "stock": 0, "rating": None, "title": None}
    assert Item.objects.get(sku=2).rating == Decimal("4.5")


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("suppliers", "-1"),
        ("suppliers", "cheap"),
        ("suppliers", ""),
        ("suppliers", "12345678.00"),
        ("warehouse", "-1"),
        ("warehouse", "1.5"),
        ("reviews", "99"),
        ("catalogue", "x" * 81),
    ],
)
def test_a_value_that_an_item_cannot_have_is_counted_and_left_out(source: str, value: str) -> None:
    assert take_in([Event(source, 1, 1, value), Event("warehouse", 2, 1, "7")]) == 1
    assert [item.sku for item in Item.objects.all()] == [2]


def test_batches_are_known_by_query_and_number_and_old_ones_are_forgotten() -> None:
    for query, number in (("q", 0), ("other", 0), ("q", 1), ("q", KEPT + 1)):
        assert not is_noted(query, number)
        note(query, number, work=Work.INTAKE, rows=1, items=1)
        assert is_noted(query, number)
    assert not is_noted("q", 0)
    assert is_noted("q", 1) and is_noted("other", 0)


def test_feeds_tell_what_they_have_written(tmp_path: Path) -> None:
    feeds = Feeds(tmp_path, items=20, seed=3)
    feeds.report_all()
    feeds.report_changes(100)
    files = {source.name: list(source.folder(tmp_path).iterdir()) for source in SOURCES}
    lines = {name: sum(len(path.read_text().splitlines()) for path in paths) for name, paths in files.items()}
    assert lines == feeds.written
    assert feeds.written.total() == 4 * 20 + 100
    assert all(len(facts) == 4 for facts in feeds.latest.values())


# --- sets


def test_a_new_rule_has_all_items_looked_at_and_one_that_stays_none(items: None) -> None:
    product_set = ProductSet(name="cheap", rule="price < 5")
    save_set(product_set)
    # The body of a report, whichever source it is of: so it merges with that.
    assert waiting() == [{"item": sku} for sku in range(1, 11)]
    save_set(ProductSet(name="dear", rule="price > 5"))
    assert len(waiting()) == 10
    topic = get_config().topic(TOPIC)
    for slot in range(topic.slots):
        direct(get_broker()).purge(topic, slot, "store")
    product_set.name = "very cheap"
    save_set(product_set)
    assert not waiting()
    product_set.rule = "price < 4"
    save_set(product_set)
    assert len(waiting()) == 10
    product_set.refresh_from_db()
    assert product_set.revision == 2


def test_a_rule_that_cannot_be_read_is_not_saved(items: None) -> None:
    with pytest.raises(ValidationError, match="Expected one of price"):
        save_set(ProductSet(name="bad", rule="exec('x')"))
    assert not ProductSet.objects.exists() and not waiting()


def test_members_follow_an_evaluation_and_only_of_the_items_it_looked_at(items: None) -> None:
    product_set = ProductSet.objects.create(name="cheap", rule="price < 5")
    batch = settle("q", 0, evaluated(product_set, 1, 2, 3, 4), rows=12)
    assert batch is not None and (batch.items, batch.joined, batch.left) == (10, 4, 0)
    assert differing_sets() == {}
    since = Member.objects.get(item=2).since
    Item.objects.filter(sku=1).update(price=50)
    Item.objects.filter(sku=9).update(price=1)
    assert differing_sets() == {"cheap": ({9}, {1})}
    batch = settle("q", 1, evaluated(product_set, 9, looked_at=[1, 9]), rows=2)
    assert batch is not None and (batch.items, batch.joined, batch.left) == (2, 1, 1)
    assert differing_sets() == {}
    assert Member.objects.get(item=2).since == since
    product_set.refresh_from_db()
    assert (product_set.joined, product_set.left, product_set.members.count()) == (5, 1, 4)


def test_a_batch_that_comes_again_is_not_written_again(items: None) -> None:
    product_set = ProductSet.objects.create(name="cheap", rule="price < 5")
    assert settle("q", 0, evaluated(product_set, 1, 2), rows=10)
    assert settle("q", 0, evaluated(product_set, 5, 6), rows=10) is None
    assert set(Member.objects.values_list("item_id", flat=True)) == {1, 2}
    assert settle("another checkpoint", 0, evaluated(product_set, 5), rows=10)


def test_an_evaluation_by_an_older_rule_is_not_written(items: None) -> None:
    product_set = ProductSet.objects.create(name="cheap", rule="price < 5")
    old = evaluated(product_set, 1, 2, 3, 4)
    product_set.rule = "price < 2"
    save_set(product_set)
    batch = settle("q", 0, old, rows=10)
    assert batch is not None and batch.joined == 0
    gone = evaluated(product_set, 1)
    product_set.active = False
    save_set(product_set)
    settle("q", 1, gone, rows=10)
    product_set.delete()
    settle("q", 2, gone, rows=10)
    assert not Member.objects.exists()


def test_a_set_that_is_put_to_rest_has_no_members(items: None) -> None:
    product_set = ProductSet.objects.create(name="cheap", rule="price < 5")
    settle("q", 0, evaluated(product_set, 1, 2, 3, 4), rows=10)
    product_set.refresh_from_db()
    product_set.active = False
    save_set(product_set)
    product_set.refresh_from_db()
    assert (product_set.members.count(), product_set.left) == (0, 4)
    assert differing_sets() == {}
    product_set.active = True
    save_set(product_set)
    assert len(waiting()) == 10


def test_items_that_nobody_knows_join_nothing(items: None) -> None:
    product_set = ProductSet.objects.create(name="cheap", rule="price < 5")
    batch = settle("q", 0, evaluated(product_set, 1, 999, looked_at=[1, 999]), rows=2)
    assert batch is not None and (batch.items, batch.joined) == (1, 1)


@pytest.mark.slow
def test_a_batch_as_large_as_they_come_may_leave_whole() -> None:
    skus = range(1, MOST_ITEMS + 1)
    Item.objects.bulk_create(Item(sku=sku) for sku in skus)
    product_set = ProductSet.objects.create(name="all", rule="not price is known")
    joined = settle("q", 0, evaluated(product_set, *skus, looked_at=skus), rows=len(skus))
    left = settle("q", 1, evaluated(product_set, looked_at=skus), rows=len(skus))
    assert joined is not None and joined.joined == len(skus)
    assert left is not None and left.left == len(skus)


# --- commands


def test_a_first_start_has_sets_and_a_second_one_leaves_them(tmp_path: Path) -> None:
    call_command("seed_selection", stdout=StringIO())
    assert differing_sets() == {}
    names = set(ProductSet.objects.values_list("name", flat=True))
    ProductSet.objects.filter(name="Best rated").delete()
    call_command("seed_selection", stdout=StringIO())
    assert set(ProductSet.objects.values_list("name", flat=True)) == names - {"Best rated"}


def test_feeds_may_be_written_by_hand(tmp_path: Path) -> None:
    said = StringIO()
    call_command("selection_feeds", folder=tmp_path, items=7, seconds=0, stdout=said)
    assert said.getvalue().startswith("28 events: catalogue 7, suppliers 7, warehouse 7, reviews 7")
    assert [len(list(source.folder(tmp_path).iterdir())) for source in SOURCES] == [1] * 4


def test_the_sets_are_watched_from_now_on(items: None) -> None:
    product_set = ProductSet.objects.create(name="cheap", rule='title contains "[bold]"', joined=100, left=90)
    showing = Showing()
    assert showing.rows() == [("cheap", 'title contains "[bold]"', 0, 0, 0)]
    settle("q", 0, evaluated(product_set, 1, 2, 3), rows=12)
    settle("q", 1, evaluated(product_set, 1, 2), rows=10)
    assert showing.rows() == [("cheap", 'title contains "[bold]"', 2, 3, 1)]
    console = Console(file=StringIO(), width=150)
    console.print(showing.rich_table())
    assert 'title contains "[bold]"' in console.file.getvalue()  # type: ignore[attr-defined]
    said = StringIO()
    call_command("selection", count=1, stdout=said)
    assert "cheap" in said.getvalue() and "10 messages, 10 items, 0 joined, 1 left" in said.getvalue()


def test_a_spark_elsewhere_cannot_write_to_this_database() -> None:
    context = Context("selection", remote="sc://127.0.0.1:15002")
    with pytest.raises(InvalidRequest, match="use --master instead of --remote"):
        pipelines()["selection"]().run(context)


# --- admin


@pytest.fixture
def client() -> Client:
    found = Client()
    found.force_login(User.objects.create_superuser("root"))
    return found


def test_a_rule_is_edited_in_the_admin_and_a_wrong_one_is_explained(client: Client, items: None) -> None:
    add = "/admin/selection/productset/add/"
    page = client.post(add, {"name": "cheap", "rule": "price < cheap", "active": "on"})
    assert page.status_code == 200
    assert (
        "price is compared with numbers such as 20 or 4.5, found &#x27;cheap&#x27; at character 9."
        in page.content.decode()
    )
    assert client.post(add, {"name": "cheap", "rule": "price < 5", "active": "on"}).status_code == 302
    assert len(waiting()) == 10
    product_set = ProductSet.objects.get()
    settle("q", 0, evaluated(product_set, 1, 2, 3, 4), rows=10)
    change = f"/admin/selection/productset/{product_set.pk}/change/"
    shown = client.get(change).content.decode()
    assert "4 of 10 items at this moment" in shown
    assert f'/admin/selection/member/?product_set__id__exact={product_set.pk}">4</a>' in shown
    mistaken = client.post(change, {"name": "cheap", "rule": "price <", "active": "on"}).content.decode()
    assert "found the end of the rule" in mistaken and "4 of 10 items at this moment" in mistaken
    assert client.post(change, {"name": "cheap", "rule": "price < 3", "active": "on"}).status_code == 302
    product_set.refresh_from_db()
    # What Spark wrote while the form was open is still there.
    assert (product_set.rule, product_set.revision, product_set.joined) == ("price < 3", 2, 4)


def test_all_items_are_evaluated_again_on_request(client: Client, items: None) -> None:
    product_set = ProductSet.objects.create(name="cheap", rule="price < 5")
    listing = "/admin/selection/productset/"
    answer = client.post(listing, {"action": "evaluate", "_selected_action": product_set.pk}, follow=True)
    assert "10 items will be evaluated again" in answer.content.decode()
    assert len(waiting()) == 10


def test_what_spark_writes_is_only_looked_at(client: Client, items: None) -> None:
    product_set = ProductSet.objects.create(name="cheap", rule="price < 5")
    settle("q", 0, evaluated(product_set, 1, 2, 3, 4), rows=10)
    drain("memberships")
    models: list[Any] = [Item, Member, Change, Label, Batch]
    for model in models:
        name = model.__name__.lower()
        assert client.get(f"/admin/selection/{name}/").status_code == 200
        assert client.get(f"/admin/selection/{name}/add/").status_code == 403
        pk = model.objects.first().pk
        assert client.get(f"/admin/selection/{name}/{pk}/change/").status_code == 200
        assert client.post(f"/admin/selection/{name}/{pk}/change/", {}).status_code == 403
        assert client.post(f"/admin/selection/{name}/{pk}/delete/", {"post": "yes"}).status_code == 403
    filtered = client.get(
        f"/admin/selection/member/?product_set__id__exact={product_set.pk}"
    ).content.decode()
    assert "Mug 4" in filtered
    # A set may go with its members all the same.
    assert (
        client.post(f"/admin/selection/productset/{product_set.pk}/delete/", {"post": "yes"}).status_code
        == 302
    )
    assert not Member.objects.exists()
