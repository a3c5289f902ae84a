from __future__ import annotations

import re
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.test import Client
from django.utils import timezone
from PIL import Image

from django_rmq.conf import get_config
from django_rmq.connections import get_broker
from example_project.orders.checkout import OutOfStock, close_order, create_order, pay_order
from example_project.orders.models import Order, State
from example_project.prices.models import Grade, Photo, Product, Shop
from example_project.prices.rendering import PhotoMissing, PhotoServerBusy, render_price


@pytest.fixture(autouse=True)
def memory_broker(settings: Any, tmp_path: Path) -> None:
    """A broker in memory and a folder for images, new for each test."""
    settings.RMQ = settings.RMQ | {"BROKER": "memory"}
    settings.MEDIA_ROOT = tmp_path / "media"


@pytest.fixture
def product(db: None) -> Product:
    shop = Shop.objects.create(name="Harbour & Sons", grade=Grade.KEY_ACCOUNT)
    return Product.objects.create(
        sku=1, name="Amber Glazed Mug", shop=shop, price=Decimal("12.50"), price_version=1
    )


def images(folder: Any) -> list[str]:
    return sorted(path.name for path in Path(folder).rglob("*") if path.is_file())


def waiting(topic: str) -> list[bytes]:
    """The members in the Stores of a topic."""
    found = get_config().topic(topic)
    broker = get_broker()
    return [
        entry.member for slot in range(found.slots) for entry in broker.peek(found, slot, "store").entries
    ]


# --- images


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


def test_a_photo_that_is_slow_comes_at_the_third_attempt(product: Product) -> None:
    product.photo = Photo.SLOW_DISK
    for attempt in (1, 2):
        with pytest.raises(PhotoServerBusy):
            render_price(product, attempt)
    assert render_price(product, 3)


def test_a_missing_photo_leaves_the_product_as_it_was(product: Product, settings: Any) -> None:
    product.photo = Photo.MISSING
    with pytest.raises(PhotoMissing):
        render_price(product)
    product.refresh_from_db()
    assert product.rendered_at is None
    assert images(settings.MEDIA_ROOT) == []


# --- orders


@pytest.mark.django_db(transaction=True)
def test_an_order_reserves_its_goods_and_has_a_message_for_its_time(product: Product) -> None:
    order = create_order(1, quantity=3)
    product.refresh_from_db()
    assert product.stock == 97
    assert order.total == Decimal("37.50")
    assert order.due_at == order.created_at + timedelta(minutes=15)
    assert waiting("order-timeouts") == [b'{"order":%d}' % order.pk]


@pytest.mark.django_db(transaction=True)
def test_an_order_that_cannot_be_filled_leaves_neither_row_nor_message(product: Product) -> None:
    with pytest.raises(OutOfStock, match="fewer than 101"):
        create_order(1, quantity=101)
    product.refresh_from_db()
    assert product.stock == 100
    assert not Order.objects.exists()
    assert waiting("order-timeouts") == []


@pytest.mark.django_db(transaction=True)
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


@pytest.mark.django_db(transaction=True)
def test_closing_twice_restocks_once_and_a_closed_order_cannot_be_paid(product: Product) -> None:
    order = create_order(1, quantity=2)
    assert close_order(order.pk)
    assert not close_order(order.pk)
    assert not pay_order(order)
    product.refresh_from_db()
    assert product.stock == 100
    assert order.state == State.CLOSED


# --- pages and commands


@pytest.mark.django_db(transaction=True)
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


@pytest.mark.django_db(transaction=True)
def test_paying_too_late_is_said_and_changes_nothing(product: Product, client: Client) -> None:
    order = create_order(1)
    close_order(order.pk)
    answer = client.post(f"/orders/{order.pk}/pay/", follow=True).content.decode()
    assert "had been closed by then" in answer
    order.refresh_from_db()
    assert order.state == State.CLOSED


@pytest.mark.parametrize(
    "path", ["/", "/newest/", "/products/1/", "/products/1/image/", "/orders/", "/orders/list/"]
)
def test_every_page_works_with_and_without_a_picture(product: Product, client: Client, path: str) -> None:
    assert client.get(path).status_code == 200
    render_price(product)
    assert client.get(path).status_code == 200


@pytest.mark.parametrize("path", ["/orders/new/1/", "/orders/1/pay/"])
def test_what_changes_something_is_post_only(client: Client, path: str) -> None:
    assert client.get(path).status_code == 405


@pytest.mark.django_db(transaction=True)
def test_a_price_changed_in_the_admin_is_rendered_too(product: Product, admin_client: Client) -> None:
    form = {"name": "Amber Mug", "shop": product.shop_id, "photo": "good", "stock": 5, "price": "44.00"}
    answer = admin_client.post("/admin/prices/product/1/change/", form)
    assert answer.status_code == 302
    product.refresh_from_db()
    assert (product.name, product.stock, product.price, product.price_version) == (
        "Amber Mug",
        5,
        Decimal(44),
        2,
    )
    assert waiting("price-changes") == [b'{"sku":1}']


@pytest.mark.django_db
def test_the_catalogue_is_the_same_every_time() -> None:
    call_command("seed_shop", products=50, verbosity=0)
    first = list(Product.objects.values_list())
    Product.objects.all().delete()
    call_command("seed_shop", products=50, verbosity=0)
    assert list(Product.objects.values_list()) == first
    assert len(first) == 50


@pytest.mark.django_db(transaction=True)
def test_what_a_lost_redis_held_is_sent_again_from_the_database(product: Product) -> None:
    late = timezone.now() - timedelta(hours=1)
    order = Order.objects.create(product=product, total=1, due_at=late)
    Order.objects.create(product=product, total=1, due_at=late, state=State.PAID)
    call_command("resend_pending", verbosity=0)
    assert waiting("price-changes") == [b'{"sku":1}']
    assert waiting("order-timeouts") == [b'{"order":%d}' % order.pk]


def test_no_migration_is_missing(db: None) -> None:
    call_command("makemigrations", "prices", "orders", check=True, dry_run=True, verbosity=0)
