"""One search over all topics: ids and keys at once, texts and errors within a bound, and nothing that is hidden."""

from __future__ import annotations

import html
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse

from django_rmq.conf import get_config
from django_rmq.core.model.delivered_message import message_id
from django_rmq.core.model.envelope import Envelope, encode_envelope
from django_rmq.core.producer.placement import slot_of
from django_rmq.message_ids import sealed_id
from django_rmq.operations import Actor, Operations, Permission, SearchResult
from django_rmq.operations.messages import SCANNED_PER_PAGE
from tests.support.brokers import Broker, project_on
from tests.support.programs import kill_all

pytestmark = pytest.mark.django_db

TOPICS = {
    "orders": {"TYPE": "fixed_time", "SLOTS": 4, "IDENTITY": "key"},
    "mails": {"TYPE": "fixed_time", "SLOTS": 2, "IDENTITY": "key"},
    "plain": {"TYPE": "fixed_time", "SLOTS": 2},
    "cards": {"TYPE": "fixed_time", "SLOTS": 2, "IDENTITY": "key"},
}


def redact(topic: str, body: Any) -> Any:
    return "***"


@pytest.fixture
def shop(redis_client: Any, prefix: str) -> Iterator[Broker]:
    broker = Broker(redis_client, prefix)
    with project_on(broker, TOPICS=TOPICS, ADMIN={"FORMATTER": {"cards": f"{__name__}.redact"}}):
        yield broker


def store(broker: Broker, name: str, *keys: str, body: str = '{"city":"Oslo"}', age: float = 60) -> None:
    topic, score = get_config().topic(name), broker.now_ms() - round(age * 1000)
    for key in keys:
        member = key.encode()
        envelopes = [encode_envelope(Envelope(body.encode()))] if topic.keyed else ()
        broker.send_replace(topic, slot_of(member, topic.slots), [score], [member], envelopes)


def shell() -> Operations:
    return Operations(Actor("shell", "command"))


def user(*needed: Permission) -> Operations:
    return Operations(Actor("ann", "admin", permits=lambda one: one in needed))


def places(found: SearchResult) -> list[tuple[str, str, str | None]]:
    return [(one.topic.name, one.queue, one.key) for one in found.copies]


def test_an_id_and_a_key_are_found_in_every_topic_without_a_search_of_lists(shop: Broker) -> None:
    store(shop, "orders", "A-17")
    store(shop, "mails", "A-17", "B-1", "A-171")
    store(shop, "plain", '"A-17"')
    kill_all(shop, "mails", "shop.Boom: no mail for A-17")
    named = shell().search_messages("A-17", seconds=0)
    assert places(named) == [("orders", "store", "A-17"), ("mails", "dead", "A-17")]
    assert (named.named, named.looked_at, named.is_complete, named.unread) == (2, 0, False, 3)
    slot = slot_of(b"A-17", 2)
    for one in (message_id(slot, b"A-17"), sealed_id("mails", slot, b"A-17")):
        found = shell().search_messages(one)
        assert ("mails", "dead", "A-17") in places(found)
        assert found.looked_at == 0 and found.is_complete, "the lists were searched for an id"
    assert places(shell().search_messages(sealed_id("mails", slot, b"gone"))) == []


def test_a_text_is_found_in_bodies_keys_and_errors_of_all_topics_the_dead_first(shop: Broker) -> None:
    store(shop, "mails", "B-1", body='{"city":"Bergen"}')
    kill_all(shop, "mails", "shop.Boom: unknown city")
    store(shop, "orders", "A-17", "bergen", body='{"city":"Bergen"}')
    store(shop, "plain", '"Bergen"')
    found = shell().search_messages("Bergen")
    assert places(found)[0] == ("mails", "dead", "B-1")
    assert sorted(one.topic.name for one in found.copies) == ["mails", "orders", "orders", "plain"]
    assert (found.named, found.looked_at, found.is_complete, found.unread) == (0, 4, True, 0)
    assert places(shell().search_messages("unknown city")) == [("mails", "dead", "B-1")]
    assert places(shell().search_messages("B-")) == [("mails", "dead", "B-1")]
    assert shell().search_messages("nowhere").copies == []
    assert shell().search_messages("").is_complete


def test_a_search_says_where_it_stopped(shop: Broker) -> None:
    for name in TOPICS:
        store(shop, name, *(f"{name}-{number}" for number in range(5)))
    some = shell().search_messages("Oslo", limit=4)
    assert len(some.copies) == 4 and not some.is_complete and some.unread > 0
    none = shell().search_messages("Oslo", seconds=0)
    assert (none.copies, none.is_complete, none.unread) == ([], False, 4)
    assert shell().search_messages("x" * 201).is_complete
    assert some.looked_at < SCANNED_PER_PAGE


def test_who_may_not_see_bodies_finds_sealed_ids_and_classes_of_errors_alone(shop: Broker) -> None:
    for name in ("mails", "cards"):
        store(shop, name, "A-17", body='{"card":"4111"}')
        kill_all(shop, name, "shop.Boom: no A-17")
        store(shop, name, "waiting")
    viewer, reader = user(Permission.VIEW), user(Permission.VIEW, Permission.VIEW_BODIES)
    for text in ("A-17", "4111", "card", "no A", message_id(slot_of(b"A-17", 2), b"A-17"), "Boo"):
        assert viewer.search_messages(text).copies == [], text
        assert {one.topic.name for one in reader.search_messages(text).copies} <= {"mails"}, text
    for text in ("Boom", "shop.Boom"):
        found = viewer.search_messages(text).copies
        assert sorted(one.topic.name for one in found) == ["cards", "mails"]
        assert [(one.key, one.raw, one.error) for one in found] == [(None, None, "")] * 2
    sealed = sealed_id("cards", slot_of(b"A-17", 2), b"A-17")
    assert [one.topic.name for one in viewer.search_messages(sealed).copies] == ["cards"]


def test_the_page_shows_what_was_found_and_leads_to_the_list_of_its_topic(
    shop: Broker, staff: Callable[..., Client]
) -> None:
    store(shop, "mails", "B-1", "<b>", body='{"city":"<script>Bergen"}')
    kill_all(shop, "mails", "shop.Boom: unknown city")
    client = staff("view_topic", "view_bodies")
    address = reverse("admin:django_rmq_topic_search")
    assert f'action="{address}"' in client.get(reverse("admin:django_rmq_topic_changelist")).content.decode()
    answer = client.get(address, {"q": "Bergen"}).content.decode()
    assert "2 messages were looked at: all that you may search." in answer
    assert "&lt;script&gt;Bergen" in answer and "<script>Bergen" not in answer
    dead = html.escape(reverse("admin:django_rmq_topic_change", args=["mails"]) + "?tab=dead")
    assert f'"{dead}&amp;text=Bergen"' in answer
    found, _ = user(Permission.VIEW, Permission.VIEW_BODIES).search_messages("Bergen").copies
    assert f'"{dead}"' in client.get(address, {"q": found.id}).content.decode()
    assert "No messages match." in client.get(address, {"q": "nowhere"}).content.decode()
    for text in ("", " ", "\0", "\ud800", "x" * 5_000, "%", "~", "0.", "1~x", "☃"):
        began = time.monotonic()
        assert client.get(address, {"q": text.encode("utf-8", "surrogatepass")}).status_code == 200
        assert time.monotonic() - began < 60
    assert staff("send_messages").get(address).status_code == 403
