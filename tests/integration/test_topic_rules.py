"""A rule for each topic: a user who may see one topic sees nothing of another, on any page of the admin and over REST."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

import pytest
from django.conf import settings
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission as AuthPermission
from django.contrib.auth.models import User
from django.core.cache import cache
from django.http import HttpResponseBase
from django.test import Client, override_settings
from django.urls import reverse

from django_rmq import connections
from django_rmq import schedules as schedule_duty
from django_rmq.admin import TopicAdmin
from django_rmq.api import urls as routes
from django_rmq.api.permissions import TopicPermission
from django_rmq.conf import get_config
from django_rmq.core.commands.schedules import read_schedules
from django_rmq.core.model.delivered_message import message_id
from django_rmq.core.model.envelope import Envelope, encode_envelope
from django_rmq.core.model.replies import Failure
from django_rmq.core.model.worker_report import RunningCall
from django_rmq.exceptions import NotPermitted, UnknownTopic
from django_rmq.models import OutboxMessage
from django_rmq.models import Topic as TopicModel
from django_rmq.operations import Actor, Filter, Limits, Operations, Permission, TopicRule, shared_reads
from django_rmq.operations.health import DEFAULT_THRESHOLDS
from tests.support.brokers import Broker
from tests.support.reports import REPORT, join, report

pytestmark = pytest.mark.django_db

SEEN, HIDDEN, UNDECLARED = "apples", "zebrafish", "quagga"
NAMED = (HIDDEN, UNDECLARED, "nightjar", "okapi", "wombat", "Hoopoe")
"""The hidden topic, one that the settings no longer have, and what belongs to the hidden topic: the name of its schedule,
its bodies, the host of its worker, and the class of its errors."""
TOPICS: dict[str, Any] = {
    SEEN: {"TYPE": "fixed_time", "SLOTS": 2, "IDENTITY": "key"},
    HIDDEN: {"TYPE": "fixed_time", "SLOTS": 2, "IDENTITY": "key"},
}
SCHEDULES = {
    "harvest": {"TOPIC": SEEN, "EVERY": 3_600, "BODY": {"for": "harvest"}},
    "nightjar": {"TOPIC": HIDDEN, "EVERY": 3_600, "BODY": {"for": "okapi"}},
}
ALL = [one.value for one in Permission]


class OnlySeen(TopicPermission):
    """Knows of one topic, and purges none."""

    asked: list[tuple[str, Permission]] = []

    def has_object_permission(self, request: Any, view: Any, obj: Any) -> bool:
        assert request.user.is_authenticated and view.request.user == request.user
        self.asked.append((obj.name, view.needed))
        return obj.name == SEEN and view.needed is not Permission.PURGE


@pytest.fixture
def shop(broker: Any) -> Iterator[Any]:
    """Both topics with messages in each state, schedules, rows of the outbox, workers, and people's actions.

    One action on the hidden topic goes on in the background, and another can be undone.
    """
    OnlySeen.asked = []
    cache.clear()
    rmq = {
        "REDIS": "redis://127.0.0.1:1/0",
        "TOPICS": TOPICS,
        "SCHEDULES": SCHEDULES,
        "OUTBOX": True,
        "API": {"PERMISSION": f"{__name__}.OnlySeen"},
    }
    with connections.replaced_broker(broker):
        gone = {**TOPICS, UNDECLARED: TOPICS[SEEN]}
        with override_settings(RMQ={**rmq, "TOPICS": gone}):
            connections.agree(get_config().topic(UNDECLARED))
            fill(broker, UNDECLARED, b"okapi")
        with override_settings(RMQ=rmq):
            schedule_duty.declare()
            for name in TOPICS:
                connections.agree(get_config().topic(name))
            fill(broker, SEEN, b"pear")
            fill(broker, HIDDEN, b"okapi")
            work(broker)
            for name in (SEEN, HIDDEN, UNDECLARED):
                row(name)
            user = User.objects.create_user("earlier", is_superuser=True)
            earlier = Operations(Actor.of_user(user, "admin"))
            earlier.pause(HIDDEN).result()
            store(broker, HIDDEN, broker.now_ms(), b"gone-okapi")
            earlier.delete_all(HIDDEN, "store", Filter(text="gone-okapi")).result()
            earlier.start_action(HIDDEN, "replay")
            yield broker


def permit(monkeypatch: pytest.MonkeyPatch, permits: Callable[[Permission], bool]) -> None:
    """Let the rule permit this of the topic that is seen, and nothing of another one."""

    def has(self: Any, request: Any, view: Any, topic: Any) -> bool:
        return topic.name == SEEN and permits(view.needed)

    monkeypatch.setattr(OnlySeen, "has_object_permission", has)


def fill(broker: Any, name: str, body: bytes) -> None:
    """Let one message be dead, two wait since long ago, and one run since long ago."""
    topic, past = get_config().topic(name), broker.now_ms() - 90_000_000
    for member in (b"dead-" + body, b"running-" + body):
        store(broker, name, past, member)
        taken = broker.prepare(topic, 0, "W", None, 10)
        if member.startswith(b"dead"):
            error = "shop.Hoopoe: no okapi" if name != SEEN else "shop.Boom: no pear"
            broker.rollback(topic, 0, taken.receipt, [Failure(member, "rejected", None, error)])
    store(broker, name, past, b"a-" + body, b"b-" + body)


def store(broker: Any, name: str, score: int, *members: bytes) -> None:
    envelopes = [encode_envelope(Envelope(b'{"for":"%s"}' % member)) for member in members]
    broker.send_replace(get_config().topic(name), 0, [score] * len(members), list(members), envelopes)


def work(broker: Any) -> None:
    """Let one worker serve both topics, another only the hidden one, and let a third have vanished."""
    now_ms = broker.now_ms()

    def call(name: str, member: bytes) -> RunningCall:
        return RunningCall(name, message_id(0, member), now_ms - 3_600_000, 1, f"thread-{name}")

    join(broker, "shared-worker", SEEN, HIDDEN)
    join(broker, "wombat-worker", HIDDEN, pid=42)
    hidden, seen = call(HIDDEN, b"running-okapi"), call(SEEN, b"running-pear")
    report(broker, "shared-worker", calls=(hidden, seen), running=5, state="working")
    report(broker, "wombat-worker", host="wombat", calls=(hidden,), state="working")
    report(broker, "gone-worker", host="wombat", calls=REPORT.calls, state="working")


def row(name: str) -> None:
    OutboxMessage.objects.create(
        topic=name,
        type="fixed_time",
        act="send",
        identity="00000000-0000-0000-0000-000000000000",
        crc=0,
        member=b"pear" if name == SEEN else b"okapi",
        envelope=b"",
        score=1,
        sent_ms=round(time.time() * 1000) - 900_000,
        due_ms=None,
        error="no okapi" if name != SEEN else "no pear",
    )


def person(**options: Any) -> Client:
    user = User.objects.create_user(f"user{User.objects.count()}", is_staff=True, **options)
    user.user_permissions.set(AuthPermission.objects.filter(codename__in=ALL))
    client = Client()
    client.force_login(user)
    return client


def addresses(topic: str) -> dict[str, str]:
    """Return the address of every page of the admin, for a topic, its dead message and its schedule."""
    body, schedule = (b"pear", "harvest") if topic == SEEN else (b"okapi", "nightjar")
    given = {"object_id": topic, "message_id": message_id(0, b"dead-" + body)}
    found = {}
    for pattern in TopicAdmin(TopicModel, admin.site).get_urls():
        assert pattern.name is not None
        arguments = {name: given[name] for name in pattern.pattern.converters}
        if pattern.name == "django_rmq_topic_schedule":
            arguments = {"object_id": schedule}
        page = pattern.name.removeprefix("django_rmq_topic_")
        found[page] = reverse(f"admin:{pattern.name}", kwargs=arguments)
    return found


def text(answer: HttpResponseBase) -> str:
    content = b"".join(answer) if answer.streaming else answer.content  # type: ignore[attr-defined]
    assert isinstance(content, bytes)
    return unquote(content.decode())


def named_in(answer: HttpResponseBase) -> list[str]:
    headers = unquote(" ".join(f"{name}: {value}" for name, value in answer.headers.items()))
    return [word for word in NAMED if word in text(answer) or word in headers]


QUERIES = (
    "",
    *(f"?tab={tab}" for tab in ("store", "prepare", "retry", "dead", "claim", "slots", "history")),
    *(f"?show={show}&sort=dead" for show in ("dead", "late", "paused")),
    *(f"?state={state}" for state in ("waiting", "refused")),
    *(f"?q={text}" for text in ("dead", "oka", "Hoop", "e")),
)


def test_a_page_shows_nothing_of_a_topic_that_the_user_must_not_know_of(shop: Any) -> None:
    client, seen, hidden = person(), addresses(SEEN), addresses(HIDDEN)
    shown = set[str]()
    for name, address in seen.items():
        for query in QUERIES:
            answer = client.get(f"{address}{query}")
            # An export is of one of the states.
            assert answer.status_code in ((200, 302, 404) if query else (200, 302)), (name, query)
            assert named_in(answer) == [], (name, query)
            shown.update(word for word in ("harvest", "pear", "alpha", "Boom") if word in text(answer))
    assert shown == {"harvest", "pear", "alpha", "Boom"}
    for name, address in hidden.items():
        if address != seen[name]:
            # An address with the other topic, its message or its schedule.
            assert client.get(address).status_code == 404, name
            assert named_in(client.get(address)) == [], name


@pytest.mark.parametrize("permitted", [Permission.DELETE, Permission.VIEW_STACK])
def test_what_runs_has_the_buttons_that_the_rule_permits(
    shop: Any, monkeypatch: pytest.MonkeyPatch, permitted: Permission
) -> None:
    client, message = person(), message_id(0, b"running-pear")
    pages = [addresses(SEEN)["running"], reverse("admin:django_rmq_topic_message", args=[SEEN, message])]
    for page in pages:
        shown = text(client.get(page))
        assert 'value="cancel"' in shown and "Show stack" in shown, page

    permit(monkeypatch, {Permission.VIEW, Permission.VIEW_BODIES, permitted}.__contains__)
    for page in pages:
        shown = text(client.get(page))
        assert ('value="cancel"' in shown) is (permitted is Permission.DELETE), page
        assert ("Show stack" in shown) is (permitted is Permission.VIEW_STACK), page


@pytest.mark.parametrize(
    ("permitted", "page", "button"),
    [
        (Permission.PAUSE, "schedules", 'value="pause"'),
        (Permission.SEND, "schedules", 'value="run"'),
        (Permission.EDIT, "schedules", ">Edit<"),
        (Permission.PURGE, "background", ">Stop<"),
        (Permission.DELETE, "background", ">Undo<"),
    ],
)
def test_a_list_of_all_topics_has_the_buttons_that_the_rule_permits(
    shop: Any, monkeypatch: pytest.MonkeyPatch, permitted: Permission, page: str, button: str
) -> None:
    shell, client = Operations(Actor("shell", "command")), person()
    shell.delete_all(SEEN, "store", Filter(text="pear")).result()
    shell.start_action(SEEN, "purge", "dead")
    for also in (permitted, Permission.REPLAY):
        permit(monkeypatch, {Permission.VIEW, also}.__contains__)
        shown = text(client.get(addresses(SEEN)[page]))
        assert SEEN in shown and (button in shown) is (also is permitted)


def test_what_is_wrong_with_a_hidden_topic_is_not_counted(shop: Any) -> None:
    """Neither the title, nor the icon, nor the findings, nor a link counts it."""
    shell = Operations(Actor("shell", "command"))
    for state in ("store", "dead"):
        shell.purge(SEEN, state).result()
    shell.delete_outbox([f"default:{OutboxMessage.objects.get(topic=SEEN).pk}"])
    dashboard = text(person().get(addresses(SEEN)["changelist"]))
    assert "<title>Topics" in dashboard and "findings-" not in dashboard
    assert "rmq-is-alarm" not in dashboard and "refused" not in dashboard
    with override_settings(RMQ={**settings.RMQ, "API": {}}):
        dashboard = text(person().get(addresses(SEEN)["changelist"]))
        assert "findings-" in dashboard and "2 refused" in dashboard


def test_whoever_may_know_of_all_topics_sees_each_of_these_words(shop: Any) -> None:
    """The words occur on the pages, so the tests above would find them."""
    with override_settings(RMQ={**settings.RMQ, "API": {}}):
        client, found = person(), set[str]()
        for address in (*addresses(SEEN).values(), *addresses(HIDDEN).values()):
            for query in ("", "?tab=dead"):
                found.update(named_in(client.get(f"{address}{query}")))
        assert found == set(NAMED)
        background = client.get(addresses(SEEN)["background"])
        assert HIDDEN in named_in(background) and "earlier" in text(background)


ACTS: list[dict[str, Any]] = [
    {},
    {"pin": "1"},
    {"body": '{"for": "all"}', "fixed_time": "2040-01-01T00:00", "key": "k"},
    {"act": "pause"},
    {"act": "resume"},
    *(
        {"act": act, "state": state, "confirmed": "1", "typed": HIDDEN, "id": message_id(0, b"dead-okapi")}
        for act in ("replay", "delete", "cancel", "bury", "replay_all", "delete_all", "purge")
        for state in ("store", "dead")
    ),
    {"act": "return", "consumer": "c", "confirmed": "1"},
]


def test_an_action_on_a_hidden_topic_is_refused_and_does_nothing(shop: Any) -> None:
    client, seen, hidden = person(), addresses(SEEN), addresses(HIDDEN)
    before = state_of(shop)
    for name, address in hidden.items():
        if address == seen[name]:
            continue
        for given in ACTS:
            answer = client.post(address, given)
            assert answer.status_code in (403, 404), (name, given)
            assert named_in(answer) == [], (name, given)
    for act in ("pause", "resume", "run", "reset"):
        answer = client.post(seen["schedules"], {"act": act, "name": "nightjar"})
        assert answer.status_code == 404 and named_in(answer) == []
    rows = [f"default:{one.pk}" for one in OutboxMessage.objects.exclude(topic=SEEN)]
    for act in ("retry", "delete"):
        answer = client.post(seen["outbox"], {"act": act, "id": rows, "confirmed": "1"}, follow=True)
        assert named_in(answer) == [] and "2 no longer there" in text(answer)
    for worker in ("wombat-worker", "shared-worker"):
        for act in ("quiet", "stop", "resume"):
            given = {"act": act, "worker": worker, "confirmed": "1"}
            answer = client.post(seen["workers"], given, follow=True)
            assert [word for word in named_in(answer) if word not in worker] == []
    shell = Operations(Actor("shell", "command"))
    (action,), (deletion,) = shell.background_actions(), shell.undoable()
    for page, given in (("background", {"action": action.action.id}), ("undo", {"deletion": deletion.id})):
        answer = client.post(seen[page], given, follow=True)
        assert named_in(answer) == [] and "earlier" not in text(answer)
        assert "errornote" in text(answer) or 'class="error"' in text(answer), page
    assert state_of(shop) == before
    # The buttons say the same: the worker that also serves the hidden topic is not controlled.
    assert "Quiet" not in text(client.get(seen["workers"]))
    # What the rule forbids of the topic that is seen is refused as well, and its button is not there.
    for given in ({}, {"confirmed": "1", "typed": SEEN}):
        assert client.post(seen["act"], {"act": "purge", "state": "dead", **given}).status_code == 404
    buttons = text(client.get(seen["change"]))
    assert 'value="purge"' not in buttons and 'value="reschedule_all"' in buttons
    assert state_of(shop) == before


@pytest.mark.parametrize(
    "allowed", [{Permission.SEND}, {Permission.DELETE}, {Permission.SEND, Permission.DELETE}, set()]
)
def test_the_buttons_of_the_outbox_are_those_that_the_rule_permits(
    shop: Any, monkeypatch: pytest.MonkeyPatch, allowed: set[Permission]
) -> None:
    def permits(self: Any, request: Any, view: Any, topic: Any) -> bool:
        return view.needed in {*allowed, Permission.VIEW} or topic.name == HIDDEN

    monkeypatch.setattr(OnlySeen, "has_object_permission", permits)
    OutboxMessage.objects.filter(topic=UNDECLARED).delete()
    shown = text(person().get(addresses(SEEN)["outbox"]))
    assert shown.count('name="id"') == 2 - (not allowed)
    assert 'value="retry"' in shown and 'value="delete"' in shown
    OutboxMessage.objects.exclude(topic=SEEN).delete()
    shown = text(person().get(addresses(SEEN)["outbox"]))
    assert shown.count('name="id"') == bool(allowed)
    assert ('value="retry"' in shown, 'value="delete"' in shown) == (
        Permission.SEND in allowed,
        Permission.DELETE in allowed,
    )


def test_what_the_rule_forbids_of_a_topic_cannot_be_done_over_rest_in_another_way(
    shop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell, client = Operations(Actor("shell", "command")), person()
    store(shop, SEEN, shop.now_ms(), b"gone-pear")
    shell.delete_all(SEEN, "store", Filter(text="gone-pear")).result()
    action = shell.start_action(SEEN, "purge", "store").action.id
    deletion = next(one.id for one in shell.undoable() if one.topic == SEEN)
    before, forbidden = state_of(shop), {Permission.PURGE, Permission.DELETE, Permission.EDIT}

    permit(monkeypatch, lambda needed: needed not in forbidden)
    dead = message_id(0, b"dead-pear")
    requests: list[tuple[str, object]] = [
        (f"topics/{SEEN}/background/", {"action": "purge", "state": "dead", "filter": {}}),
        (f"topics/{SEEN}/messages/{dead}/replay/", {"body": {"for": "another"}}),
        (f"deletions/{deletion}/undo/", {}),
        (f"background/{action}/stop/", {}),
    ]
    for path, body in requests:
        answer = client.post(f"/api/rmq/{path}", body, content_type="application/json")
        assert (answer.status_code, answer.json()["code"]) == (404, "topic_not_found"), path
    assert state_of(shop) == before
    forbidden.clear()
    for path, body in requests:
        answer = client.post(f"/api/rmq/{path}", body, content_type="application/json")
        assert answer.status_code in (200, 202), answer.content
    assert state_of(shop) != before


def test_what_messages_hold_is_shown_of_those_topics_of_which_the_rule_permits_it(
    shop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages, rest = addresses(SEEN), f"/api/rmq/topics/{SEEN}/messages/"
    shown = [
        *(f"{pages['change']}?tab={tab}" for tab in ("store", "dead", "prepare")),
        *(pages[name] for name in ("message", "causes", "topic_causes", "raw")),
        f"{pages['search']}?q=no+p",
        *(f"{pages['export']}?tab=dead&as={form}" for form in ("csv", "jsonl")),
        *(f"{rest}?state={state}" for state in ("waiting", "dead")),
        f"{rest}{message_id(0, b'dead-pear')}/",
        "/api/rmq/causes/",
    ]
    searches = [f"{rest}?state=dead&text=pear", f"{rest}-/?key=dead-pear"]
    client, forbidden = person(), {Permission.VIEW_BODIES}

    permit(monkeypatch, lambda needed: needed not in forbidden)
    for address in shown:
        assert "pear" not in text(client.get(address)), address
    for address in searches:
        assert client.get(address).status_code == 403, address
    forbidden.clear()
    for address in shown:
        assert "pear" in text(client.get(address)), address
    for address in searches:
        assert client.get(address).status_code == 200, address


def state_of(broker: Any) -> tuple[object, ...]:
    counted = [broker.count(get_config().topic(name), slot) for name in (SEEN, HIDDEN) for slot in (0, 1)]
    # What is due, and since when, changes with the time: on a slow machine the deliveries time out meanwhile.
    counts = [(one.store, one.prepare, one.retry, one.dead, one.claimed, one.paused) for one in counted]
    schedules = [(one.name, one.is_paused, one.override) for one in broker.run(read_schedules())]
    rows = list(OutboxMessage.objects.order_by("pk").values_list("topic", "due_ms"))
    shell = Operations(Actor("shell", "command"))
    actions = [(one.action.id, one.ended_ms) for one in shell.background_actions()]
    return counts, schedules, rows, actions, len(shell.undoable()), LogEntry.objects.count()


def test_the_api_shows_nothing_of_a_hidden_topic_either(shop: Any) -> None:
    client = person()
    asked = 0
    for route, view in routes.ROUTES.values():
        if hasattr(view, "get") and "{" not in route and "<" not in route:
            answer = client.get(f"/api/rmq/{route}", {"workers": "true"} if "ready" in route else {})
            assert named_in(answer) == [], route
            asked += answer.status_code == 200
    assert asked >= 7


def test_the_rule_is_asked_once_about_each_topic_and_permission_of_a_request(shop: Any) -> None:
    client = person()
    for name in ("changelist", "causes", "running", "workers", "schedules", "outbox"):
        OnlySeen.asked = []
        assert client.get(addresses(SEEN)[name]).status_code == 200
        assert len(OnlySeen.asked) == len(set(OnlySeen.asked)), name
    with override_settings(RMQ={**settings.RMQ, "API": {}}):
        OnlySeen.asked = []
        assert person().get(addresses(SEEN)["changelist"]).status_code == 200
        assert OnlySeen.asked == []


def test_answers_that_are_shared_are_kept_whole_and_shown_in_part(
    shop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_reads, "KEPT_MS", 60_000)
    for name in ("KEPT_SECONDS", "OTHERS_SECONDS", "STRANDED_SECONDS", "DEATHS_SECONDS"):
        monkeypatch.setattr(shared_reads, name, 3_600.0)
    rule = TopicRule(lambda topic, needed: topic.name == SEEN)
    part, whole = Operations(Actor("ann", "test", rule=rule)), Operations(Actor("boss", "test"))
    for _ in range(2):
        for one in (part, whole):
            names = {SEEN} if one is part else {SEEN, HIDDEN}
            assert {found.topic.name for found in one.shared_survey().topics} == names
            assert {found.topic for found in one.shared_schedules()} == names
            assert {found.topic for found in one.shared_outbox()} - {UNDECLARED} == names
            assert {found.call.topic for found in shared_reads.shared_workers(one).running} == names
    assert len(part.workers()) == 1 and len(whole.workers()) == 2
    assert part.shared_survey().workers == 1 and whole.shared_survey().workers == 2


def test_an_operation_on_all_topics_is_for_those_who_may_know_of_all(shop: Any) -> None:
    one = Operations(Actor("ann", "test", rule=TopicRule(lambda topic, needed: topic.name == SEEN)))
    refused: list[Callable[[], object]] = [
        one.stranded,
        one.relay_outbox,
        lambda: one.find_stranded(UNDECLARED),
        lambda: one.retire(UNDECLARED, delete=True),
        lambda: shared_reads.shared_stranded(one),
    ]
    for ask in refused:
        with pytest.raises(NotPermitted):
            ask()
    unknown: list[Callable[[str], object]] = [
        one.topic,
        one.deliveries,
        lambda name: one.listing(name, "dead"),
        lambda name: one.send(name, {"for": "all"}, key="k"),
        lambda name: one.send_many(name, [1]),
        lambda name: one.send_each(name, []),
        lambda name: one.purge(name, "dead", limits=Limits(messages=1)),
        lambda name: one.history(name, 1),
    ]
    for name in (HIDDEN, UNDECLARED, "nosuch"):
        for ask_about in unknown:
            with pytest.raises(UnknownTopic, match=f"there is no topic '{name}'"):
                ask_about(name)
    assert {found.topic for found in one.health(DEFAULT_THRESHOLDS).findings} == {"", SEEN}


def test_django_is_asked_once_about_each_permission_of_a_request(
    shop: Broker, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    has_perm = User.has_perm

    def count(user: User, perm: str, obj: Any = None) -> bool:
        asked.append(perm)
        return has_perm(user, perm, obj)

    client.force_login(User.objects.create_superuser("someone"))
    monkeypatch.setattr(User, "has_perm", count)
    client.post(addresses(SEEN)["act"], {"act": "replay", "state": "dead", "id": "0.x"})
    assert sorted(asked) == sorted({*asked}), asked
    assert Permission.REPLAY.full_name in asked
