"""Collects the metrics for Prometheus, limits how often Redis is queried for them, and shows them on a page of their own.

The metrics of the outbox are read from the databases of the project, so they exist without Redis, too.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from secrets import compare_digest
from typing import Literal, NamedTuple, TypeVar

from django.contrib.auth.decorators import login_not_required
from django.http import HttpRequest, HttpResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from django_rmq.conf import get_config
from django_rmq.core.model.server_checks import ServerInfo
from django_rmq.exceptions import RmqError
from django_rmq.operations import Actor, Operations, Permission, ScheduleStats, TopicMetrics, Waiting
from django_rmq.operations.authorization import topic_rule
from django_rmq.operations.measurements import EDGES_MS

logger = logging.getLogger("django_rmq.metrics")

T = TypeVar("T")

OUTBOX_STATES = ("waiting", "refused")
"""The states of messages in the outbox: for the relay or their sender, and left out by the relay."""

OUTBOX_SECONDS = 2.0
"""Maximum seconds for which a scrape waits for the databases."""


def read_outbox(operations: Operations) -> list[Waiting]:
    """Return what is in the outbox of each topic that has one, or had. Empty also if a database does not answer.

    What only some of the databases have is not reported: too small a number would end an alert.
    """
    known_topics = [name for name, topic in operations.config.topics.items() if topic.outbox]
    if not known_topics:
        return []
    waits, problems = operations.outbox_as_known(seconds=OUTBOX_SECONDS)
    if problems:
        logger.warning("Metrics of the outbox are missing: %s", "; ".join(problems))
        return []
    waits_of = {one.topic: one for one in waits}
    return [waits_of.get(name) or Waiting(name) for name in dict.fromkeys([*known_topics, *waits_of])]


class MetricTable(NamedTuple):
    """The samples of a gauge or a counter."""

    kind: Literal["gauge", "counter"]
    name: str
    text: str
    labels: tuple[str, ...]
    rows: Sequence[tuple[tuple[str, ...], float]]
    """The values of the labels, and that of the sample."""

    def family(self) -> Metric:
        """Return the samples as the client of Prometheus has them."""
        make = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        family = make(self.name, self.text, labels=self.labels)
        for values, value in self.rows:
            family.add_metric(values, value)
        return family

    def lines(self) -> Iterable[str]:
        """Return each sample as a line."""
        name = f"{self.name}_total" if self.kind == "counter" else self.name
        labels = ",".join(f'{label}="%s"' for label in self.labels)
        line = f"{name}{{{labels}}} %s\n" if labels else f"{name} %s\n"
        return [line % (*map(_escaped, values), float(value)) for values, value in self.rows]


class HistogramTable(NamedTuple):
    """The samples of a histogram of durations, with the classes of the history."""

    name: str
    text: str
    rows: list[tuple[str, Sequence[int], float]]
    """Topic, the number of values in each class, and the sum of the values in seconds."""
    kind: Literal["histogram"] = "histogram"

    def family(self) -> Metric:
        """Return the samples as the client of Prometheus has them."""
        family = HistogramMetricFamily(self.name, self.text, labels=("topic",))
        for topic, counts, seconds in self.rows:
            reached = map(float, accumulate(counts))
            family.add_metric((topic,), [*zip(_EDGES, reached, strict=True)], seconds)
        return family

    def lines(self) -> Iterable[str]:
        """Return the samples of each topic as lines."""
        buckets = "".join(f'{self.name}_bucket{{topic="{_NAME}",le="{edge}"}} %d.0\n' for edge in _EDGES)
        whole = f'{buckets}{self.name}_count{{topic="{_NAME}"}} %d.0\n{self.name}_sum{{topic="{_NAME}"}} %s\n'
        for topic, counts, seconds in self.rows:
            reached = [*accumulate(counts)]
            yield whole.replace(_NAME, topic) % (*reached, reached[-1], float(seconds))


_NAME = "\0"
"""Stands for the name of a topic, which has nothing that must be escaped, in lines that are made once for all topics."""

_EDGES = [*(str(edge / 1000) for edge in EDGES_MS), "+Inf"]
"""The upper edges of the classes of durations, in seconds."""

Table = MetricTable | HistogramTable


def _escaped(value: str) -> str:
    """Return the value of a label as it stands between quotes."""
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def text_of(tables: Iterable[Table], *, is_openmetrics: bool) -> bytes:
    """Return the text of metrics: quicker than that of the client of Prometheus, which most of a scrape was spent in."""
    lines = []
    for table in tables:
        # In the older format a counter is named by its samples.
        name = f"{table.name}_total" if table.kind == "counter" and not is_openmetrics else table.name
        lines.append(f"# HELP {name} {table.text}\n# TYPE {name} {table.kind}\n")
        lines += table.lines()
    if is_openmetrics:
        lines.append("# EOF\n")
    return "".join(lines).encode()


def _single(name: str, text: str, value: float) -> MetricTable:
    """Return a gauge without labels."""
    return MetricTable("gauge", name, text, (), [((), value)])


def outbox_tables(waits: list[Waiting]) -> Iterable[Table]:
    """Return the metrics of what is in the outbox."""
    yield _gauge(
        "outbox_messages",
        "Messages in the outbox by state: waiting (for the relay or their sender), refused (left out by the relay).",
        (
            ((one.topic, state), count)
            for one in waits
            for state, count in zip(OUTBOX_STATES, (one.messages, one.refused), strict=True)
        ),
        "state",
    )
    yield _gauge(
        "outbox_oldest_seconds",
        "Time since the oldest message that waits in the outbox was sent; 0 if none waits.",
        (((one.topic,), (one.oldest_ms or 0) / 1000) for one in waits),
    )


def _seconds(ms: int | None) -> float | None:
    return None if ms is None else ms / 1000


_SCHEDULE_GAUGES: dict[str, tuple[str, Callable[[ScheduleStats], float | None]]] = {
    "next_timestamp_seconds": (
        "When the schedule runs next; none for one that is paused.",
        lambda one: _seconds(one.next_ms),
    ),
    "last_timestamp_seconds": (
        "When the schedule was due last; none before its first run.",
        lambda one: _seconds(one.last_ms),
    ),
    "lateness_seconds": (
        "How much later than its time the latest tick of the schedule came into the queue, or is overdue.",
        lambda one: _seconds(one.late_ms),
    ),
    "paused": ("1 if the schedule is paused, else 0.", lambda one: one.is_paused),
    "missing": (
        "1 if the schedule is declared and Redis does not know it, else 0.",
        lambda one: one.is_missing,
    ),
    "last_run_dead": (
        "1 if the latest run of the schedule that has ended is dead, else 0.",
        lambda one: one.outcome == "dead",
    ),
}
"""Metric without prefix → help, and its value for a schedule."""


def schedule_tables(schedules: list[ScheduleStats]) -> Iterable[Table]:
    """Return the metrics of schedules. Of one that Redis does not know, only that is known."""
    for name, (text, value) in _SCHEDULE_GAUGES.items():
        values = ((one, value(one)) for one in schedules if name == "missing" or not one.is_missing)
        rows = [((one.name, one.topic), float(number)) for one, number in values if number is not None]
        yield MetricTable("gauge", f"rmq_schedule_{name}", text, ("schedule", "topic"), rows)


CACHE_SECONDS = 1.0
"""Maximum age of an answer in seconds; more frequent scrapes get the same values."""

COUNTERS: dict[str, tuple[str, str]] = {
    "messages_sent": ("sent", "Messages accepted from senders, including those that merged."),
    "messages_merged": ("merged", "Sent messages that merged with a waiting one."),
    "messages_died": ("died", "Messages that went to Dead."),
    "messages_replayed": ("replayed", "Dead messages that were sent again."),
    "deliveries": ("handed_out", "Deliveries to listeners, to Spark and through REST."),
    "deliveries_committed": ("committed", "Deliveries that ended successfully."),
    "deliveries_cancelled": (
        "cancelled",
        "Deliveries that were cancelled, and whose listener did not succeed.",
    ),
    "deliveries_released": ("released", "Deliveries that were given back before their listener began."),
    "reports_stale": (
        "stale",
        "Reports on deliveries that had already ended, because the work took too long.",
    ),
    "calls_fenced": ("fenced", "Calls of a worker that were refused because another worker owns the slot."),
}
"""Metric without prefix and suffix → field of ``Totals``, help."""

STATES = {"waiting": "store", "running": "prepare", "claimed": "claimed", "resting": "retry", "dead": "dead"}
"""Value of the label ``state`` → field of ``Depth`` and of the figures."""


class _Measurement(NamedTuple):
    config: object
    """The settings with which they were collected; other settings cause a new collection at once."""
    until: float
    measured: list[TopicMetrics] | None
    workers: int | None
    outbox: list[Waiting]
    """What is in the outbox. Empty also if the project has none, or its database cannot be asked."""
    schedules: list[ScheduleStats]
    servers: list[ServerInfo]
    """What Redis reports about itself. Empty: its user may not ask, or it does not answer."""
    seconds: float


class RmqCollector(Collector):
    """Collects the metrics of all topics of the settings.

    Redis is queried at most once a second, by one thread at a time: for the slots of small topics, which are up to 8,192
    together, and for 256 slots of each other topic. While it is
    unavailable the only metrics are ``rmq_up`` 0 and those of the outbox. Registering it sends no query.
    """

    def __init__(self) -> None:
        self._measurement: _Measurement | None = None
        self._measuring = threading.Lock()

    def describe(self) -> Iterable[Metric]:
        """Return nothing, because the metrics depend on the topics."""
        # Without this method, the default registry would collect, and so query Redis, at the registration.
        return []

    def collect(self) -> Iterable[Metric]:
        return (table.family() for table in self.tables())

    def tables(self) -> Iterable[Table]:
        """Return all metrics."""
        recent = self._recent_measurement()
        measurement = recent.measured
        yield _single("rmq_up", "1 if Redis answered, else 0.", int(measurement is not None))
        if recent.outbox:
            yield from outbox_tables(recent.outbox)
        if measurement is None:
            return
        yield _single(
            "rmq_scrape_duration_seconds", "Duration of the queries to Redis for this scrape.", recent.seconds
        )
        yield from _servers(recent.servers)
        if recent.workers is not None:
            yield _single("rmq_workers", "Live worker processes.", recent.workers)
        if recent.schedules:
            yield from schedule_tables(recent.schedules)
        yield from _depths(measurement)
        yield from _slots(measurement)
        yield from _counters(measurement)
        yield from _histograms(measurement)

    def _recent_measurement(self) -> _Measurement:
        with self._measuring:
            measurement, config = self._measurement, _operations().config
            if (
                measurement is None
                or measurement.config is not config
                or time.monotonic() >= measurement.until
            ):
                measurement = self._measurement = self._measure(config)
            return measurement

    @staticmethod
    def _measure(config: object) -> _Measurement:
        began, operations = time.monotonic(), _operations()
        measured: list[TopicMetrics] | None = None
        workers = None
        try:
            measured, workers, problem = operations.measured()
            if problem:
                logger.warning("The number of workers is unknown: %s", problem)
            for one in measured:
                for problem in one.problems:
                    logger.warning("Metrics of topic %s are missing: %s", one.figures.topic.name, problem)
        except RmqError as error:
            logger.warning("Metrics cannot be read: %s", error)
        is_up, topics = measured is not None, operations.config.topics
        schedules = _read("schedules", lambda: operations.schedules(topics)) if is_up else []
        servers = _read("the server", operations.servers) if is_up else []
        # The duration is that of the queries to Redis, so the databases of the outbox are asked after its end.
        now = time.monotonic()
        outbox = read_outbox(operations)
        return _Measurement(
            config, now + CACHE_SECONDS, measured, workers, outbox, schedules, servers, now - began
        )


def scrape(collector: RmqCollector, *, is_openmetrics: bool) -> bytes:
    """Return the text of all metrics of a collector."""
    return text_of(collector.tables(), is_openmetrics=is_openmetrics)


def _read(what: str, ask: Callable[[], list[T] | None]) -> list[T]:
    """Return what some metrics are made of; empty also if it cannot be read."""
    try:
        return ask() or []
    except RmqError as error:
        logger.warning("Metrics of %s cannot be read: %s", what, error)
        return []


def _operations() -> Operations:
    return Operations(Actor("prometheus", "metrics"))


_SERVER_GAUGES: dict[str, tuple[str, Callable[[ServerInfo], float | None]]] = {
    "writable": ("1 if the server takes writes, 0 if it refuses them.", lambda one: not one.refusals),
    "memory_used_bytes": ("Memory of the server that counts for its limit.", lambda one: one.memory_used),
    "memory_limit_bytes": ("Its limit, maxmemory; none without one.", lambda one: one.memory_limit),
    "deleted_keys": (
        "Keys deleted since its start to make room; none if its policy spares messages.",
        lambda one: one.deleted_keys,
    ),
}


def _servers(servers: list[ServerInfo]) -> Iterable[Table]:
    reached = [one for one in servers if "role" in one.info]
    for name, (text, value) in _SERVER_GAUGES.items():
        values = ((one, value(one)) for one in reached)
        rows = [((one.node,), float(number)) for one, number in values if number is not None]
        yield MetricTable("gauge", f"rmq_redis_{name}", text, ("node",), rows)


def _gauge(name: str, text: str, rows: Iterable[tuple[tuple[str, ...], float]], *labels: str) -> MetricTable:
    return MetricTable("gauge", f"rmq_{name}", text, ("topic", *labels), [*rows])


def _of_topics(
    name: str, text: str, topics: Iterable[TopicMetrics], value: Callable[[TopicMetrics], float]
) -> MetricTable:
    """Return a gauge that has one value for each of these topics."""
    return _gauge(name, text, (((one.figures.topic.name,), value(one)) for one in topics))


def _depths(topics: list[TopicMetrics]) -> Iterable[Table]:
    # Figures of a part of the slots are left out: a sample of the workers, which has the totals as well, stands for them.
    counted = [one for one in topics if one.totals is not None or not one.figures.is_partial]
    yield _gauge(
        "messages",
        "Messages by state: waiting, running, claimed (held by Spark), resting (after a failure), dead.",
        (
            ((one.figures.topic.name, state), getattr(one.depth or one.figures, field))
            for one in counted
            for state, field in STATES.items()
        ),
        "state",
    )
    yield _of_topics(
        "messages_due",
        "Messages that could be taken now: waiting, rested after a failure, timed out in flight, or without their lease.",
        counted,
        lambda one: (one.depth or one.figures).due,
    )
    yield _of_topics(
        "oldest_due_age_seconds",
        "Time since the most overdue message of a time topic became due; 0 if no message is due.",
        [one for one in topics if not one.figures.topic.is_priority],
        lambda one: _age(one, "age_ms", "oldest_due_ms"),
    )
    yield _of_topics(
        "undrained_seconds",
        "Longest time for which a slot of a priority topic has not been empty; 0 if no message waits.",
        [one for one in topics if one.figures.topic.is_priority],
        lambda one: _age(one, "undrained_ms", "undrained_since_ms"),
    )
    yield _of_topics(
        "oldest_running_seconds",
        "Time since the first delivery began that runs now, however often it was extended; 0 if nothing runs.",
        topics,
        lambda one: (one.figures.running_ms or 0) / 1000,
    )
    yield _of_topics(
        "messages_unleased",
        "Claimed messages whose lease has ended, and that have not come back yet.",
        topics,
        lambda one: one.figures.unleased,
    )
    yield _of_topics(
        "measured_age_seconds",
        "Age of depths: 3 s, at most 11; of topics with very many slots also of counters, which workers sample every minute.",
        counted,
        lambda one: max(0, one.now_ms - one.sampled_ms) / 1000,
    )


def _slots(topics: list[TopicMetrics]) -> Iterable[Table]:
    yield _of_topics("slots", "Slots.", topics, lambda one: one.figures.topic.slots)
    served = [one for one in topics if not one.figures.workers_problem]
    serial = [one for one in served if one.figures.topic.serial]
    text = "Slots of a serial topic that are assigned to"
    yield _of_topics("slots_owned", f"{text} a live worker.", serial, lambda one: one.figures.owned_slots)
    yield _of_topics(
        "slots_unowned",
        f"{text} no live worker.",
        serial,
        lambda one: one.figures.topic.slots - one.figures.owned_slots,
    )
    yield _of_topics(
        "slots_paused",
        "Slots that deliver nothing until they are resumed; an estimate for topics with very many slots.",
        topics,
        lambda one: round(one.figures.paused_slots * one.figures.topic.slots / max(1, one.figures.looked_at)),
    )
    text = "Slots that could not be read."
    yield _of_topics("slots_unreadable", text, topics, lambda one: len(one.figures.problems))
    text = "Live worker processes that serve the topic."
    yield _of_topics("topic_workers", text, served, lambda one: one.figures.consumers)
    yield _of_topics("topic_threads", "Threads of these workers.", served, lambda one: one.figures.threads)


def _age(one: TopicMetrics, age: str, since: str) -> float:
    """Return seconds: an age of the figures, or of a large topic the time from an instant until its last sample."""
    if one.depth is None:
        return (getattr(one.figures, age) or 0) / 1000
    since_ms = getattr(one.depth, since)
    return 0.0 if since_ms is None else max(0, one.sampled_ms - since_ms) / 1000


def _counters(topics: list[TopicMetrics]) -> Iterable[Table]:
    totals_of_topics = [(one.figures.topic.name, one.totals) for one in topics if one.totals is not None]
    for name, (field, text) in COUNTERS.items():
        rows = [((topic,), getattr(totals, field)) for topic, totals in totals_of_topics]
        yield MetricTable("counter", f"rmq_{name}", text, ("topic",), rows)
    failed = list[tuple[tuple[str, str], float]]()
    for topic, totals in totals_of_topics:
        # ``failed`` counts the deliveries of all four reasons.
        error = totals.failed - totals.expired - totals.rejected - totals.overran
        failed.append(((topic, "error"), error))
        failed.append(((topic, "overran"), totals.overran))
        failed.append(((topic, "timeout"), totals.expired))
        failed.append(((topic, "rejected"), totals.rejected))
    yield MetricTable(
        "counter",
        "rmq_deliveries_failed",
        "Deliveries that failed, by reason: error (of the listener), timeout, overran (HARD_TIMEOUT), rejected.",
        ("topic", "reason"),
        failed,
    )


def _histograms(topics: list[TopicMetrics]) -> Iterable[Table]:
    histories = [(one.figures.topic, one.times) for one in topics if one.times is not None]
    yield HistogramTable(
        "rmq_delivery_lateness_seconds",
        "Time from the due time of a message to its first delivery.",
        [
            (topic.name, times.late, times.late_ms / 1000)
            for topic, times in histories
            if not topic.is_priority
        ],
    )
    yield HistogramTable(
        "rmq_listener_duration_seconds",
        "Duration of calls of the listener.",
        [(topic.name, times.took, times.took_us / 1_000_000) for topic, times in histories],
    )


_collector = RmqCollector()


@require_safe
@never_cache
# Prometheus cannot log in, and LoginRequiredMiddleware would lead it to the login page.
@login_not_required
def metrics(request: HttpRequest) -> HttpResponse:
    """Return the metrics. The status is 200 for users who may see all topics and for requests with the token.

    Other requests get 403, or 401 if a token would permit them.
    """
    if not _may_see(request):
        if get_config().metrics.token is None:
            return HttpResponse("Forbidden.\n", status=403, content_type="text/plain")
        refused = HttpResponse("Bearer token required.\n", status=401, content_type="text/plain")
        refused["WWW-Authenticate"] = 'Bearer realm="RMQ metrics"'
        return refused
    return page(request)


def page(request: HttpRequest) -> HttpResponse:
    """Return all metrics, in the format that the request accepts."""
    _, content_type = choose_encoder(request.headers.get("Accept", ""))
    is_openmetrics = content_type.startswith("application/openmetrics-text")
    return HttpResponse(scrape(_collector, is_openmetrics=is_openmetrics), content_type=content_type)


def shows_token(request: HttpRequest) -> bool:
    """Return whether the request contains ``METRICS["TOKEN"]``."""
    token, header = get_config().metrics.token, request.headers.get("Authorization", "")
    scheme, _, value = header.partition(" ")
    # ``compare_digest`` does not reveal by its time how much is right. Of texts it takes only ASCII, so these are bytes.
    return token is not None and scheme.lower() == "bearer" and compare_digest(value.encode(), token.encode())


def _may_see(request: HttpRequest) -> bool:
    if shows_token(request):
        return True
    # Without AuthenticationMiddleware a request has no user.
    user = getattr(request, "user", None)
    if user is None:
        return False
    actor = Actor.of_user(user, "metrics", topic_rule(request))
    operations = Operations(actor)
    return actor.may(Permission.VIEW) and len(operations.topics()) == len(operations.config.topics)
