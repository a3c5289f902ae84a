"""Workers: what they do, the messages that they run with their stacks, and the requests to a worker.

The serializers of responses are here, too.
"""

from __future__ import annotations

from rest_framework import serializers

from django_rmq.api.requests import Fields
from django_rmq.api.view import Json, MessageRoute, ResponseSerializer, RmqView, maybe, message_route, route
from django_rmq.core.model.topic import Topic
from django_rmq.core.model.worker_report import WorkerRequest
from django_rmq.operations import Permission, RunningMessages, WorkerStack
from django_rmq.operations.worker_overview import MOST_RUNNING, MOST_VANISHED, ReportedWorker, RunningMessage


class WorkerReportAnswer(ResponseSerializer):
    """What a worker reported about itself, some seconds ago."""

    at_ms = serializers.IntegerField()
    host = serializers.CharField()
    pid = serializers.IntegerField()
    version = serializers.CharField(help_text="The version of django_rmq")
    python = serializers.CharField()
    code_version = serializers.CharField(
        source="code", help_text="The setting CODE_VERSION; empty if there is none"
    )
    load = serializers.FloatField(help_text="The load of its host, in the mean of a minute")
    memory_mib = serializers.FloatField(help_text="The resident memory of the process in MiB")
    threads = serializers.IntegerField()
    taken = serializers.IntegerField(help_text="How many of its threads run a listener")
    messages = serializers.IntegerField(help_text="The number of messages that it holds")
    running = serializers.IntegerField(help_text="The number of messages whose listeners run")
    state = serializers.CharField(
        help_text="working, quiet or stopping; empty if its version takes no requests"
    )


class WorkerAnswer(ResponseSerializer):
    """One live worker."""

    worker = serializers.CharField(source="stats.member.worker.id")
    host = serializers.CharField(source="stats.member.worker.host")
    pid = serializers.IntegerField(source="stats.member.worker.pid")
    threads = serializers.IntegerField(source="stats.member.worker.threads")
    started_ms = serializers.IntegerField()
    slots = serializers.DictField(child=serializers.IntegerField(), help_text="Topic → number of its slots")
    shared = serializers.ListField(
        child=serializers.CharField(), help_text="Topics whose slots all workers share"
    )
    full = serializers.ListField(
        child=serializers.CharField(),
        help_text="Topics for which it has had no free thread for 10 s, so that workers with free threads get the slots",
    )
    report = WorkerReportAnswer(
        allow_null=True, help_text="What it last reported about itself; null if it has not reported yet"
    )


class VanishedWorkerAnswer(ResponseSerializer):
    """A worker that ended without leaving, in the last hour."""

    worker = serializers.CharField(source="id")
    report = WorkerReportAnswer(help_text="Its last report")


class WorkersAnswer(ResponseSerializer):
    """All live workers, and what is missing."""

    results = WorkerAnswer(many=True)
    vanished = VanishedWorkerAnswer(
        many=True, help_text=f"At most {MOST_VANISHED} of the last hour, the last one first"
    )
    unserved = serializers.ListField(
        child=serializers.CharField(), help_text="Topics with a listener that no worker serves"
    )


class AskedWorkerAnswer(ResponseSerializer):
    """A worker that was asked for something. It obeys with its next report, within five seconds."""

    worker = serializers.CharField()
    asked = serializers.ChoiceField(["quiet", "resume", "stop"])


class AskedForStackAnswer(ResponseSerializer):
    """The workers that were asked. They answer with their next report, within five seconds."""

    workers = serializers.ListField(child=serializers.CharField())


class WorkerStackAnswer(ResponseSerializer):
    """Where the listener of a message is in one worker that runs it, or was asked for it."""

    worker = serializers.CharField()
    host = serializers.CharField(source="report.host")
    pid = serializers.IntegerField(source="report.pid")
    thread = maybe(serializers.CharField, help_text="Null if the worker no longer reports that it runs it")
    asked_ms = maybe(help_text="When the worker was last asked; null: not in the last minutes")
    at_ms = maybe(help_text="When the stack was taken; null: the worker has not answered")
    awaited = serializers.BooleanField(
        source="is_awaited", help_text="Whether the worker has not answered the last request"
    )
    stack = serializers.CharField(
        allow_blank=True,
        help_text="File, line, function and source line of each call, the innermost last; empty: it did not run",
    )


class StacksAnswer(ResponseSerializer):
    """Where the listener of a message is."""

    now_ms = serializers.IntegerField(help_text="The time of the reading, by Redis' clock")
    results = WorkerStackAnswer(many=True, help_text="Usually one")


class RunningMessageAnswer(ResponseSerializer):
    """A message whose listener runs, as its worker reported it some seconds ago."""

    topic = serializers.CharField(source="call.topic")
    id = serializers.CharField(
        source="call.id", help_text="A sealed id, which contains nothing of the message"
    )
    since_ms = serializers.IntegerField(
        source="call.since_ms", help_text="When this call of the listener began"
    )
    running_ms = serializers.IntegerField(help_text="Milliseconds since then")
    p50_ms = maybe(
        serializers.FloatField,
        help_text="Half of the calls of the topic took no longer; null if none has been counted",
    )
    p99_ms = maybe(serializers.FloatField, help_text="99 of 100 calls of the topic took no longer")
    attempt = serializers.IntegerField(source="call.attempt")
    progress = maybe(
        serializers.FloatField,
        help_text="The part that is done, from 0 to 1; null if the listener has not reported any",
        source="call.progress",
    )
    progress_text = serializers.CharField(
        source="call.progress_text",
        allow_blank=True,
        help_text="What the listener says about it; empty without `view_bodies`",
    )
    worker = serializers.CharField()
    host = serializers.CharField(source="report.host")
    pid = serializers.IntegerField(source="report.pid")
    thread = serializers.CharField(
        source="call.thread", help_text="The thread, or the event loop, in which it runs"
    )


class RunningAnswer(ResponseSerializer):
    """The messages that run, the one that has run longest first."""

    now_ms = serializers.IntegerField(help_text="The time of the reading, by Redis' clock")
    results = RunningMessageAnswer(
        many=True, help_text=f"At most {MOST_RUNNING}; each worker names its twenty longest"
    )
    unlisted = serializers.IntegerField(help_text="The number of other messages that run, of any topic")


def running_message(one: RunningMessage, running: RunningMessages) -> Json:
    """Return a message that runs, beside how long its topic usually takes."""
    usual = running.usual.get(one.call.topic)
    return RunningMessageAnswer.of(
        one,
        running_ms=running.running_ms(one),
        p50_ms=usual.p50_ms if usual else None,
        p99_ms=usual.p99_ms if usual else None,
    )


def worker_stack(one: WorkerStack) -> Json:
    return WorkerStackAnswer.of(
        one,
        thread=one.call.thread if one.call else None,
        at_ms=one.stack.at_ms if one.stack else None,
        stack=one.stack.text if one.stack else "",
    )


def worker(reported: ReportedWorker, known: set[str]) -> Json:
    """Return a worker with its slots of the topics ``known``."""
    one = reported.stats
    return WorkerAnswer.of(
        reported,
        started_ms=round(one.member.worker.started * 1000),
        slots={name: count for name, count in one.slots.items() if name in known},
        shared=[name for name in one.shared if name in known],
        full=sorted(one.member.worker.full & known),
    )


class WorkersView(RmqView):
    @route("workers", Permission.VIEW, answers={200: WorkersAnswer})
    def get(self) -> Json:
        """List live workers with their slots and last reports, those that vanished, and topics without a worker."""
        topics = set(self.known())
        overview = self.operations.worker_overview()
        return {
            "results": [worker(one, topics) for one in overview.workers],
            "vanished": [VanishedWorkerAnswer.of(one) for one in overview.vanished],
            "unserved": overview.unserved,
        }


class _AskWorkerView(RmqView):
    """Asks one worker for something."""

    def ask(self, worker: str, asked: WorkerRequest) -> Json:
        """Ask the worker, and answer with its id."""
        return {"worker": self.operations.ask_worker(worker, asked, self.known()), "asked": asked}


class QuietWorkerView(_AskWorkerView):
    @route("quiet_worker", Permission.CONTROL_WORKERS, answers={202: AskedWorkerAnswer})
    def post(self, worker: str) -> Json:
        """Ask a worker to take no more messages and continue those that run; other workers get its slots."""
        return self.ask(worker, "quiet")


class ResumeWorkerView(_AskWorkerView):
    @route("resume_worker", Permission.CONTROL_WORKERS, answers={202: AskedWorkerAnswer})
    def post(self, worker: str) -> Json:
        """Ask a quiet worker to take messages again."""
        return self.ask(worker, "resume")


class StopWorkerView(_AskWorkerView):
    @route("stop_worker", Permission.CONTROL_WORKERS, answers={202: AskedWorkerAnswer})
    def post(self, worker: str) -> Json:
        """Ask the command of a worker to end with all its processes, as SIGTERM does: running listeners may finish."""
        return self.ask(worker, "stop")


class StackView(MessageRoute):
    @message_route("stack", Permission.VIEW_STACK, answers={200: StacksAnswer}, errors=[404])
    def get(self, topic: Topic, message_id: str, query: Fields) -> Json:
        """Show where the listener of a running message is, once the workers that run it were asked and have answered."""
        stacks = self.operations.message_stacks(topic.name, self.id_of(topic, message_id, query))
        return {"now_ms": stacks.now_ms, "results": [worker_stack(one) for one in stacks.workers]}

    @message_route("ask_for_stack", Permission.VIEW_STACK, answers={202: AskedForStackAnswer}, errors=[404])
    def post(self, topic: Topic, message_id: str, query: Fields) -> Json:
        """Ask the workers that run a message where its listener is."""
        one = self.id_of(topic, message_id, query)
        return {"workers": self.operations.ask_for_stacks(topic.name, one)}


class RunningView(RmqView):
    @route("running", Permission.VIEW, answers={200: RunningAnswer})
    def get(self) -> Json:
        """List the messages whose listeners run, the one that has run longest first, with worker, thread and usual times."""
        running = self.operations.running_messages(self.known())
        return {
            "now_ms": running.now_ms,
            "results": [running_message(one, running) for one in running.messages],
            "unlisted": running.unlisted,
        }
