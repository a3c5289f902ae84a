"""What is answered, as JSON: times in milliseconds since the epoch, bodies in the form that their topic has.

Each serializer here describes an answer for OpenAPI; the function beside it makes the answer.
"""

from __future__ import annotations

import logging
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rest_framework import serializers

from django_rmq.api.fields import Anything
from django_rmq.core.words.messages import Message, SendResult, Topic, decode_body, encode_json
from django_rmq.exceptions import InvalidMessage
from django_rmq.operations import (
    Copy,
    Deliveries,
    Done,
    Flow,
    Listing,
    Progress,
    SlotsFigures,
    TopicFigures,
    WorkerFigures,
)
from django_rmq.operations.deliveries import Settled
from django_rmq.operations.health import Health
from django_rmq.operations.redaction import format_body, is_redacted

logger = logging.getLogger("django_rmq.api")


class Answer(serializers.Serializer[Any]):
    """An answer; only described, for it is made as it is sent."""


def maybe(field: type[serializers.Field[Any, Any, Any, Any]] = serializers.IntegerField, **how: Any) -> Any:
    """Return a field that may be null."""
    return field(allow_null=True, **how)


# --- bodies


def body_of(topic: Topic, raw: bytes) -> tuple[Any, str]:
    """Return a body as JSON can carry it, and how: json, text, or base64 of what is neither."""
    if topic.body != "bytes":
        try:
            body = decode_body(topic, raw)
            # Strangers may have sent what Python reads and JSON does not have.
            encode_json(body)
            return body, topic.body
        except (ValueError, RecursionError, InvalidMessage):
            pass
    return b64encode(raw).decode(), "base64"


def _formatted(topic: Topic, raw: bytes) -> tuple[Any, str]:
    """Return what a topic's formatter makes of a body; one that fails withholds it."""
    try:
        shown = format_body(topic, raw)
        if isinstance(shown, bytes):
            return b64encode(shown).decode(), "base64"
        encode_json(shown)
        return shown, "text" if isinstance(shown, str) else "json"
    except Exception:
        logger.exception("The formatter of topic %s failed; its bodies are withheld.", topic.name)
        return None, "withheld"


# --- topics


class TopicAnswer(Answer):
    """A topic and what it holds. With `partial` the depths are those of `looked_at` slots only."""

    name = serializers.CharField()
    type = serializers.ChoiceField(["range_merge", "priority", "fixed_time"])
    slots = serializers.IntegerField()
    body = serializers.ChoiceField(["json", "text", "bytes"])
    identity = serializers.ChoiceField(["body", "key"])
    serial = serializers.BooleanField()
    timeout = serializers.IntegerField(help_text="Seconds within which a delivery is committed or extended")
    max_retries = serializers.IntegerField()
    store = serializers.IntegerField()
    due = serializers.IntegerField(help_text="Of `store`: can be taken now")
    prepare = serializers.IntegerField()
    retry = serializers.IntegerField()
    dead = serializers.IntegerField()
    claimed = serializers.IntegerField()
    oldest_due_ms = maybe()
    age_ms = maybe(help_text="How long the oldest message has been due")
    undrained_since_ms = maybe()
    undrained_ms = maybe(help_text="Priority topics: how long a slot has not been empty, of all the longest")
    paused_slots = serializers.IntegerField()
    consumers = serializers.IntegerField(help_text="Live workers")
    looked_at = serializers.IntegerField()
    partial = serializers.BooleanField()  # type: ignore[assignment] # a field, which the class takes out of its body
    now_ms = serializers.IntegerField(help_text="When, by Redis' clock")
    problems = serializers.ListField(child=serializers.CharField())


class TopicsAnswer(Answer):
    """All topics."""

    results = TopicAnswer(many=True)


def topic(one: TopicFigures) -> dict[str, Any]:
    """Return a topic's figures."""
    declared = one.topic
    return {
        "name": declared.name,
        "type": declared.type.value,
        "slots": declared.slots,
        "body": declared.body,
        "identity": declared.identity,
        "serial": declared.serial,
        "timeout": declared.timeout,
        "max_retries": declared.max_retries,
        **{name: getattr(one, name) for name in _FIGURES},
        "partial": one.is_partial,
        "problems": one.troubles,
    }


_FIGURES = (
    "store",
    "due",
    "prepare",
    "retry",
    "dead",
    "claimed",
    "oldest_due_ms",
    "age_ms",
    "undrained_since_ms",
    "undrained_ms",
    "paused_slots",
    "consumers",
    "looked_at",
    "now_ms",
)


class StatsAnswer(Answer):
    """What has passed through topics so far; ask twice for rates."""

    now_ms = serializers.IntegerField()
    topics = serializers.DictField(child=serializers.DictField(child=serializers.IntegerField()))
    problems = serializers.ListField(child=serializers.CharField())


def stats(flow: Flow) -> dict[str, Any]:
    """Return counters of topics."""
    return {"now_ms": flow.now_ms, "topics": flow.counted, "problems": list(flow.problems)}


class SlotAnswer(Answer):
    """What one slot holds."""

    slot = serializers.IntegerField()
    store = serializers.IntegerField()
    due = serializers.IntegerField()
    prepare = serializers.IntegerField()
    retry = serializers.IntegerField()
    dead = serializers.IntegerField()
    claimed = serializers.IntegerField()
    oldest_due_ms = maybe()
    undrained_since_ms = maybe(help_text="Priority topics: since when it has not been empty")
    paused = serializers.BooleanField()
    holder = serializers.CharField(allow_blank=True, help_text="Who took from it last")
    worker = serializers.CharField(allow_blank=True, help_text="The worker that it is assigned to")
    since_ms = maybe()
    problem = serializers.CharField(allow_blank=True)


class SlotsAnswer(Answer):
    """Some slots of a topic."""

    topic = serializers.CharField()
    slots = serializers.IntegerField(help_text="How many the topic has")
    now_ms = serializers.IntegerField()
    next_slot = maybe(help_text="`first` of the next page; null: this was the last")
    results = SlotAnswer(many=True)


def slots(found: SlotsFigures, first: int) -> dict[str, Any]:
    """Return the figures of slots."""
    end = first + len(found.rows)
    rows = [
        {
            "slot": row.slot,
            "store": row.counts.store,
            "due": row.counts.due,
            "prepare": row.counts.prepare,
            "retry": row.counts.retry,
            "dead": row.counts.dead,
            "claimed": row.counts.claimed,
            "oldest_due_ms": row.counts.oldest_due_ms,
            "undrained_since_ms": row.counts.undrained_since_ms,
            "paused": row.counts.paused,
            "holder": row.counts.owner,
            "worker": row.worker,
            "since_ms": row.since_ms,
            "problem": row.problem,
        }
        for row in found.rows
    ]
    return {
        "topic": found.topic.name,
        "slots": found.topic.slots,
        "now_ms": found.now_ms,
        "next_slot": end if rows and end < found.topic.slots else None,
        "results": rows,
    }


class WorkerAnswer(Answer):
    """One live worker."""

    worker = serializers.CharField()
    host = serializers.CharField()
    pid = serializers.IntegerField()
    threads = serializers.IntegerField()
    started_ms = serializers.IntegerField()
    slots = serializers.DictField(child=serializers.IntegerField(), help_text="Topic → how many of its slots")
    shared = serializers.ListField(child=serializers.CharField(), help_text="Topics that workers share")


class WorkersAnswer(Answer):
    """All live workers."""

    results = WorkerAnswer(many=True)


def worker(one: WorkerFigures, known: set[str]) -> dict[str, Any]:
    """Return a worker with what it has of the topics ``known``."""
    it = one.member.worker
    return {
        "worker": it.id,
        "host": it.host,
        "pid": it.pid,
        "threads": it.threads,
        "started_ms": round(it.started * 1000),
        "slots": {name: count for name, count in one.slots.items() if name in known},
        "shared": [name for name in one.shared if name in known],
    }


# --- messages


class MessageAnswer(Answer):
    """One copy of a message in one state."""

    id = serializers.CharField()
    state = serializers.ChoiceField(["store", "prepare", "retry", "dead", "claim"])
    slot = serializers.IntegerField()
    at_ms = maybe(help_text="When it is due, ends its rest, was handed out or extended, or died")
    priority = maybe()
    retries_left = maybe(help_text="After the next delivery; null: all of them, or it is dead")
    body = Anything(allow_null=True, help_text="Null where it may not be seen")
    encoding = serializers.ChoiceField(["json", "text", "base64", "hidden", "withheld"])
    redacted = serializers.BooleanField(help_text="A formatter made `body`; it is not what is stored")
    size = serializers.IntegerField(help_text="Bytes of the body")
    key = maybe(serializers.CharField)
    headers = serializers.DictField()
    slot_basis = maybe(serializers.CharField)
    expires_ms = maybe()
    failed = serializers.CharField(allow_blank=True)
    failures = serializers.IntegerField()
    first_failed_ms = maybe()
    last_failed_ms = maybe()
    error_class = serializers.CharField(allow_blank=True)
    error = serializers.CharField(allow_blank=True)
    mark = serializers.CharField(allow_blank=True, help_text="What a person has decided while it runs")


class MessagesAnswer(Answer):
    """A page of messages. It may be short, even empty, and have a next one."""

    results = MessageAnswer(many=True)
    next = maybe(serializers.CharField, help_text="The address of the next page; null: this is the last")
    cursor = maybe(serializers.CharField, help_text="`cursor` of the next page")
    scanned = serializers.IntegerField()
    problems = serializers.ListField(child=serializers.CharField())


class CopiesAnswer(Answer):
    """All copies of one message."""

    results = MessageAnswer(many=True)


def copy(one: Copy) -> dict[str, Any]:
    """Return one copy of a message, as far as it may be seen."""
    redacted = one.raw is not None and is_redacted(one.topic)
    if one.raw is None:
        body, encoding = None, "hidden"
    elif redacted:
        body, encoding = _formatted(one.topic, one.raw)
    else:
        body, encoding = body_of(one.topic, one.raw)
    return {
        "id": one.id,
        "state": one.state,
        "slot": one.slot,
        "at_ms": one.at_ms,
        "priority": one.priority,
        "retries_left": one.retries_left,
        "body": body,
        "encoding": encoding,
        "redacted": redacted,
        "size": one.size,
        "key": one.key,
        "headers": one.headers,
        "slot_basis": one.slot_basis,
        "expires_ms": one.expires_ms or None,
        "failed": one.failed,
        "failures": one.failures,
        "first_failed_ms": one.first_failed_ms,
        "last_failed_ms": one.last_failed_ms,
        "error_class": one.error_class,
        "error": one.error,
        "mark": one.mark,
    }


def page(listing: Listing, following: str | None) -> dict[str, Any]:
    """Return a page of messages; ``following``: the address of the next one."""
    return {
        "results": [copy(one) for one in listing.copies],
        "next": following,
        "cursor": listing.cursor or None,
        "scanned": listing.scanned,
        "problems": listing.problems,
    }


# --- sends


class SentAnswer(Answer):
    """What became of one message."""

    id = serializers.CharField()
    slot = serializers.IntegerField()
    status = serializers.ChoiceField(["stored", "merged", "replaced", "superseded", "refused"])
    score = maybe(help_text="Its due time in ms, or its priority; null where it was refused")


class SendsAnswer(Answer):
    """What became of each message, in the order given."""

    results = SentAnswer(many=True)
    outcomes = serializers.DictField(child=serializers.IntegerField(), help_text="Status → how many")


def sends(
    results: Sequence[SendResult], outcomes: Mapping[str, int], id_of: Callable[[SendResult], str]
) -> dict[str, Any]:
    """Return what became of a send; ``id_of``: the ids that the sender may use."""
    return {
        "results": [
            {
                "id": id_of(one),
                "slot": one.slot,
                "status": one.status,
                "score": int(one.score) if one.score == one.score else None,
            }
            for one in results
        ],
        "outcomes": dict(outcomes),
    }


# --- acts


class OutcomeAnswer(Answer):
    """What came of an act on one message."""

    id = serializers.CharField()
    outcome = serializers.CharField()


class ProgressAnswer(Answer):
    """How far an act on many messages (or slots) has come; where it is not complete, ask again to go on."""

    done = serializers.IntegerField()
    total = serializers.IntegerField()
    outcomes = serializers.DictField(child=serializers.IntegerField())
    complete = serializers.BooleanField()
    problems = serializers.ListField(child=serializers.CharField())
    results = OutcomeAnswer(many=True, required=False, help_text="Where ids were given")


def progress(found: Progress) -> dict[str, Any]:
    """Return how far an act has come."""
    return {
        "done": found.done,
        "total": found.total,
        "outcomes": found.outcomes,
        "complete": found.is_complete,
        "problems": list(found.problems[:20]),
    }


def acted(done: Done) -> dict[str, Any]:
    """Return what came of an act on named messages."""
    found = Progress(len(done.found), len(done.found), done.outcomes, is_complete=True)
    results = [{"id": name, "outcome": word} for name, word in done.found.items()]
    return {**progress(found), "results": results}


# --- deliveries


class DeliveryAnswer(Answer):
    """One message that was handed out."""

    id = serializers.CharField()
    slot = serializers.IntegerField()
    receipt = serializers.CharField(help_text="Who has it may settle the delivery")
    delivery = serializers.IntegerField(
        help_text="Rises with every delivery of a slot: a fencing token for what the consumer writes to"
    )
    body = Anything(allow_null=True)
    encoding = serializers.ChoiceField(["json", "text", "base64"])
    key = maybe(serializers.CharField)
    headers = serializers.DictField()
    retries_left = serializers.IntegerField()


class TakenAnswer(Answer):
    """What a consumer has taken, or holds."""

    messages = DeliveryAnswer(many=True)
    timeout = serializers.IntegerField(help_text="Seconds within which it is settled or extended")
    next_slot = maybe(help_text="`held` only: `first` of what else is held; null: that is all")
    wait_refused = serializers.BooleanField(
        help_text="Too many requests wait already, so this one did not: ask again after Retry-After"
    )


def taken(deliveries: Deliveries, declared: Topic, messages: Sequence[Message], next_slot: int | None) -> Any:
    """Return what was handed out."""
    found = []
    for one in messages:
        body, encoding = body_of(one.topic, one.raw)
        found.append(
            {
                "id": deliveries.id(one),
                "slot": one.slot,
                "receipt": deliveries.receipt(one),
                "delivery": one.receipt,
                "body": body,
                "encoding": encoding,
                "key": one.key,
                "headers": one.headers,
                "retries_left": one.retries_left,
            }
        )
    return {
        "messages": found,
        "timeout": declared.timeout,
        "next_slot": next_slot,
        "wait_refused": False,
    }


class SettledAnswer(Answer):
    """How one delivery was settled: `ok`, or `stale` (it had ended already)."""

    id = serializers.CharField()
    outcome = serializers.ChoiceField(["ok", "stale"])


class SettlementAnswer(Answer):
    """What became of each, in the order given."""

    results = SettledAnswer(many=True)
    outcomes = serializers.DictField(child=serializers.IntegerField())


def settled(named: Sequence[Settled], words: Sequence[str]) -> dict[str, Any]:
    """Return how deliveries were settled."""
    results = [{"id": one.id, "outcome": word} for one, word in zip(named, words, strict=True)]
    return {"results": results, "outcomes": dict(Counter(words))}


# --- health


class LiveAnswer(Answer):
    """This process answers."""

    ok = serializers.BooleanField()


class FindingAnswer(Answer):
    """One thing that was looked at."""

    check = serializers.CharField()
    topic = maybe(serializers.CharField)
    ok = serializers.BooleanField()
    text = serializers.CharField()


class ReadyAnswer(Answer):
    """Whether all is well; findings are for those who may see topics."""

    ok = serializers.BooleanField()
    findings = FindingAnswer(many=True, required=False)


def ready(health: Health, known: set[str] | None) -> dict[str, Any]:
    """Return what was found; ``known``: the topics that may be spoken of, None: nothing is told but yes or no."""
    if known is None:
        return {"ok": health.is_well}
    return {
        "ok": health.is_well,
        "findings": [one.as_json() for one in health.findings if not one.topic or one.topic in known],
    }
