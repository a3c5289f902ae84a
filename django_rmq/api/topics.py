"""Topics, their slots, limits, schedules and workers: figures, and the requests to a worker or a schedule.

The serializers of responses are here, too.

Actions on messages, and pause and resume, are in ``actions``.
"""

from __future__ import annotations

from rest_framework import serializers

from django_rmq.api import requests
from django_rmq.api.json_format import Json, ResponseSerializer, maybe
from django_rmq.api.requests import Fields
from django_rmq.api.view import MessageRoute, RmqView, message_route, route
from django_rmq.core.model.changed_limits import LIMITS
from django_rmq.core.model.schedule import CATCH_UP
from django_rmq.core.model.topic import Topic
from django_rmq.core.model.worker_report import WorkerRequest
from django_rmq.operations import Permission, RunningMessages, TopicLimits, WorkerStack
from django_rmq.operations.sends import body_schema
from django_rmq.operations.worker_overview import ReportedWorker, RunningMessage


class TopicAnswer(ResponseSerializer):
    """A topic and its figures. If `partial` is true, the numbers of messages are those of `looked_at` slots only."""

    name = serializers.CharField(source="topic.name")
    type = serializers.ChoiceField(
        ["range_merge", "priority", "fixed_time", "fifo"], source="topic.type.value"
    )
    slots = serializers.IntegerField(source="topic.slots")
    body = serializers.ChoiceField(["json", "text", "bytes"], source="topic.body")
    identity = serializers.ChoiceField(["body", "key"], source="topic.identity")
    serial = serializers.BooleanField(source="topic.serial")
    timeout = serializers.IntegerField(source="topic.timeout", help_text="Seconds until a delivery times out")
    max_retries = serializers.IntegerField(source="topic.max_retries")
    waiting = serializers.IntegerField(source="store")
    due = serializers.IntegerField(
        help_text="Messages that can be taken now: they wait and are due, have rested, or have timed out"
    )
    running = serializers.IntegerField(source="prepare")
    resting = serializers.IntegerField(source="retry")
    dead = serializers.IntegerField()
    claimed = serializers.IntegerField()
    oldest_due_ms = maybe()
    age_ms = maybe(help_text="Milliseconds since the oldest message became due")
    undrained_since_ms = maybe()
    undrained_ms = maybe(
        help_text="Priority topics: the longest time in milliseconds for which a slot has not been empty"
    )
    running_since_ms = maybe()
    running_ms = maybe(
        help_text="Milliseconds since the first delivery began that runs now, however often it was extended"
    )
    paused_slots = serializers.IntegerField()
    consumers = serializers.IntegerField(help_text="Live workers")
    looked_at = serializers.IntegerField()
    partial = serializers.BooleanField(source="is_partial")  # type: ignore[assignment] # a field, which the class takes out of its body
    now_ms = serializers.IntegerField(help_text="The time of the reading, by Redis' clock")
    problems = serializers.ListField(source="troubles", child=serializers.CharField())


class OneTopicAnswer(TopicAnswer):
    """A topic and its figures, its order and limits, and the type of its bodies."""

    order = maybe(serializers.CharField, help_text="fifo: strict or loose")
    on_duplicate = maybe(
        serializers.CharField, help_text="fifo: what a second send with a key does: keep or replace"
    )
    max_wait_ms = maybe(help_text="DEBOUNCE: how long a message waits at most")
    accumulate = maybe(help_text="How many bodies a message collects")
    max_rate = maybe(serializers.FloatField, help_text="Deliveries per second of the topic")
    slot_rate = maybe(serializers.FloatField, help_text="Deliveries per second of each slot")
    max_in_flight = maybe(help_text="Messages that run at the same time")
    body_schema = serializers.DictField(
        allow_null=True,
        help_text="The JSON schema of a body that may be sent. null: the topic has no type of bodies, or the type no schema",
    )


class LimitsAnswer(ResponseSerializer):
    """The limits of a topic in effect, and those of its settings. null: there is no limit."""

    topic = serializers.CharField(source="topic.name")
    max_rate = maybe(
        serializers.FloatField, help_text="Deliveries per second of the topic", source="topic.max_rate"
    )
    max_in_flight = maybe(source="topic.max_in_flight", help_text="Messages that run at the same time")
    declared_max_rate = maybe(
        serializers.FloatField, help_text="max_rate of the settings", source="declared.max_rate"
    )
    declared_max_in_flight = maybe(source="declared.max_in_flight", help_text="max_in_flight of the settings")
    changed = serializers.ListField(
        child=serializers.CharField(), help_text="The limits that were changed at run time"
    )
    changed_by = maybe(serializers.CharField, help_text="Who changed them")
    changed_ms = maybe(help_text="When they were changed")


def limits(topic_limits: TopicLimits) -> Json:
    changed = topic_limits.changed
    return LimitsAnswer.of(
        topic_limits,
        changed=[name for name in LIMITS if changed is not None and name in changed.values],
        changed_by=changed.by if changed is not None else None,
        changed_ms=changed.at_ms if changed is not None else None,
    )


class TopicsAnswer(ResponseSerializer):
    """All topics."""

    results = TopicAnswer(many=True)


class CountersAnswer(ResponseSerializer):
    """The counters of one topic."""

    topic = serializers.CharField()
    sent = serializers.IntegerField()
    done = serializers.IntegerField()
    failed = serializers.IntegerField(help_text="Deliveries that failed")


class StatsAnswer(ResponseSerializer):
    """Counters of topics. The difference between two readings gives rates."""

    now_ms = serializers.IntegerField(help_text="The time of the reading, by Redis' clock")
    results = CountersAnswer(many=True)
    problems = serializers.ListField(child=serializers.CharField())


class SlotAnswer(ResponseSerializer):
    """The figures of one slot."""

    slot = serializers.IntegerField()
    waiting = serializers.IntegerField(source="counts.store")
    due = serializers.IntegerField(source="counts.due")
    running = serializers.IntegerField(source="counts.prepare")
    resting = serializers.IntegerField(source="counts.retry")
    dead = serializers.IntegerField(source="counts.dead")
    claimed = serializers.IntegerField(source="counts.claimed")
    oldest_due_ms = maybe(source="counts.oldest_due_ms")
    undrained_since_ms = maybe(
        source="counts.undrained_since_ms",
        help_text="Priority topics: the time since which the slot has not been empty",
    )
    running_since_ms = maybe(
        source="counts.running_since_ms", help_text="When the first delivery began that runs now"
    )
    paused = serializers.BooleanField(source="counts.paused")
    holder = serializers.CharField(
        source="counts.owner", allow_blank=True, help_text="The consumer that took from it last"
    )
    worker = serializers.CharField(allow_blank=True, help_text="The worker that it is assigned to")
    since_ms = maybe()
    problem = serializers.CharField(allow_blank=True)


class SlotsAnswer(ResponseSerializer):
    """Some slots of a topic."""

    topic = serializers.CharField(source="topic.name")
    slots = serializers.IntegerField(source="topic.slots", help_text="Number of slots of the topic")
    now_ms = serializers.IntegerField()
    next_slot = maybe(help_text="The value of `first` for the next page; null: this is the last page")
    results = SlotAnswer(many=True, source="rows")


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
    vanished = VanishedWorkerAnswer(many=True, help_text="At most 100 of the last hour, the last one first")
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
    results = RunningMessageAnswer(many=True, help_text="At most 200; each worker names its twenty longest")
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


class TopicsView(RmqView):
    @route("topics", Permission.VIEW, answers={200: TopicsAnswer})
    def get(self) -> Json:
        """List all topics with their figures, which are up to three seconds old: all who look share them."""
        topics = self.operations.shared_survey(self.known()).topics
        return {"results": [TopicAnswer.of(one) for one in topics]}


class TopicView(RmqView):
    @route("topic", Permission.VIEW, answers={200: OneTopicAnswer}, errors=[404])
    def get(self, topic: Topic) -> Json:
        """Show one topic with its figures, its order and limits, and the type of its bodies."""
        in_effect = self.operations.topic_limits(topic.name).topic
        return OneTopicAnswer.of(
            self.operations.topic(topic.name),
            order=in_effect.order if in_effect.is_fifo else None,
            on_duplicate=in_effect.on_duplicate if in_effect.is_fifo else None,
            max_wait_ms=in_effect.debounce_ms or None,
            accumulate=in_effect.accumulate,
            max_rate=in_effect.max_rate,
            slot_rate=in_effect.slot_rate,
            max_in_flight=in_effect.max_in_flight,
            body_schema=body_schema(topic),
        )


class LimitsView(RmqView):
    @route("limits", Permission.VIEW, answers={200: LimitsAnswer}, errors=[404])
    def get(self, topic: Topic) -> Json:
        """Show the limits of a topic in effect, and what was changed at run time."""
        return limits(self.operations.topic_limits(topic.name))

    @route(
        "change_limits",
        Permission.PAUSE,
        takes=requests.LimitsFields,
        answers={200: LimitsAnswer},
        errors=[400, 404],
        examples={"slower": {"max_rate": 5}, "no limit": {"max_rate": None, "max_in_flight": None}},
    )
    def post(self, topic: Topic, fields: Fields) -> Json:
        """Change limits of a topic at run time; workers apply them within five seconds."""
        return limits(self.operations.change_limits(topic.name, fields))

    @route("reset_limits", Permission.PAUSE, answers={200: LimitsAnswer}, errors=[404])
    def delete(self, topic: Topic) -> Json:
        """Return a topic to the limits of its settings."""
        return limits(self.operations.reset_limits(topic.name))


class StatsView(RmqView):
    @route("stats", Permission.VIEW, answers={200: StatsAnswer})
    def get(self) -> Json:
        """Count the messages sent, done and failed per topic. Topics with very many slots are left out."""
        flow = self.operations.shared_flow(self.known())
        rows = [{"topic": name, **counted} for name, counted in flow.counted.items()]
        return StatsAnswer.of(flow, results=rows)


class SlotsView(RmqView):
    @route("slots", Permission.VIEW, query=requests.SlotsQuery, answers={200: SlotsAnswer}, errors=[404])
    def get(self, query: Fields) -> Json:
        """List slots of a topic: what each holds, and who owns it."""
        topic = self.topic(query["topic"])
        slots = self.operations.slots(topic.name, query["first"], query["limit"])
        end = query["first"] + len(slots.rows)
        is_last = not slots.rows or end >= topic.slots
        return SlotsAnswer.of(slots, next_slot=None if is_last else end)


class WorkersView(RmqView):
    @route("workers", Permission.VIEW, answers={200: WorkersAnswer})
    def get(self) -> Json:
        """List live workers with their slots and last reports, those that vanished, and topics without a worker."""
        topics = set(self.known())
        overview = self.operations.worker_overview()
        return {
            "results": [worker(one, topics) for one in overview.workers],
            "vanished": [VanishedWorkerAnswer.of(one) for one in overview.vanished],
            "unserved": [name for name in overview.unserved if name in topics],
        }


class _AskWorkerView(RmqView):
    """Asks one worker for something."""

    def ask(self, worker: str, asked: WorkerRequest) -> Json:
        """Ask the worker, and answer with its id."""
        return {"worker": self.operations.ask_worker(worker, asked, self.known()), "asked": asked}


class QuietWorkerView(_AskWorkerView):
    @route("quiet_worker", Permission.CONTROL_WORKERS, answers={202: AskedWorkerAnswer}, errors=[409])
    def post(self, worker: str) -> Json:
        """Ask a worker to take no more messages and continue those that run; other workers get its slots."""
        return self.ask(worker, "quiet")


class ResumeWorkerView(_AskWorkerView):
    @route("resume_worker", Permission.CONTROL_WORKERS, answers={202: AskedWorkerAnswer}, errors=[409])
    def post(self, worker: str) -> Json:
        """Ask a quiet worker to take messages again."""
        return self.ask(worker, "resume")


class StopWorkerView(_AskWorkerView):
    @route("stop_worker", Permission.CONTROL_WORKERS, answers={202: AskedWorkerAnswer}, errors=[409])
    def post(self, worker: str) -> Json:
        """Ask the command of a worker to end with all its processes, as SIGTERM does: running listeners may finish."""
        return self.ask(worker, "stop")


class ScheduleAnswer(ResponseSerializer):
    """A schedule and its runs, by Redis' clock."""

    name = serializers.CharField()
    topic = serializers.CharField()
    cron = maybe(serializers.CharField, source="schedule.cron")
    every = maybe(source="schedule.every", help_text="Seconds")
    timezone = serializers.CharField(source="schedule.timezone")
    catch_up = serializers.ChoiceField(CATCH_UP, source="schedule.catch_up")
    edited = serializers.ListField(child=serializers.CharField(), help_text="What differs from the settings")
    paused = serializers.BooleanField(source="is_paused")
    next_ms = maybe()
    last_ms = maybe()
    late_ms = serializers.IntegerField(
        help_text="How much later than its time the latest tick came into the queue, or is overdue"
    )
    outcome = maybe(
        serializers.CharField,
        help_text="What became of the latest run that has ended: dead, done, removed or cancelled; resting if none "
        "of the last ones has ended and one has failed; null if it is not known",
    )
    outcome_ms = maybe(help_text="When this run was due")
    missing = serializers.BooleanField(
        source="is_missing", help_text="Whether it is declared and Redis does not know it"
    )


class SchedulesAnswer(ResponseSerializer):
    """All schedules."""

    results = ScheduleAnswer(many=True)


class ScheduleOutcomeAnswer(ResponseSerializer):
    """The outcome of an action on a schedule."""

    name = serializers.CharField()
    outcome = serializers.CharField()


class RunAnswer(ResponseSerializer):
    """The message that was sent."""

    name = serializers.CharField()
    id = serializers.CharField()


class SchedulesView(RmqView):
    @route("schedules", Permission.VIEW, answers={200: SchedulesAnswer})
    def get(self) -> Json:
        """List the schedules that workers have declared, with their next and last runs."""
        schedules = self.operations.schedules(self.known())
        rows = [
            ScheduleAnswer.of(one, edited=sorted(one.override), outcome=one.outcome or None)
            for one in schedules
        ]
        return {"results": rows}


class PauseScheduleView(RmqView):
    @route("pause_schedule", Permission.PAUSE, answers={200: ScheduleOutcomeAnswer}, errors=[404, 409])
    def post(self, name: str) -> Json:
        """Take back the waiting tick of a schedule, and plan no other until it is resumed."""
        return {"name": name, "outcome": self.operations.pause_schedule(name, self.known())}


class ResumeScheduleView(RmqView):
    @route("resume_schedule", Permission.PAUSE, answers={200: ScheduleOutcomeAnswer}, errors=[404, 409])
    def post(self, name: str) -> Json:
        """Continue a paused schedule from now on; what it missed is not sent."""
        return {"name": name, "outcome": self.operations.resume_schedule(name, self.known())}


class RunScheduleView(RmqView):
    @route("run_schedule", Permission.SEND, answers={202: RunAnswer}, errors=[400, 404, 409, 507])
    def post(self, name: str) -> Json:
        """Send the message of a schedule now, beside its ticks.

        It counts as a send.
        """
        return {"name": name, "id": self.operations.run_schedule(name, self.known(), is_charged=True)}


class StackView(MessageRoute):
    @message_route("stack", Permission.VIEW_STACK, answers={200: StacksAnswer}, errors=[404, 409])
    def get(self, topic: Topic, message_id: str, query: Fields) -> Json:
        """Show where the listener of a running message is, once the workers that run it were asked and have answered."""
        stacks = self.operations.message_stacks(topic.name, self.id_of(topic, message_id, query))
        return {"now_ms": stacks.now_ms, "results": [worker_stack(one) for one in stacks.workers]}

    @message_route(
        "ask_for_stack", Permission.VIEW_STACK, answers={202: AskedForStackAnswer}, errors=[404, 409]
    )
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
