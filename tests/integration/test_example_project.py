from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from django.core import mail
from django.core.management import call_command
from django.test import Client
from django.utils import timezone
from PIL import Image

from django_rmq import schedules
from django_rmq.conf import get_config
from django_rmq.connections import get_broker
from django_rmq.core.model.body_codec import encode_json
from django_rmq.core.model.delivered_message import Message
from django_rmq.core.model.replies import Delivery
from django_rmq.core.producer.placement import slot_of
from django_rmq.exceptions import Reject
from django_rmq.testing import Clock, clock_from_now, drain, memory_broker
from example_project import settings as shop
from example_project.demo.accounts import Accounts
from example_project.demo.traffic import Done, resume
from example_project.orders.checkout import OutOfStock, close_order, create_order, pay_order
from example_project.orders.listeners import time_is_up, write_report
from example_project.orders.models import DailyReport, Order, State
from example_project.orders.tasks import confirm
from example_project.prices.changes import change_prices
from example_project.prices.listeners import order_renders, render
from example_project.prices.models import Grade, Photo, Product, Shop
from example_project.prices.rendering import PhotoServerBusy, render_price
from tests.support.brokers import direct
from tests.support.sends import scores, waiting

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def clock(settings: Any, tmp_path: Path) -> Iterator[Clock]:
    """The clock, which stands, of a broker in memory; and a folder for images."""
    settings.MEDIA_ROOT = tmp_path / "media"
    settings.TASKS = shop.TASKS
    standing = clock_from_now()
    with memory_broker(standing):
        yield standing


@pytest.fixture
def product(db: None) -> Product:
    shop = Shop.objects.create(id=1, name="Harbour & Sons", grade=Grade.KEY_ACCOUNT)
    return Product.objects.create(
        sku=1, name="Amber Glazed Mug", shop=shop, price=Decimal("12.50"), price_version=1
    )


def images(folder: Any) -> list[str]:
    return sorted(path.name for path in Path(folder).rglob("*") if path.is_file())


def test_a_rendered_image_shows_the_price_and_the_row_says_which(product: Product, settings: Any) -> None:
    assert render_price(product)
    product.refresh_from_db()
    assert (product.rendered_price, product.rendered_version) == (Decimal("12.50"), 1)
    assert product.rendered_at is not None
    with Image.open(product.image.path) as image:
        assert image.size == (360, 360)
        first = image.convert("RGB").tobytes()
    Product.objects.filter(sku=1).update(price=Decimal("13.50"), price_version=2)
    product.refresh_from_db()
    assert render_price(product)
    product.refresh_from_db()
    with Image.open(product.image.path) as image:
        assert image.convert("RGB").tobytes() != first
    assert images(settings.MEDIA_ROOT) == ["1-2.png"]


def test_rendering_twice_is_rendering_once(product: Product, settings: Any) -> None:
    twin = Product.objects.get(sku=1)
    assert render_price(product)
    product.refresh_from_db()
    assert not render_price(product)
    assert not render_price(twin)
    assert images(settings.MEDIA_ROOT) == ["1-1.png"]


def test_a_renderer_that_was_slow_does_not_bring_back_an_old_price(product: Product, settings: Any) -> None:
    slow = Product.objects.get(sku=1)
    Product.objects.filter(sku=1).update(price=Decimal("99.00"), price_version=2)
    assert render_price(Product.objects.get(sku=1))
    assert not render_price(slow)
    product.refresh_from_db()
    assert product.rendered_price == Decimal("99.00")
    assert images(settings.MEDIA_ROOT) == ["1-2.png"]


def message(topic: str, body: dict[str, int], retries_left: int = 16) -> Message:
    return Message(get_config().topic(topic), 0, 1, Delivery(encode_json(body), 1.0, retries_left))


def test_renders_are_asked_for_by_merchant_grade_and_one_slot_per_shop(product: Product) -> None:
    small = Shop.objects.create(id=2, name="The Odd Cup", grade=Grade.SMALL)
    for sku in (2, 3):
        Product.objects.create(sku=sku, name="Dusk Plain Bowl", shop=small, price=3)
    order_renders([message("price-changes", {"sku": sku}) for sku in (3, 1, 2)])
    topic = get_config().topic("image-renders")
    slots = [direct(get_broker()).list_messages(topic, slot, "store").entries for slot in range(topic.slots)]
    assert scores("image-renders") == {
        encode_json({"sku": 1, "shop": 1}): 500,
        encode_json({"sku": 2, "shop": 2}): 100,
        encode_json({"sku": 3, "shop": 2}): 100,
    }
    assert sorted(len(entries) for entries in slots if entries) == [1, 2]


def test_a_change_of_an_unknown_product_is_rejected_and_holds_up_nobody(product: Product) -> None:
    messages = [message("price-changes", {"sku": sku}) for sku in (404, 1)]
    order_renders(messages)
    unknown, known = (each.outcome for each in messages)
    assert known is None
    assert unknown is not None
    assert (unknown.kind, unknown.error) == ("rejected", "there is no product 404")
    assert waiting("image-renders") == [encode_json({"sku": 1, "shop": 1})]


def test_the_render_listener_fails_retries_and_rejects_as_the_photo_does(product: Product) -> None:
    def deliver(photo: Photo, retries_left: int) -> None:
        Product.objects.filter(sku=1).update(photo=photo)
        render(message("image-renders", {"sku": 1, "shop": 1}, retries_left))

    with pytest.raises(Reject, match="product 1 has no photo"):
        deliver(Photo.MISSING, 16)
    for retries_left in (16, 15):
        with pytest.raises(PhotoServerBusy):
            deliver(Photo.SLOW_DISK, retries_left)
    deliver(Photo.SLOW_DISK, 14)
    product.refresh_from_db()
    assert not product.outdated
    with pytest.raises(Reject, match="no product 404"):
        render(message("image-renders", {"sku": 404, "shop": 1}))


def test_the_timeout_listener_closes_what_is_open_and_ignores_what_is_gone(product: Product) -> None:
    order = create_order(1)
    for pk in (order.pk, order.pk, order.pk + 1):
        time_is_up(message("order-timeouts", {"order": pk}))
    order.refresh_from_db()
    assert order.state == State.CLOSED


def test_changes_within_five_seconds_are_one_image_with_the_last_price(
    product: Product, clock: Clock
) -> None:
    change_prices([(1, Decimal(20)), (1, Decimal(21))])
    clock.advance(4.999)
    change_prices([(1, Decimal(22))])
    assert drain() == 0
    clock.advance("1ms")
    assert drain("price-changes") == 1
    assert drain("image-renders") == 1
    product.refresh_from_db()
    assert product.rendered_price == Decimal(22)
    assert drain() == 0


def test_a_product_without_a_photo_is_in_dead_until_it_has_one_and_is_replayed(
    product: Product, clock: Clock
) -> None:
    Product.objects.update(photo=Photo.MISSING)
    change_prices([(1, Decimal(9))])
    clock.advance(5)
    drain()
    topic, slot = get_config().topic("image-renders"), slot_of(b"1", 16)
    (dead,) = direct(get_broker()).list_messages(topic, slot, "dead").entries
    assert dead.record is not None
    assert b"product 1 has no photo" in dead.record
    Product.objects.update(photo=Photo.GOOD)
    assert direct(get_broker()).replay(topic, slot, [dead.member]) == ["replayed"]
    drain()
    product.refresh_from_db()
    assert product.rendered_price == Decimal(9)


def test_an_unpaid_order_is_closed_at_its_time_and_not_before(product: Product, clock: Clock) -> None:
    order = create_order(1)
    paid = create_order(1)
    pay_order(paid)
    assert drain("tasks.default") == 2, "their mails"
    clock.advance(15 * 60 - 1)
    assert drain() == 0
    # The clock of the broker was read before the order's.
    clock.advance(60)
    assert drain() == 1
    order.refresh_from_db()
    paid.refresh_from_db()
    assert (order.state, paid.state) == (State.CLOSED, State.PAID)


def test_the_mail_of_an_order_is_a_task_that_sends_it_once(product: Product) -> None:
    order = create_order(1, quantity=3)
    assert mail.outbox == []
    assert drain("tasks.default") == 1
    (sent,) = mail.outbox
    assert (sent.subject, sent.to) == (f"Your order {order.pk}", [f"customer-{order.pk}@example.com"])
    assert "3 × Amber Glazed Mug: 37.50" in sent.body
    again = confirm.enqueue(order.pk)
    assert drain("tasks.default") == 1
    again.refresh()
    assert (again.return_value, len(mail.outbox)) == (False, 1)


def test_an_order_reserves_its_goods_and_has_a_message_for_its_time(product: Product) -> None:
    order = create_order(1, quantity=3)
    product.refresh_from_db()
    assert product.stock == 97
    assert order.total == Decimal("37.50")
    assert order.due_at == order.created_at + timedelta(minutes=15)
    assert waiting("order-timeouts") == [b'{"order":%d}' % order.pk]


def test_an_order_that_cannot_be_filled_leaves_neither_row_nor_message(product: Product) -> None:
    with pytest.raises(OutOfStock, match="Fewer than 101"):
        create_order(1, quantity=101)
    product.refresh_from_db()
    assert product.stock == 100
    assert not Order.objects.exists()
    assert waiting("order-timeouts") == []


def test_paying_takes_the_message_back_and_the_order_stays_paid(product: Product) -> None:
    order = create_order(1)
    assert pay_order(order)
    assert waiting("order-timeouts") == []
    assert pay_order(order)
    assert not close_order(order.pk)
    order.refresh_from_db()
    assert order.state == State.PAID
    product.refresh_from_db()
    assert product.stock == 99


def test_closing_twice_restocks_once_and_a_closed_order_cannot_be_paid(product: Product) -> None:
    order = create_order(1, quantity=2)
    assert close_order(order.pk)
    assert not close_order(order.pk)
    assert not pay_order(order)
    product.refresh_from_db()
    assert product.stock == 100
    assert order.state == State.CLOSED


def test_a_visitor_orders_and_pays(product: Product, client: Client) -> None:
    render_price(product)
    front = client.get("/").content.decode()
    assert "$12.50" in front
    assert 'src="/media/renders/1-1.png"' in front
    assert b"".join(client.get("/media/renders/1-1.png")).startswith(b"\x89PNG")
    assert "Order one" in client.get("/products/1/").content.decode()
    created = client.post("/orders/new/1/", follow=True)
    order = Order.objects.get()
    assert created.redirect_chain == [(f"/orders/{order.pk}/", 302)]
    assert "Pay $12.50" in created.content.decode()
    paid = client.post(f"/orders/{order.pk}/pay/", follow=True).content.decode()
    assert "Thank you" in paid
    assert re.search(r"<b>1</b>\s*paid", client.get("/orders/").content.decode())


def test_the_pay_button_of_a_refreshed_page_is_accepted(product: Product) -> None:
    order = create_order(1)
    visitor = Client(enforce_csrf_checks=True)
    fragment = visitor.get(f"/orders/{order.pk}/").content.decode()
    token = re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', fragment)
    assert token is not None
    assert visitor.post(f"/orders/{order.pk}/pay/").status_code == 403
    assert visitor.post(f"/orders/{order.pk}/pay/", {"csrfmiddlewaretoken": token[1]}).status_code == 302
    order.refresh_from_db()
    assert order.state == State.PAID


def test_paying_too_late_is_said_and_changes_nothing(product: Product, client: Client) -> None:
    order = create_order(1)
    close_order(order.pk)
    answer = client.post(f"/orders/{order.pk}/pay/", follow=True).content.decode()
    assert "was already closed" in answer
    order.refresh_from_db()
    assert order.state == State.CLOSED


@pytest.mark.parametrize("path", ["/", "/products/1/", "/orders/"])
def test_every_page_works_with_and_without_a_picture(product: Product, client: Client, path: str) -> None:
    assert client.get(path).status_code == 200
    render_price(product)
    assert client.get(path).status_code == 200


@pytest.mark.parametrize("path", ["/orders/new/1/", "/orders/1/pay/"])
def test_what_changes_something_is_post_only(client: Client, path: str) -> None:
    assert client.get(path).status_code == 405


def test_a_price_changed_in_the_admin_is_rendered_too(product: Product, admin_client: Client) -> None:
    form = {"name": "Amber Mug", "shop": product.shop_id, "photo": "good", "stock": 5, "price": "44.00"}
    answer = admin_client.post("/admin/prices/product/1/change/", form)
    assert answer.status_code == 302
    product.refresh_from_db()
    figures = (product.name, product.stock, product.price, product.price_version)
    assert figures == ("Amber Mug", 5, Decimal(44), 2)
    assert waiting("price-changes") == [b'{"sku":1}']


@pytest.mark.django_db
def test_the_catalogue_is_the_same_every_time() -> None:
    call_command("seed_shop", products=50, verbosity=0)
    first = list(Product.objects.values_list())
    Product.objects.all().delete()
    call_command("seed_shop", products=50, verbosity=0)
    assert list(Product.objects.values_list()) == first
    assert len(first) == 50


def test_what_a_lost_redis_held_is_sent_again_from_the_database(product: Product) -> None:
    late = timezone.now() - timedelta(hours=1)
    order = Order.objects.create(product=product, total=1, due_at=late)
    Order.objects.create(product=product, total=1, due_at=late, state=State.PAID)
    resume()
    assert waiting("price-changes") == [b'{"sku":1}']
    assert waiting("order-timeouts") == [b'{"order":%d}' % order.pk]


def test_no_migration_is_missing(db: None) -> None:
    call_command("makemigrations", "prices", "orders", check=True, dry_run=True, verbosity=0)


@pytest.fixture
def accounts(product: Product) -> Accounts:
    """Of a shop in which everything is as it should be."""
    render_price(product)
    return Accounts()


def test_nothing_is_complained_of_where_everything_adds_up(accounts: Accounts) -> None:
    pay_order(create_order(1))
    create_order(1)
    assert accounts.finished() is False, "the mails are still to be sent"
    assert drain("tasks.default") == 2
    assert accounts.finished() is True
    assert accounts.summary(Done())["confirmed by mail"] == 2
    assert accounts.complaints(Done(orders=2)) == []


def test_an_order_without_its_mail_is_complained_of(accounts: Accounts) -> None:
    create_order(1)
    complaints = accounts.complaints(Done(orders=1))
    assert complaints == [
        "1 messages of tasks.default were not consumed",
        "1 orders were not confirmed by mail",
    ]


def test_messages_that_nobody_consumed_are_complained_of(accounts: Accounts) -> None:
    change_prices([(1, Decimal(5))])
    assert accounts.finished() is False
    waiting, stale = accounts.complaints(Done(price_changes=1))
    assert waiting == "1 messages of price-changes were not consumed"
    assert stale == "1 products do not show their price, such as [1]"


def test_a_lost_message_is_complained_of(accounts: Accounts) -> None:
    topic = get_config().topic("order-timeouts")
    order = create_order(1)
    drain("tasks.default")
    broker = direct(get_broker())
    for slot in range(topic.slots):
        broker.purge(topic, slot, "store")
    (lost,) = accounts.complaints(Done(orders=1))
    assert lost == "1 orders are open, but only 0 messages will close them"
    (unsent, *_) = accounts.complaints(Done(orders=2))
    assert unsent == "2 sends to order-timeouts returned, Redis counts 1"
    Order.objects.filter(pk=order.pk).update(due_at=timezone.now())
    assert "1 orders are past their time but neither paid nor closed" in accounts.complaints(Done(orders=1))


def test_an_order_that_was_closed_early_is_complained_of(accounts: Accounts) -> None:
    order = create_order(1)
    drain("tasks.default")
    close_order(order.pk)
    assert accounts.complaints(Done(orders=1)) == ["1 orders were closed before their time"]


def test_an_image_with_a_wrong_price_is_complained_of(accounts: Accounts) -> None:
    Product.objects.update(price=Decimal(77))
    assert accounts.complaints(Done()) == ["1 images carry another price than their product"]


def test_a_message_that_vanished_from_redis_unbalances_the_ledger(accounts: Accounts) -> None:
    topic = get_config().topic("order-timeouts")
    direct(get_broker()).send_replace(
        topic, 3, [int(timezone.now().timestamp() * 1000) + 60_000], [b'{"order":1}']
    )
    assert accounts.complaints(Done()) == []
    direct(get_broker()).client.delete("order-timeouts_3")
    (complaint,) = accounts.complaints(Done())
    assert complaint.startswith("the ledger of order-timeouts slot 3 is not balanced:")


def test_the_report_of_the_night_counts_the_orders_of_the_day_before_however_often_it_runs(
    product: Product,
) -> None:
    def order(at: str, state: State) -> None:
        due = datetime.fromisoformat(at)
        Order.objects.create(product=product, total=Decimal(10), state=state, created_at=due, due_at=due)

    # The shop's day begins at midnight in Berlin, 23:00 UTC in winter.
    order("2026-03-27T22:59:59Z", State.PAID)
    order("2026-03-27T23:00:00Z", State.PAID)
    order("2026-03-28T12:00:00Z", State.CLOSED)
    order("2026-03-28T22:59:59Z", State.PAID)
    order("2026-03-28T23:00:00Z", State.PAID)
    for _ in range(2):
        write_report(datetime.fromisoformat("2026-03-29T01:00:00Z"))
    (report,) = DailyReport.objects.all()
    assert str(report) == "2026-03-28: 2 of 3 orders paid"
    assert (report.closed, report.revenue) == (1, Decimal(20))


@pytest.mark.django_db
def test_the_schedule_of_the_shop_brings_the_report(clock: Clock) -> None:
    schedules.declare()
    (member,) = waiting("reports")
    assert re.fullmatch(rb"daily-report@\d{4}-\d\d-\d\dT0[12]:00:00Z", member)
    due = datetime.fromisoformat(member.decode().partition("@")[2])
    clock.advance(due - datetime.fromtimestamp(clock() / 1e6, UTC))
    assert drain("reports") == 1
    assert DailyReport.objects.count() == 1
