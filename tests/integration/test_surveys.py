"""One survey for everybody who looks at the dashboard: threads, processes, failures, and what a filter asks for."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any
from unittest.mock import Mock

import pytest
import redis
from django.contrib.auth.models import User
from django.test import Client, override_settings
from django.urls import reverse

from django_rmq.core.commands import stored_results
from django_rmq.core.commands.script_call import Call
from django_rmq.core.model.keys import answer_key, slot_keys
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.core.monitoring import history
from django_rmq.core.redis.broker import RedisPipeline
from django_rmq.exceptions import NotPermitted, RmqError, ServerUnavailable, WrongType
from django_rmq.metrics import RmqCollector
from django_rmq.operations import Actor, Operations, Permission, shared_reads, stats
from tests.support.brokers import Broker, project_on
from tests.support.programs import Program, user_with
from tests.support.servers import RedisServer
from tests.support.workers import eventually

TABS = 8
TOPICS = {
    "pay": {"TYPE": "fixed_time", "SLOTS": 2},
    "payback": {"TYPE": "priority", "SLOTS": 2},
    "letters": {"TYPE": "fixed_time", "SLOTS": 4},
}

Survey = Callable[..., stats.Overview]


@pytest.fixture
def broker(
    redis_url: str, redis_client: Any, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Broker]:
    """A broker with messages in several states. No survey becomes old by itself."""
    monkeypatch.setattr(shared_reads, "KEPT_MS", 600_000)
    monkeypatch.setattr(shared_reads, "KEPT_SECONDS", 600.0)
    monkeypatch.setattr(shared_reads, "_kept", {})
    found = Broker(redis_client, prefix)
    with project_on(found, REDIS=redis_url, KEY_PREFIX=prefix, TOPICS=TOPICS):
        pay, payback = (me().permitted(name) for name in ("pay", "payback"))
        found.send_replace(pay, 0, [1000, 2000], [b"1", b"2"])
        found.send_replace(pay, 1, [4_000_000_000_000], [b"3"])
        found.send_replace(payback, 0, [17], [b"4"])
        found.prepare(pay, 0, "worker", None, 1)
        found.client.set(slot_keys(prefix, "payback", 1).store, "not of RMQ")
        yield found


def me() -> Operations:
    return Operations(Actor("me", "test"))


def forget_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Go on as another process would, which has kept nothing."""
    monkeypatch.setattr(shared_reads, "_kept", {})


def look(names: Sequence[str] | None = None) -> stats.Overview:
    return me().shared_survey(names)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The topics of each survey that was made."""
    found: list[list[str]] = []
    real: Survey = stats.survey_topics

    def survey(broker: Broker, topics: Any) -> stats.Overview:
        found.append([topic.name for topic in topics])
        return real(broker, topics)

    monkeypatch.setattr(stats, "survey_topics", survey)
    return found


def test_the_threads_of_a_process_share_one_survey(broker: Broker, made: list[list[str]]) -> None:
    with ThreadPoolExecutor(TABS) as tabs:
        seen = list(tabs.map(lambda _: look(), range(TABS)))
    assert made == [list(TOPICS)]
    assert {id(one) for one in seen} == {id(seen[0])}


def test_processes_share_a_survey_in_every_detail(
    broker: Broker, made: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = look()
    assert [one.prepare for one in first.topics] == [1, 0, 0]
    assert first.topics[0].running_ms is not None
    assert first.topics[1].problems
    forget_process(monkeypatch)
    assert look() == first
    assert made == [list(TOPICS)]


def test_topics_are_read_again_until_they_have_the_sample_of_this_minute(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    operations = me()
    pay, letters = (operations.permitted(name) for name in ("pay", "letters"))
    read = list[str]()

    def sampled(at: int) -> history.Minute:
        return history.Minute(at * 60_000, at * 60_000, history.Depth(at, 0, 0, 0, 0, 0, None))

    samples: dict[str, list[history.Minute] | RmqError] = {"pay": [sampled(59)], "letters": [sampled(58)]}

    def read_last(asked: object, wanted: dict[Topic, int]) -> dict[Topic, list[history.Minute] | RmqError]:
        read.extend(topic.name for topic in wanted)
        return {topic: samples[topic.name] for topic in wanted}

    monkeypatch.setattr(history, "read_last", read_last)

    def unread(minutes: int = 60, minute: int = 59) -> list[str]:
        read.clear()
        made = operations.shared_last_minutes({pay: minutes, letters: 60}, minute, str)
        assert made == {name: str(each) for name, each in samples.items()}
        return list(read)

    assert unread() == ["pay", "letters"]
    assert unread() == ["letters"]
    assert unread(3) == ["pay", "letters"], "of a topic that is shown, more is read than its rates"
    assert unread(3) == ["letters"]
    samples["letters"] = ServerUnavailable("down")
    assert unread() == unread() == ["letters"]
    samples["letters"] = [sampled(59)]
    assert unread() == ["letters"]
    assert unread() == []
    assert unread(minute=60) == ["pay", "letters"]
    monkeypatch.setattr(shared_reads, "KEPT_MS", 0)
    assert unread() == unread() == ["pay", "letters"]


def test_a_survey_is_made_again_when_it_is_old(
    broker: Broker, made: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_reads, "KEPT_SECONDS", 0.0)
    monkeypatch.setattr(shared_reads, "KEPT_MS", 1)
    look()
    # Redis drops what it keeps after a millisecond, by its own clock.
    eventually(lambda: bool(look()) and len(made) > 1)


@pytest.mark.parametrize(("took_ms", "kept_ms"), [(0, 2_000), (100, 2_000), (200, 4_000), (900, 10_000)])
def test_a_survey_is_kept_for_twenty_times_as_long_as_it_took(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, took_ms: int, kept_ms: int
) -> None:
    monkeypatch.setattr(shared_reads, "KEPT_MS", 2_000)
    kept, real = list[int](), stored_results.store_answer

    def survey(*_given: Any) -> stats.Overview:
        clock[0] += took_ms / 1000
        return stats.Overview([], 0, "", 5)

    def store_answer(name: str, token: str, answer: bytes, ms: int) -> Any:
        kept.append(ms)
        return real(name, token, answer, ms)

    clock = [5.0]
    monkeypatch.setattr(stats, "survey_topics", survey)
    monkeypatch.setattr(stored_results, "store_answer", store_answer)
    monkeypatch.setattr(shared_reads, "time", Mock(monotonic=lambda: 5.0, thread_time=lambda: clock[0]))
    assert look([]).took_ms == took_ms
    assert kept == [kept_ms]


@pytest.mark.django_db
def test_a_page_says_of_when_figures_are_that_are_kept_for_long(
    broker: Broker, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_reads, "KEPT_MS", 2_000)
    client.force_login(User.objects.create_superuser("boss"))
    for took_ms, is_said in ((3, False), (700, True)):
        overview = stats.survey_topics(broker, me().present_all(None))
        seen = overview._replace(took_ms=took_ms)
        monkeypatch.setattr(shared_reads, "shared_survey_of", Mock(return_value=seen))
        page = client.get(reverse("admin:django_rmq_topic_changelist")).content.decode()
        assert ("as of <time" in page) == is_said


def test_a_process_waits_for_the_survey_that_another_one_makes(
    broker: Broker, made: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_reads, "WAIT_SECONDS", 60.0)
    monkeypatch.setattr(shared_reads, "LEASE_MS", 600_000)
    topics = me().present_all(None)
    name = shared_reads._name(topics)
    assert broker.run(stored_results.begin_request(name, name, "other", 600_000))[0] == "new"
    waits, real = threading.Event(), stored_results.begin_request

    def begin_request(*given: Any) -> Any:
        waits.set()
        return real(*given)

    monkeypatch.setattr(stored_results, "begin_request", begin_request)
    with ThreadPoolExecutor(1) as tab:
        waiting = tab.submit(look)
        assert waits.wait(60)
        assert not waiting.done()
        survey = stats.survey_topics(broker, topics)
        broker.run(stored_results.store_answer(name, "other", shared_reads._written(survey), 600_000))
        assert waiting.result(60) == survey
    assert made == [list(TOPICS)]  # that of the other process


def test_the_survey_of_a_process_that_died_is_made_by_another(
    broker: Broker, made: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_reads, "WAIT_SECONDS", 60.0)
    name = shared_reads._name(me().present_all(None))
    assert broker.run(stored_results.begin_request(name, name, "other", 50))[0] == "new"
    assert [one.store for one in look().topics] == [2, 1, 0]
    assert made == [list(TOPICS)]


def test_threads_that_wait_get_the_error_of_the_one_attempt(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, all_wait, attempts = [], threading.Event(), []
    real = shared_reads._of

    def of(*given: Any) -> Any:
        entered.append(given)
        if len(entered) == TABS:
            all_wait.set()
        return real(*given)

    def survey(*_given: Any) -> stats.Overview:
        assert all_wait.wait(60)
        attempts.append(1)
        raise ServerUnavailable("Redis does not answer: nobody is there")

    monkeypatch.setattr(shared_reads, "_of", of)
    monkeypatch.setattr(stats, "survey_topics", survey)

    def error(_tab: int) -> str:
        with pytest.raises(ServerUnavailable) as raised:
            look()
        return str(raised.value)

    with ThreadPoolExecutor(TABS) as tabs:
        errors = set(tabs.map(error, range(TABS)))
    assert errors == {"Redis does not answer: nobody is there"}
    assert len(attempts) == 1


def test_after_an_error_the_next_survey_is_made(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as away:
        away.setattr(stats, "survey_topics", Mock(side_effect=ServerUnavailable("Redis does not answer")))
        with pytest.raises(ServerUnavailable):
            look()
    assert [one.store for one in look().topics] == [2, 1, 0]


@pytest.mark.parametrize("kept", [b"nonsense", b"[]", b'[1,"",2,3,[[1],[2],[3]]]', b"\xff"])
def test_what_others_have_written_there_is_not_shown(broker: Broker, kept: bytes) -> None:
    name = shared_reads._name(me().present_all(None))
    broker.client.hset(answer_key(broker.prefix, name), mapping={"print": name, "kept": kept})
    assert [one.store for one in look().topics] == [2, 1, 0]


def test_a_redis_that_refuses_writes_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_reads, "_kept", {})
    with RedisServer() as server, override_settings(RMQ={"REDIS": server.url, "TOPICS": TOPICS}):
        redis.Redis.from_url(server.url).config_set("maxmemory", 1)
        assert [one.topic.name for one in look().topics] == list(TOPICS)


@pytest.mark.django_db
def test_a_filtered_page_asks_for_its_rows_only(
    broker: Broker, made: list[list[str]], client: Client
) -> None:
    client.force_login(User.objects.create_superuser("boss"))
    live = reverse("admin:django_rmq_topic_dashboard_live")
    page = client.get(live, {"q": "PAY"}).content.decode()
    assert made == [["pay", "payback"]]
    assert "letters" not in page
    client.get(live, {"q": "letters"})
    client.get(live, {"q": "nothing"})
    client.get(live)
    assert made == [["pay", "payback"], ["letters"], [], list(TOPICS)]
    # Eight pages that are refreshed, and one with the filter of another, ask for nothing more.
    queries: list[dict[str, str]] = [{}] * TABS + [{"q": "pay"}]
    for query in queries:
        assert client.get(live, query).status_code == 200
    assert len(made) == 4


def test_the_schedules_and_the_outbox_are_read_once_for_all_who_look(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_reads, "OTHERS_SECONDS", 600.0)
    outbox, schedules = Mock(return_value=[]), Mock(return_value=[])
    monkeypatch.setattr(shared_reads, "outbox", outbox)
    monkeypatch.setattr(shared_reads, "schedules", schedules)
    with ThreadPoolExecutor(TABS) as tabs:
        for ask in ("shared_outbox", "shared_schedules"):
            assert list(tabs.map(lambda _tab, ask=ask: getattr(me(), ask)(), range(TABS)))
    assert (outbox.call_count, schedules.call_count) == (1, 1)


@pytest.mark.django_db
def test_pages_the_topics_of_rest_and_a_scrape_share_a_survey(broker: Broker, made: list[list[str]]) -> None:
    (seen_ms,) = {one.now_ms for one in look().topics}
    program, collecting = Program(user_with(Permission.VIEW)), RmqCollector()
    for _ in range(2):
        assert [one["name"] for one in program.ok("GET", "topics/")["results"]] == list(TOPICS)
        assert "rmq_messages" in {family.name for family in collecting.collect()}
    assert made == [list(TOPICS)]
    measured = me().measured().topics
    assert {one.sampled_ms for one in measured} == {seen_ms}
    assert all(one.now_ms >= seen_ms for one in measured), "the age of what was measured is known"


@pytest.mark.django_db
def test_the_counters_of_rest_are_read_once_for_all_who_look(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Mock(side_effect=stats.read_counters)
    monkeypatch.setattr(stats, "read_counters", read)
    program = Program(user_with(Permission.VIEW))
    found = [program.ok("GET", "stats/") for _ in range(TABS)]
    ((_broker, topics),) = (call.args for call in read.call_args_list)
    assert [topic.name for topic in topics] == list(TOPICS)
    assert len({one["now_ms"] for one in found}) == 1


def test_a_survey_needs_the_permission_to_see_topics(broker: Broker) -> None:
    look()
    with pytest.raises(NotPermitted):
        Operations(Actor("guest", "test", permits=lambda _permission: False)).shared_survey()


def calls_of(
    broker: Broker,
    topics: Sequence[Topic],
    monkeypatch: pytest.MonkeyPatch,
    read: Callable[[Broker, Sequence[Topic]], object] = stats.survey_topics,
) -> Counter[str]:
    """Return what a survey asks Redis, by the names of scripts and commands."""
    asked: Counter[str] = Counter()
    real = RedisPipeline.add

    def add(self: RedisPipeline, call: Call[Any]) -> Any:
        asked[call.script] += 1
        return real(self, call)

    with monkeypatch.context() as watched:
        watched.setattr(RedisPipeline, "add", add)
        read(broker, topics)
    return asked


def test_what_a_survey_asks_grows_with_what_there_is_and_little_with_the_number_of_slots(
    redis_client: Any, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = Broker(redis_client, prefix)
    topics = [Topic(f"topic-{n:03}", TopicType.FIXED_TIME, slots=16) for n in range(200)]
    for topic in topics[:50]:
        broker.acquire_slots(topic, range(16))  # an empty slot that had an owner is not counted
    for count in (20, 200):
        parts = -(-count * 16 // stats.EMPTY_AT_ONCE)
        of_all = {"workers/roster": 1, "EXISTS": parts, "find_paused": parts}
        assert calls_of(broker, topics[:count], monkeypatch) == of_all
    # Of the 3,200 slots of all topics, the one with a message is found, and from then on counted at once.
    broker.send_replace(topics[7], 3, [1000], [b"1"])
    assert calls_of(broker, topics, monkeypatch) == {**of_all, "find_occupied": 1, "count": 1}
    assert calls_of(broker, topics, monkeypatch) == {**of_all, "count_slots": 1}
    broker.send_replace(topics[7], 4, [1000], [b"2"])
    more = {"count_slots": 1, "find_occupied": 1, "count": 1}
    assert calls_of(broker, topics, monkeypatch) == {**of_all, **more}
    broker.purge(topics[7], 3, "store")
    assert calls_of(broker, topics, monkeypatch) == {**of_all, "count_slots": 1}
    (found,) = (one for one in stats.survey_topics(broker, topics).topics if one.store)
    assert (found.topic, found.store, found.due, found.looked_at) == (topics[7], 1, 1, 16)
    # One script counts slots of several topics.
    for topic in topics[: stats.COUNTED_AT_ONCE]:
        broker.send_replace(topic, 4, [1000], [b"2"])
    stats.survey_topics(broker, topics)
    assert calls_of(broker, topics, monkeypatch) == {**of_all, "count_slots": 1}
    # It does not know what a slot with a foreign key holds. The count of that slot says why.
    broker.client.set(slot_keys(prefix, topics[3].name, 4).dead, "not of RMQ")
    assert calls_of(broker, topics, monkeypatch) == {**of_all, "count_slots": 1, "count": 1}
    surveyed = stats.survey_topics(broker, topics).topics
    assert [one.topic for one in surveyed if one.problems] == [topics[3]]
    assert sum(one.store for one in surveyed) == stats.COUNTED_AT_ONCE - 1


def test_a_survey_counts_each_topic_by_its_own_type_and_timeout(redis_client: Any, prefix: str) -> None:
    broker = Broker(redis_client, prefix)
    kinds = [TopicType.FIXED_TIME, TopicType.PRIORITY]
    topics = [
        Topic(f"{kind}-{timeout}", kind, slots=1, timeout=timeout, serial=False)
        for kind, timeout in product(kinds, (1, 600))
    ]
    for topic in topics:
        broker.send_replace(topic, 0, [1000, 4_000_000_000_000], [b"1", b"2"])
    for _ in range(2):
        found = stats.survey_topics(broker, topics).topics
        assert [one.due for one in found] == [1, 1, 2, 2]
        assert [one.oldest_due_ms is None for one in found] == [False, False, True, True]


def test_a_survey_says_of_each_slot_what_a_count_says(redis_client: Any, prefix: str) -> None:
    broker = Broker(redis_client, prefix)
    topic = Topic("mixed", TopicType.PRIORITY, slots=32)
    assert is_empty(stats.survey_topics(broker, [topic]).topics[0])
    broker.send_replace(topic, 0, [17, 18], [b"1", b"2"])
    broker.pause(topic, 0)
    broker.pause(topic, 9)  # empty
    broker.client.set(slot_keys(prefix, topic.name, 17).control, "not of RMQ")  # empty otherwise
    broker.client.set(slot_keys(prefix, topic.name, 25).dead, "not of RMQ")
    (found,) = stats.survey_topics(broker, [topic]).topics
    assert (found.store, found.due, found.paused_slots, found.looked_at) == (2, 2, 2, 30)
    assert [problem.partition(":")[0] for problem in found.problems] == ["slot 17", "slot 25"]
    for slot in range(32):
        if slot not in (17, 25):
            assert broker.count(topic, slot).paused == (slot in (0, 9))


def test_counters_that_cannot_be_read_are_said_and_the_others_are_summed(
    redis_client: Any, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = Broker(redis_client, prefix)
    topics = [Topic(f"flow-{n}", TopicType.PRIORITY, slots=512) for n in range(2)]
    for topic in topics:
        for slot in (0, 300, 511):
            broker.send_replace(topic, slot, [17], [b"1"])
        broker.commit(topic, 300, broker.prepare(topic, 300, "worker", None, 1).receipt, [b"1"])
    asked = calls_of(broker, topics, monkeypatch, stats.read_counters)
    assert asked == {"history/sample": 4}, "one script for 256 slots"
    broker.client.set(slot_keys(prefix, "flow-1", 511).store, "not of RMQ")
    found = stats.read_counters(broker, topics)
    assert found.counted == {
        "flow-0": {"sent": 3, "done": 1, "failed": 0},
        "flow-1": {"sent": 2, "done": 1, "failed": 0},
    }
    (problem,) = found.problems
    assert problem.startswith("topic flow-1, slot 511: ")
    assert slot_keys(prefix, "flow-1", 511).store.decode() in problem


def is_empty(found: stats.TopicStats) -> bool:
    return not (found.store or found.due or found.paused_slots or found.problems) and found.looked_at == 32


def test_an_answer_is_forgotten_when_a_later_look_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_reads, "KEPT_MS", 600_000)
    answers: Iterator[str | RmqError] = iter(["old", WrongType("no hash"), "new"])

    def ask() -> str:
        answer = next(answers)
        if isinstance(answer, RmqError):
            raise answer
        return answer

    assert shared_reads.share_answer(("a question",), ask, 0.0) == "old"
    with pytest.raises(WrongType):
        shared_reads.share_answer(("a question",), ask, 0.0)
    assert shared_reads.share_answer(("a question",), ask, 600.0) == "new"
