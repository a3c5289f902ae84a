"""A Redis user with the documented rights can do all that RMQ does, and cannot touch what belongs to others."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from django.contrib.auth.models import User
from django.test import Client, override_settings
from django.urls import reverse

from django_rmq import connections, send_message
from django_rmq.checks import check_redis
from django_rmq.conf import get_config
from django_rmq.core import lua
from django_rmq.core.model.keys import MAX_SLOTS, read_wakeup
from django_rmq.core.model.replies import Failure
from django_rmq.core.model.server_checks import flaws, places
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.core.redis.clients import _HARMLESS, refused
from django_rmq.exceptions import ServerRefused
from django_rmq.worker import startup
from tests.integration import test_commands as commands
from tests.integration.test_commands import *  # noqa: F403 - every test of the commands, with the rights below
from tests.support.brokers import Broker, direct
from tests.support.rights import ALLOWED_COMMANDS, rights
from tests.support.servers import RedisServer, ask
from tests.support.workers import Heard, Worker, audit, client_of, eventually, send

# The rights of these are those of the other purges and figures; a terminal takes seconds.
del test_on_a_terminal_a_purge_wants_the_name_of_the_topic  # noqa: F821
del test_rmqstats_that_watches_on_a_terminal_is_live  # noqa: F821

DOCUMENT = (Path(__file__).parents[2] / "docs/how-to/security.md").read_text()
WORK = Topic("work", TopicType.PRIORITY, slots=4)
PASSWORD = "least"


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as found:
        yield found


@pytest.fixture(scope="module")
def redis_client(server: RedisServer) -> Iterator[redis.Redis]:
    """The tests' own client may everything: it sets up what a test begins with."""
    client = client_of(server.url)
    yield client
    client.close()


def login(server: RedisServer, prefix: str, *more: str) -> str:
    """Make a user with the documented rights for a prefix; return the URL by which it logs in."""
    name = prefix.strip(":")
    ask(server.port, "ACL", "SETUSER", name, "reset", "on", f">{PASSWORD}", *rights(prefix), *more)
    return f"redis://{name}:{PASSWORD}@127.0.0.1:{server.port}/0"


@pytest.fixture
def redis_url(server: RedisServer, prefix: str) -> str:
    return login(server, prefix)


def client_with(url: str) -> redis.Redis:
    return redis.Redis.from_url(url, protocol=2)


def test_the_document_names_exactly_these_rights() -> None:
    block = DOCUMENT.partition("ACL SETUSER shop on >password")[2].partition("```")[0]
    assert block.split() == rights("shop:")


def test_the_commands_are_those_of_the_scripts_and_of_the_client() -> None:
    texts = [lua.load(name).text.decode() for name in lua.all_names()]
    called = {word.lower() for text in texts for word in re.findall(r"redis\.p?call\('([A-Z]+)'", text)}
    asked = {str(command[0]).lower() for command in _HARMLESS}
    allowed = {name.partition("|")[0] for name in ALLOWED_COMMANDS}
    assert called | asked <= allowed
    assert allowed - called == {
        *("auth", "client", "config", "evalsha", "hello", "info", "ping", "script", "select"),
        *("subscribe", "unsubscribe"),
    }


def test_nothing_is_refused_and_the_check_says_so(redis_url: str, prefix: str) -> None:
    broker = Broker(client_with(redis_url), prefix)
    assert broker.refused([WORK]) == []
    assert [flaw.name for flaw in flaws(broker, [WORK])] == ["persistence"]
    with override_settings(RMQ={"REDIS": redis_url, "KEY_PREFIX": prefix, "TOPICS": commands.TOPICS}):
        assert [message.id for message in check_redis()] == ["django_rmq.W042"]
        assert startup.check_start(get_config().topics.values())
        connections.close()
    broker.close()


HANDSHAKE = ("auth", "client|setname", "config|get", "hello", "ping", "script|load", "select", "unsubscribe")
"""What depends on what the server knows already, on options of a connection, or is asked for its warnings alone."""

NEEDED = [f"+{name}" for name in ALLOWED_COMMANDS if name not in HANDSHAKE]


@pytest.mark.parametrize("rule", [*NEEDED, *places("shop:")])
def test_each_of_the_rights_is_needed(server: RedisServer, rule: str) -> None:
    rules = [one for one in rights("shop:") if one != rule]
    ask(server.port, "ACL", "SETUSER", "shop", "reset", "on", f">{PASSWORD}", *rules)
    broker = Broker(client_with(f"redis://shop:{PASSWORD}@127.0.0.1:{server.port}/0"), "shop:")
    try:
        said = [flaw.message for flaw in flaws(broker, [WORK], strict=True)]
        assert any(one.startswith(("The Redis user lacks", "It is unknown whether")) for one in said)
    except ServerRefused:
        pass  # without PING, EVALSHA and their like nothing works at all
    finally:
        broker.close()


def test_a_worker_runs_and_every_transition_is_allowed(redis_url: str, prefix: str, caplog: Any) -> None:
    broker = Broker(client_with(redis_url), prefix)
    heard = Heard()
    send(broker, WORK, range(50), priority=50)
    with Worker(broker, [WORK], heard):
        eventually(lambda: len(heard.bodies) == 50, "all messages")
        send(broker, WORK, range(50, 60), priority=50)
        eventually(lambda: len(heard.bodies) == 60, "those that woke it")
    assert "Cannot process" not in caplog.text and "denies" not in caplog.text
    broker.close()


@pytest.mark.django_db
def test_the_admin_and_rest_show_and_do_everything(redis_url: str, prefix: str, client: Client) -> None:
    client.force_login(User.objects.create_superuser("boss"))
    rmq = {"REDIS": redis_url, "KEY_PREFIX": prefix, "TOPICS": commands.TOPICS}
    with override_settings(RMQ=rmq):
        for number in range(20):
            send_message("renders", {"n": number}, priority=50, on_commit=False)
        topic, broker = get_config().topic("renders"), direct(connections.get_broker())
        for slot in range(topic.slots):
            taken = broker.prepare(topic, slot, "W", None, 5)
            failures = [Failure(one.member, "rejected", None, "Boom: x") for one in taken.deliveries]
            broker.rollback(topic, slot, taken.receipt, failures)
        assert client.get(reverse("admin:django_rmq_topic_changelist")).status_code == 200
        change = reverse("admin:django_rmq_topic_change", args=["renders"])
        for tab in ("store", "prepare", "retry", "dead", "claim", "slots", "history"):
            assert client.get(f"{change}?tab={tab}").status_code == 200
        act = reverse("admin:django_rmq_topic_act", args=["renders"])
        for data in (
            {"act": "pause"},
            {"act": "resume"},
            {"act": "replay_all", "state": "dead", "confirmed": "yes"},
            {"act": "purge", "state": "store", "confirmed": "yes", "name": "renders"},
        ):
            assert client.post(act, data).status_code in (200, 302)
        for path in ("topics/", "stats/", "workers/", "slots/?topic=renders", "metrics"):
            assert client.get(f"/api/rmq/{path}").status_code == 200
        once: dict[str, Any] = {"content_type": "application/json", "headers": {"Idempotency-Key": "once"}}
        messages = {"messages": [{"body": 1, "priority": 50}]}
        sent = client.post("/api/rmq/topics/renders/messages/", messages, **once)
        assert sent.status_code == 202, sent.content
        consumer = {"consumer": str(uuid.uuid4())}
        address = "/api/rmq/topics/renders/prepare/"
        taken_ = client.post(address, consumer, content_type="application/json")
        assert taken_.status_code == 200, taken_.content
        connections.close()


@pytest.mark.parametrize("neighbour", ["workshop:", "shop2:", "SHOP:", "sho", "x_shop:", "rmq:shop:"])
def test_keys_of_a_neighbour_are_out_of_reach(
    server: RedisServer, redis_client: redis.Redis, neighbour: str
) -> None:
    theirs = Broker(redis_client, neighbour)
    send(theirs, WORK, range(8), priority=50)
    theirs.define(WORK)
    with Worker(theirs, [WORK], lambda message: message.reject("so that there are more keys")):
        eventually(lambda: theirs.count(WORK, 0).store == 0, "the end")
    theirs.beat("w", "token", 60_000, record="token {}")
    keys = [key for key in redis_client.scan_iter("*") if neighbour.encode() in key]
    assert len(keys) > 5
    before = {key: redis_client.dump(key) for key in keys}
    client = client_with(login(server, "shop:"))
    for key in keys:
        for command in (("UNLINK",), ("TYPE",), ("EXISTS",), ("EXPIRE", 1), ("HGETALL",), ("ZRANGE", 0, -1)):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(command[0], key, *command[1:])
    with pytest.raises(redis.exceptions.NoPermissionError):
        client.publish(f"{neighbour}rmq:wake:work", "0")
    ours = Broker(client, neighbour)
    for call in (
        ours.definitions,
        lambda: ours.count(WORK, 0),
        lambda: ours.purge(WORK, 0, "dead"),
        ours.roster,
    ):
        with pytest.raises(ServerRefused):
            call()
    assert {key: redis_client.dump(key) for key in keys} == before
    client.close()
    redis_client.delete(*keys)


def test_characters_that_patterns_read_are_escaped(server: RedisServer, redis_client: redis.Redis) -> None:
    prefix = "a*[b]?:"
    redis_client.set("axxb1:x_0", 1)
    name = "stars"
    ask(server.port, "ACL", "SETUSER", name, "reset", "on", f">{PASSWORD}", *rights(prefix))
    client = client_with(f"redis://{name}:{PASSWORD}@127.0.0.1:{server.port}/0")
    assert Broker(client, prefix).refused([WORK]) == []
    with pytest.raises(redis.exceptions.NoPermissionError):
        client.exists("axxb1:x_0")
    client.close()


def test_the_same_rights_are_taken_whatever_the_user_had_before(server: RedisServer) -> None:
    ask(server.port, "ACL", "SETUSER", "before", "on", "nopass", "~*", "&*", "+@all")
    ask(server.port, "ACL", "SETUSER", "before", *rights("shop:"))
    client = redis.Redis(port=server.port, username="before", password="any", protocol=2)
    for call in (lambda: client.exists("workshop:x"), lambda: client.publish("workshop:x", 1), client.dbsize):
        with pytest.raises(redis.exceptions.NoPermissionError):
            call()
    client.close()


def test_nothing_is_pushed_for_a_sender_who_may_not_publish(
    server: RedisServer, redis_client: redis.Redis, prefix: str
) -> None:
    topic, heard = Topic("mails", TopicType.FIFO, slots=1, timeout=300), Heard()
    broker = Broker(redis_client, prefix)
    silent = Broker(client_with(login(server, prefix, "-publish")), prefix)
    with Worker(broker, topic, heard) as worker:
        for number, sender in enumerate((broker, silent, broker), 1):
            worker.asleep()
            send(sender, topic, [number])
            eventually(lambda: len(heard.bodies) == number, "its call")  # noqa: B023 - called in this round
        worker.asleep()
        eventually(lambda: audit(broker, topic)[0]["committed"] == 3, "its commit")
    silent.close()


def test_a_check_of_permissions_wakes_no_slot() -> None:
    tried: list[Any] = []

    def run(tries: Any) -> list[Any]:
        tried.extend(tries)
        return [None] * len(tries)

    assert refused("", [Topic("work", TopicType.PRIORITY)], run, []) == []
    (published,) = (int(command[2]) for command in tried if command[0] == "PUBLISH")
    assert read_wakeup(published) == ("wake", MAX_SLOTS)
