"""Pipelines: what each of them is, the registry of those of the package and of apps, and the ``Context`` of a run."""

from __future__ import annotations

import inspect
import json
import os
import threading
import time
from abc import ABC, abstractmethod
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from django.apps import apps
from django.utils.module_loading import module_has_submodule

from django_rmq import connections
from django_rmq.conf import get_config
from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.model import redis_url
from django_rmq.core.model.envelope import MARK
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import ConfigurationError
from django_rmq.operations import Actor
from django_rmq.spark.foreach_batch import MALFORMED

if TYPE_CHECKING:
    from pyspark import StatusTracker
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from django_rmq.spark.acknowledger import Acknowledger


KEY_TEXT = f"case when not startswith(key, X'{MARK.hex()}') then cast(key as string) end as key"
"""The key as text. NULL for a message that was sent without one: its column has the member that identifies it."""

LOOK_SECONDS = 0.1

PROGRESS_SECONDS = 2.0
"""Seconds between two lines about the progress of a batch job."""


class Stopped(Exception):
    """The end was requested, and nothing is left to tidy up."""


@dataclass
class Context:
    """A run of one pipeline. Everything is started when it is first needed, so arguments can be refused without a Java."""

    name: str
    master: str | None = None
    """The Spark master. None: all cores of this machine."""
    remote: str | None = None
    """The address of a Spark Connect server, instead of a master."""
    conf: Mapping[str, str] = field(default_factory=dict)
    checkpoint: str | None = None
    """Where a stream, or an ingest, stores its progress."""
    available_now: bool = False
    """Whether to end when everything due now is done; otherwise it runs until stopped."""
    interval: float | None = None
    """Minimum seconds from the beginning of a batch to that of the next."""
    grace: float = 30.0
    """Seconds that a running batch may take to end when a stop is requested."""
    actor: Actor = field(default_factory=lambda: Actor("a pipeline", "command"))
    """The actor in the audit trail."""
    say: Callable[[str], None] = print
    """Writes a line of progress."""
    show: Callable[[str], object] = print
    """Writes a line of the result, which programs may read."""
    _stop: threading.Event = field(default_factory=threading.Event)
    _borrowed: bool = False
    """Whether the session existed before, so that it must not be ended here."""

    # --- topics

    @property
    def broker(self) -> Broker:
        """The driver's broker."""
        return connections.get_broker("worker")

    def topic(self, name: str) -> Topic:
        """Return a topic of the settings, with its current slots, after checking that Redis has the same definition.

        Raises ``UnknownTopic``, ``TopicMismatch`` and ``ServerTrouble``.
        """
        topic = get_config().topic(name)
        connections.agree(topic)
        return connections.with_present_slots(topic)

    def connection(self) -> dict[str, str]:
        """Return the options for the connection to Redis. Raises ``ConfigurationError``."""
        return connection_options()

    def options(self, *topics: str) -> dict[str, str]:
        """Return the options of ``format("rmq")`` for these topics, for reads and streams."""
        return {**self.connection(), "topic": ",".join(self.topic(name).name for name in topics)}

    def sending_options(self, name: str, **options: object) -> dict[str, str]:
        """Return the options of a write, which include settings of a topic that are not in Redis."""
        topic = self.topic(name)
        local = {
            "defaultPriority": topic.default_priority,
            "timeRange": None if topic.time_range_ms is None else f"{topic.time_range_ms}ms",
            "maxBody": topic.max_body,
            "maxBacklog": topic.max_backlog,
        }
        return {**self.options(name), **_texts(local), **_texts(options)}

    # --- Spark

    @cached_property
    def spark(self) -> SparkSession:
        """The session, which starts when it is first used. Raises ``ConfigurationError``."""
        from django_rmq.spark.java import is_begun, open_session

        self._borrowed = is_begun()
        return open_session(f"rmq-{self.name}", master=self.master, remote=self.remote, conf=self.conf)

    def read(self, *topics: str, **options: object) -> DataFrame:
        """Return a frame of messages, changing nothing; ``options`` like ``queues="dead"``, ``includeMetadata=True``."""
        reader = self.spark.read.format("rmq").options(**self.options(*topics), **_texts(options))
        return reader.load()

    def stream(self, topic: str, **options: object) -> DataFrame:
        """Return a streaming frame that consumes ``topic``; pass it to ``follow`` with a sink."""
        reader = self.spark.readStream.format("rmq").options(**self.options(topic), **_texts(options))
        return reader.load()

    def write(self, frame: DataFrame, topic: str, **options: object) -> None:
        """Send the rows of a frame: ``value``, and depending on the topic ``priority``, ``fixed_time``, ``key`` …"""
        with self.watching():
            writer = frame.write.format("rmq").options(**self.sending_options(topic, **options))
            writer.mode("append").save()

    @contextmanager
    def kept(self, frame: DataFrame) -> Iterator[DataFrame]:
        """Cache the rows of a frame for the jobs of a block, so that only the first one reads it.

        A Spark Connect server caches for all clients: what an earlier run has cached of the same files is
        released first.
        """
        frame.unpersist()
        cached = frame.persist()
        try:
            yield cached
        finally:
            # Spark may be gone, and its cache with it.
            with suppress(Exception):
                cached.unpersist()

    # --- the end

    @property
    def is_stopping(self) -> bool:
        """Whether the end was requested; checked between two steps."""
        return self._stop.is_set()

    def stop(self) -> None:
        """Request the end; from any thread or signal handler."""
        self._stop.set()

    def wait(self, seconds: float) -> None:
        """Wait for this time, none if it is negative. Raises ``Stopped`` as soon as a stop is requested."""
        end = time.monotonic() + seconds
        # Not by the event itself: a signal handler that sets it could find its lock held by this wait.
        while not self.is_stopping and (rest := end - time.monotonic()) > 0:
            time.sleep(min(rest, LOOK_SECONDS))
        if self.is_stopping:
            raise Stopped

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Report the progress of Spark's jobs meanwhile, and cancel them if a stop is requested (raises ``Stopped``)."""
        spark, done = self.spark, threading.Event()
        watcher = threading.Thread(target=self._watch, args=(spark, done), name="rmq-pipeline", daemon=True)
        watcher.start()
        try:
            yield
        except Exception as error:
            if self.is_stopping:
                raise Stopped from error
            raise
        finally:
            done.set()
            watcher.join(10)
        if self.is_stopping:
            raise Stopped

    def _watch(self, spark: SparkSession, done: threading.Event) -> None:
        reported = time.monotonic()
        while not done.wait(LOOK_SECONDS):
            if self.is_stopping:
                # A session of a Spark Connect server has no SparkContext.
                if self.remote is not None:
                    spark.interruptAll()
                else:
                    spark.sparkContext.cancelAllJobs()
            elif self.remote is None and time.monotonic() - reported >= PROGRESS_SECONDS:
                reported = time.monotonic()
                self._say_tasks(spark.sparkContext.statusTracker())

    def _say_tasks(self, tracker: StatusTracker) -> None:
        stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
        for stage in stages:
            if stage is not None and stage.numTasks:
                self.say(f"{stage.numCompletedTasks} of {stage.numTasks} tasks")

    def follow(self, writer: DataStreamWriter, *topics: str) -> int:
        """Start a stream's writer and report its batches; return how many messages it had when it ends.

        When a stop is requested, the running batch may end (``grace``). What Spark has recorded is
        acknowledged to ``topics``, which it consumes, after each batch. Raises the errors of the query.
        """
        # PySpark is not installed in every process that lists pipelines.
        from django_rmq.spark.acknowledger import Acknowledger

        acknowledger = Acknowledger(self.options(*topics)) if topics else None
        if self.checkpoint is not None:
            writer = writer.option("checkpointLocation", self.checkpoint)
        if self.available_now:
            writer = writer.trigger(availableNow=True)
        elif self.interval is not None:
            writer = writer.trigger(processingTime=f"{round(self.interval * 1000)} milliseconds")
        query = writer.start()
        seen, said = 0, -1
        try:
            # PySpark declares whole seconds, and takes fractions.
            while not query.awaitTermination(LOOK_SECONDS):  # type: ignore[arg-type]
                seen, said = self._say_batches(query, acknowledger, seen, said)
                if self.is_stopping:
                    self._let_end(query)
                    break
        except Exception:
            # Ctrl-C reaches Spark's own processes too, and may end a query.
            if not self.is_stopping:
                raise
        finally:
            query.stop()
        seen, _ = self._say_batches(query, acknowledger, seen, said)
        last = query.lastProgress
        if acknowledger is not None and last is not None:
            # If Redis was unavailable at that moment, this waits for it.
            acknowledger.acknowledge(last)
        return seen

    def _say_batches(
        self, query: StreamingQuery, acknowledger: Acknowledger | None, seen: int, said: int
    ) -> tuple[int, int]:
        for progress in query.recentProgress:
            # For each source, because a Spark Connect server reports no sums.
            read = sum(source["numInputRows"] for source in progress["sources"])
            if progress["batchId"] > said and read:
                said = progress["batchId"]
                # Spark counts rows as often as a function reads them.
                rows = sum(_rows_of(source) for source in progress["sources"])
                seen += rows
                rate = 1000 * rows / max(1, progress["batchDuration"])
                waiting = [_waiting(source["latestOffset"]) for source in progress["sources"]]
                self.say(f"batch {said}: {rows} messages, {rate:.0f}/s{''.join(waiting)}")
                observed = progress["observedMetrics"].get(MALFORMED)
                # The progress of a Spark Connect server has the metric without its value.
                bodies = 0 if observed is None else observed.asDict().get("bodies", 0)
                if bodies:
                    self.say(f"batch {said}: {bodies} bodies do not fit the schema and are stored unchanged")
                if acknowledger is not None:
                    acknowledger.note(progress)
        return seen, said

    def _let_end(self, query: StreamingQuery) -> None:
        """Return when the running batch has ended, or its time is up."""
        last, end = query.lastProgress, time.monotonic() + self.grace
        while query.isActive and query.status["isTriggerActive"] and time.monotonic() < end:
            newest = query.lastProgress
            if newest is not None and (last is None or newest["timestamp"] != last["timestamp"]):
                return
            time.sleep(LOOK_SECONDS / 4)

    def close(self) -> None:
        """End the session, if one was begun here."""
        session = self.__dict__.pop("spark", None)
        if session is not None and not self._borrowed:
            from django_rmq.spark.java import close_session

            close_session(session)


INFERS_PARTITIONS = "spark.sql.sources.partitionColumnTypeInference.enabled"


def stored_files(session: SparkSession, path: str) -> DataFrame | None:
    """Return the Parquet files of a folder as a frame, names of folders as text. None: there are none yet."""
    from pyspark.errors import AnalysisException
    from pyspark.sql import SparkSession

    before: Any = session.conf.get(INFERS_PARTITIONS)
    # A topic may be called 007, which must not be read as a number.
    session.conf.set(INFERS_PARTITIONS, "false")
    try:
        files = session.read.option("basePath", path).parquet(path)
        files.schema  # noqa: B018 - a Spark Connect server looks at the files only when it is asked for something
        return files
    except AnalysisException as error:
        if error.getCondition() in ("PATH_NOT_FOUND", "UNABLE_TO_INFER_SCHEMA"):
            return None
        raise
    finally:
        if isinstance(session, SparkSession):
            # A Spark Connect session is a separate class, and reads the list of files again for each job.
            session.conf.set(INFERS_PARTITIONS, before)


def connection_options() -> dict[str, str]:
    """Return the connection to the Redis of the settings, as options of ``format("rmq")``.

    Raises ``ConfigurationError`` for settings that cannot be passed to tasks: a broker in memory, or options of
    connections that are not JSON. A credential provider is an object of this process; tasks make their own.
    """
    config = get_config()
    if config.broker == "memory" or config.redis is None:
        raise ConfigurationError(
            'Spark needs Redis, but RMQ["BROKER"] is "memory", which other processes cannot use'
        )
    server = config.redis
    pool: dict[str, object] = {**server.pool}
    provider = os.environ.get("RMQ_CREDENTIAL_PROVIDER")
    if pool.pop("credential_provider", None) is not None and not provider:
        raise ConfigurationError(
            "CONNECTION_POOL_KWARGS has a credential_provider, an object that cannot be passed to Spark's tasks: set "
            "RMQ_CREDENTIAL_PROVIDER to the dotted path of a function or class without arguments that makes one"
        )
    pool |= {name: getattr(server, name) for name in redis_url.LOGIN if getattr(server, name)}
    urls = []
    for url in server.cluster or (server.url,):
        address = redis_url.without_login(url)
        urls.append(address.url)
        pool |= address.options
    options = {"prefix": config.key_prefix, "url": ",".join(urls)}
    options |= {name: str(pool.pop(name)) for name in redis_url.LOGIN if pool.get(name)}
    if server.cluster:
        options["cluster"] = "true"
    if provider:
        options["credentialProvider"] = provider
    if server.sentinels:
        options["sentinels"] = ",".join(f"{host}:{port}" for host, port in server.sentinels)
    # Spark hides the values of options with certain names, and it is unknown which of these options are
    # secret.
    options |= _secret("secretConnectionOptions", "CONNECTION_POOL_KWARGS", pool)
    return options | _secret("secretSentinelOptions", "SENTINEL_KWARGS", server.sentinel_options)


def _secret(option: str, setting: str, values: Mapping[str, object]) -> dict[str, str]:
    if not values:
        return {}
    try:
        return {option: json.dumps(dict(values))}
    except TypeError as error:
        raise ConfigurationError(f"{setting} cannot be passed to Spark's tasks: {error}") from None


def _rows_of(source: Any) -> int:
    """Return how many messages a source gave to a batch; of a source that is not ours how many rows were read."""
    read = int(source["numInputRows"])
    rows = _object_in(source["endOffset"]).get("rows")
    return min(read, rows) if isinstance(rows, int) else read


def _waiting(backlog: str | None) -> str:
    """Return what a source of ours reports as its latest offset, in words."""
    counts = _object_in(backlog)
    return f", {counts['waiting']} wait" if "waiting" in counts else ""


def _object_in(offset: str | None) -> dict[str, Any]:
    """Return the JSON object of an offset. Another source may report any text, which has none."""
    with suppress(ValueError):
        value = json.loads(offset or "null")
        return value if isinstance(value, dict) else {}
    return {}


def _texts(options: Mapping[str, object]) -> dict[str, str]:
    return {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in options.items()
        if value is not None
    }


MODULE = "pipelines"
"""The name of the modules in which apps define their pipelines."""

BUILT_IN = ("archive", "consume", "ingest", "report")
"""The modules of the built-in pipelines."""

Options = dict[str, Any]
"""The arguments of a pipeline as argparse has read them."""


class Pipeline(ABC):
    """A Spark job. The first line of its docstring is shown in lists, all of it as help."""

    name: ClassVar[str]

    def add_arguments(self, parser: ArgumentParser) -> None:  # noqa: B027 - a pipeline may have none
        """Add arguments to those of all pipelines. ``type="duration"`` reads seconds from 90, 15m or 7d."""

    @abstractmethod
    def run(self, context: Context, **options: object) -> None:
        """Run the pipeline; ``options`` are its own arguments.

        Raises ``RmqError``, or errors of Spark.
        """


Class = TypeVar("Class", bound=type[Pipeline])

_pipelines: dict[str, type[Pipeline]] = {}


def register(pipeline: Class) -> Class:
    """Register a class for ``runrmqpipeline``; a decorator. Raises ``ConfigurationError`` for a name that is taken."""
    name: object = getattr(pipeline, "name", None)
    if not isinstance(name, str) or not name:
        raise ConfigurationError(f"pipeline {pipeline.__qualname__} has no name")
    other = _pipelines.get(name)
    if other is not None and _place(other) != _place(pipeline):
        raise ConfigurationError(
            f'two pipelines have the name "{name}": {_place(other)} and {_place(pipeline)}'
        )
    _pipelines[name] = pipeline
    return pipeline


def pipelines() -> dict[str, type[Pipeline]]:
    """Return all pipelines by name: the built-in ones, and those of the installed apps.

    Raises ``ConfigurationError`` for a module of an app that cannot be imported.
    """
    for module in BUILT_IN:
        import_module(f"{__package__}.{module}")
    for app in apps.get_app_configs():
        if app.module is None or app.name == "django_rmq" or not module_has_submodule(app.module, MODULE):
            continue
        module = f"{app.name}.{MODULE}"
        try:
            import_module(module)
        except ConfigurationError:
            raise
        except Exception as error:
            raise ConfigurationError(f"{module} cannot be imported: {error}") from error
    return dict(sorted(_pipelines.items()))


def summary(pipeline: type[Pipeline]) -> str:
    """Return the description of a pipeline in one line."""
    return (inspect.getdoc(pipeline) or "").partition("\n")[0]


def _place(pipeline: type[Pipeline]) -> str:
    return f"{pipeline.__module__}.{pipeline.__qualname__}"
