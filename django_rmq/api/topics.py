"""Topics, their slots and limits: figures, and changes of limits. The serializers of responses are here, too.

Actions on messages, and pause and resume, are in ``actions``.
"""

from __future__ import annotations

from rest_framework import serializers

from django_rmq.api import requests
from django_rmq.api.requests import Fields
from django_rmq.api.view import Json, ResponseSerializer, RmqView, maybe, route
from django_rmq.core.model.changed_limits import LIMITS
from django_rmq.core.model.topic import Topic
from django_rmq.operations import Permission, TopicLimits
from django_rmq.operations.sends import body_schema


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
        slots = self.operations.slots(self.topic(query["topic"]).name, query["first"], query["limit"])
        end = query["first"] + len(slots.rows)
        return SlotsAnswer.of(slots, next_slot=end if end < slots.topic.slots else None)
