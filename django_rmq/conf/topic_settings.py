"""`RMQ["TOPICS"]` and `RMQ["TOPIC_DEFAULTS"]`: the parsers of their keys, and the options that contradict each other.

``known_keys`` refuses unknown keys. The result is a ``Topic`` for each name. The default of an option is that of the
field of ``core.model.topic.Topic``. Others are in this file: TYPE and ORDER of a topic without TYPE (``SOON``), OUTBOX (as
`RMQ["OUTBOX"]`), IDENTITY of fifo topics, and MAX_RUNTIME beside HARD_TIMEOUT. ``connections`` checks whether Redis knows the
topic with the same options.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from datetime import timedelta
from types import MappingProxyType
from typing import NamedTuple

from django.utils.module_loading import import_string

from django_rmq.conf.known_keys import Keys, Problems, Values, read_values
from django_rmq.conf.parsers import (
    InvalidSetting,
    boolean,
    dotted_path,
    in_ms,
    one_of,
    optional,
    printable,
    quoting,
    seconds,
    text,
    whole,
    whole_seconds,
)
from django_rmq.core.model.bounds import (
    BATCH,
    FASTEST,
    LONGEST_WAIT,
    MAX_PRIORITY,
    MAX_RETRIES_LIMIT,
    MAX_TIMEOUT,
    SHORTEST_WAIT,
    SLOWEST,
    abbreviated_error,
    is_number,
)
from django_rmq.core.model.keys import MAX_SLOTS, check_slots, check_topic_name
from django_rmq.core.model.topic import BackOff, Topic, TopicType
from django_rmq.durations import duration_text
from django_rmq.exceptions import ConfigurationError
from django_rmq.typed_bodies import DeclaredBody


def _check_fifo(problems: Problems, place: str, values: Values, own: Mapping[str, object]) -> None:
    """Report options that contradict TYPE "fifo", and complete the values of the topic.

    An option that does not fit is an error in the topic itself, and is ignored in the defaults; except for OUTBOX, on
    which a project may rely.
    """
    if own.get("identity") == "body":
        problems.report(
            "E006",
            f'{place} has TYPE "fifo" and IDENTITY "body": equal bodies would be one message, but every send to a '
            "fifo topic is a message of its own.",
            "Remove IDENTITY. A send without key= gets a key of its own.",
        )
    # An IDENTITY "body" of the defaults does not hold for a fifo topic, whose sends never merge by their bodies.
    values["identity"] = "key"
    if values["order"] == "strict" and values.get("serial") is False:
        if own.get("serial") is False:
            problems.report(
                "E006",
                f'{place} has TYPE "fifo", SERIAL False and ORDER "strict": several messages of a slot would run at '
                "the same time.",
                'Remove SERIAL, or set ORDER "loose".',
            )
        # SERIAL False of the defaults does not hold for a strict topic.
        values.pop("serial")
    if values.get("outbox") and values["order"] == "strict":
        problems.report(
            "E006",
            f'{place} has ORDER "strict" and OUTBOX: a strict topic promises the order of sending, and what the outbox '
            "sends later comes behind what was sent meanwhile.",
            'Set "OUTBOX": False for this topic, or ORDER "loose".',
        )


def _check_debounce(problems: Problems, place: str, values: Values, own: Mapping[str, object]) -> None:
    range_ms, wait_ms = values.get("time_range_ms"), values.get("max_wait_ms")
    if values.get("debounce") and wait_ms is None:
        problems.report(
            "E006",
            f"{place} has DEBOUNCE and no MAX_WAIT: a message that is sent all the time would never be delivered.",
            "Set MAX_WAIT to the longest time from the first send to the delivery.",
        )
    elif own.get("max_wait_ms") and "max_wait_ms" in values and not values.get("debounce"):
        problems.report("E006", f"{place} has MAX_WAIT without DEBOUNCE.", 'Set "DEBOUNCE": True, too.')
    elif values.get("debounce") and range_ms is not None and wait_ms is not None and wait_ms < range_ms:
        problems.report(
            "E006",
            f"{place} has MAX_WAIT {_text(wait_ms)} and TIME_RANGE {_text(range_ms)}: MAX_WAIT is the shorter one.",
            "Set MAX_WAIT to at least TIME_RANGE.",
        )


def _text(ms: int) -> str:
    return duration_text(timedelta(milliseconds=ms))


def _check_accumulate(problems: Problems, place: str, values: Values, own: Mapping[str, object]) -> None:
    if not values.get("accumulate"):
        return
    identity, origin = values["identity"], values.get("origin")
    if own.get("accumulate") and identity != "key":
        problems.report(
            "E006",
            f'{place} has ACCUMULATE and IDENTITY "{identity}": messages merge when they are equal, so there is '
            "nothing to collect.",
            'Set IDENTITY "key".',
        )
    if own.get("accumulate") and origin:
        problems.report(
            "E006",
            f"{place} has ACCUMULATE and ORIGIN: a message that holds several sends has no single origin.",
            "Remove one of them.",
        )
    if own.get("accumulate") and values.get("outbox"):
        problems.report(
            "E006",
            f"{place} has ACCUMULATE and OUTBOX: the outbox sends only the newest state of a message.",
            'Set "OUTBOX": False for this topic.',
        )
    # ACCUMULATE comes from the defaults here, and does not apply to a topic that cannot have it.
    if identity != "key" or origin or values.get("outbox"):
        values.pop("accumulate")


def body(value: object) -> str:
    """Return BODY: json, text, bytes, or the dotted path of a type."""
    if isinstance(value, str) and value in ("json", "text", "bytes"):
        return value
    try:
        return dotted_path(value)
    except InvalidSetting:
        raise InvalidSetting(
            "'json', 'text', 'bytes' or the dotted path of a type such as 'shop.events.PriceChanged'"
        ) from None


def _declare_body(problems: Problems, place: str, values: Values, own: Mapping[str, object]) -> None:
    """Turn the path of a type, and that of its UPCAST, into a ``DeclaredBody``."""
    upcast, path = values.pop("upcast", None), values["body"]
    if "." in path:
        values["typed"] = DeclaredBody(path, upcast)
        values["body"] = "json"
    elif own.get("upcast"):
        problems.report(
            "E006",
            f'{place} has UPCAST and BODY "{path}": only bodies that have a type are upcast.',
            "Set BODY to the dotted path of a dataclass, a TypedDict or a pydantic model.",
        )


def slots(value: object) -> int:
    try:
        return check_slots(value)
    except ConfigurationError as error:
        raise InvalidSetting(f"a power of two from 1 to {MAX_SLOTS} ({error})") from None


time_range = in_ms(SHORTEST_WAIT, LONGEST_WAIT, is_short=True)
"""Returns TIME_RANGE or MAX_WAIT."""


class PerSlot(NamedTuple):
    """A rate that holds for each slot."""

    rate: float


def rate(value: object) -> float | PerSlot:
    """Return MAX_RATE: of the topic, or of each slot."""
    number: object = value
    per_slot = isinstance(value, Mapping) and value.keys() == {"rate", "per"} and value["per"] == "slot"
    if isinstance(value, Mapping) and per_slot:
        number = value["rate"]
    if not is_number(number) or not SLOWEST <= number <= FASTEST:
        raise InvalidSetting(
            "a number of messages per second from 0.000001 to 1000000, or "
            '{"rate": this number, "per": "slot"}'
        )
    return PerSlot(float(number)) if per_slot else float(number)


def back_off(value: object) -> BackOff:
    try:
        path = dotted_path(value)
    except InvalidSetting:
        return _constant(value)
    try:
        function = import_string(path)
    except Exception as error:  # noqa: BLE001 - whatever a module of the project raises is reported, not raised
        raise InvalidSetting(
            f"the dotted path of a function, but this one cannot be imported ({abbreviated_error(error)})",
            "E008",
        ) from None
    if not callable(function):
        what = f"the dotted path of a function (failures) -> seconds, but this one is {printable(function)}"
        raise InvalidSetting(what, "E008")
    return BackOff(function=function)


def _constant(value: object) -> BackOff:
    try:
        rest_ms = in_ms(timedelta(), LONGEST_WAIT)(value)
    except InvalidSetting as wanted:
        raise InvalidSetting(f"{wanted} (0: no rest), or the dotted path of a function") from None
    return BackOff(rest_ms, rest_ms)


TOPIC_KEYS: Keys = {
    "TYPE": ("type", one_of(*(kind.value for kind in TopicType))),
    "SLOTS": ("slots", slots),
    "TIME_RANGE": ("time_range_ms", optional(time_range)),
    "DEBOUNCE": ("debounce", boolean),
    "MAX_WAIT": ("max_wait_ms", optional(time_range)),
    "ACCUMULATE": ("accumulate", optional(whole(2, 10_000))),
    "BODY": ("body", body),
    "UPCAST": ("upcast", optional(dotted_path)),
    "IDENTITY": ("identity", one_of("body", "key")),
    "SLOT_BASIS": ("slot_basis", optional(text)),
    "SERIAL": ("serial", boolean),
    "TIMEOUT": ("timeout", whole_seconds(timedelta(seconds=MAX_TIMEOUT))),
    "MAX_RETRIES": ("max_retries", whole(0, MAX_RETRIES_LIMIT)),
    "BACKOFF": ("backoff", back_off),
    "DEFAULT_PRIORITY": ("default_priority", optional(whole(1, MAX_PRIORITY))),
    "RETRY_PRIORITY": ("retry_priority", one_of("original", "lowest")),
    "ORDER": ("order", one_of("strict", "loose")),
    "ON_DUPLICATE": ("on_duplicate", one_of("keep", "replace")),
    "MAX_RUNTIME": ("max_runtime", seconds(1.0)),
    "HARD_TIMEOUT": ("hard_timeout", optional(seconds(1.0))),
    "PREFETCH": ("prefetch", whole(1, BATCH)),
    # 512 MB is the largest value that Redis takes by default.
    "MAX_BODY": ("max_body", whole(1, 536_870_912)),
    "MAX_BACKLOG": ("max_backlog", optional(whole(1))),
    "MAX_RATE": ("max_rate", optional(rate)),
    "MAX_IN_FLIGHT": ("max_in_flight", optional(whole(1))),
    "MAX_PREPARED": ("max_prepared", whole(1, 1_000_000)),
    "FLOW": ("flow", optional(one_of("auto"))),
    "CONCURRENCY": ("concurrency", whole(1, 10_000)),
    "DEAD_RETENTION": ("dead_retention", optional(seconds(1.0))),
    "OUTCOME_RETENTION": ("outcome_retention_ms", optional(in_ms(timedelta(seconds=1), timedelta(days=30)))),
    "LISTENER": ("listener", boolean),
    "ORIGIN": ("origin", boolean),
    "OUTBOX": ("outbox", boolean),
}
"""Settings key -> (field of ``Topic``, parser of its value)."""

SOON: Mapping[str, object] = MappingProxyType({"type": TopicType.FIFO.value, "order": "loose"})
"""The fields of a topic without TYPE: each send is a message of its own, which runs soon, and those of a slot in order."""

_DEFAULTS = {each.name: each.default for each in fields(Topic) if each.name in ("body", "identity", "order")}
"""The defaults of the options that rule out others."""

AFTER_HARD_TIMEOUT = 3600.0
"""Seconds by which MAX_RUNTIME exceeds HARD_TIMEOUT unless it is set: until its process has ended, a listener keeps
its message."""

SETTINGS_OF_TYPES: Mapping[str, TopicType] = MappingProxyType(
    {
        "TIME_RANGE": TopicType.RANGE_MERGE,
        "DEBOUNCE": TopicType.RANGE_MERGE,
        "MAX_WAIT": TopicType.RANGE_MERGE,
        "ACCUMULATE": TopicType.RANGE_MERGE,
        "DEFAULT_PRIORITY": TopicType.PRIORITY,
        "RETRY_PRIORITY": TopicType.PRIORITY,
        "ORDER": TopicType.FIFO,
        "ON_DUPLICATE": TopicType.FIFO,
    }
)
"""Settings that topics of one type have."""


def read_topics(problems: Problems, root: Mapping[str, object]) -> Mapping[str, Topic]:
    """Return the declared topics that have no problem."""
    defaults = read_defaults(problems, root)
    declared = root.get("TOPICS", {})
    if not isinstance(declared, Mapping):
        problems.report("E001", f'RMQ["TOPICS"] is {printable(declared)}: it must be a dict.')
        return {}
    topics = {}
    for name, options in declared.items():
        try:
            check_topic_name(name)
        except ConfigurationError as error:
            problems.report("E004", f'RMQ["TOPICS"]: {quoting(error, name)}.')
            continue
        topic = read_topic(problems, f'RMQ["TOPICS"]["{name}"]', name, options, defaults)
        if topic is not None:
            topics[name] = topic
    return MappingProxyType(topics)


def read_defaults(problems: Problems, root: Mapping[str, object]) -> dict[str, object]:
    """Return the values that topics have where they do not declare their own."""
    has_outbox = root.get("OUTBOX", False) is not False
    defaults = read_values(problems, 'RMQ["TOPIC_DEFAULTS"]', root.get("TOPIC_DEFAULTS", {}), TOPIC_KEYS)
    return {"outbox": has_outbox, **defaults}


def read_topic(
    problems: Problems, place: str, name: str, options: object, defaults: Mapping[str, object]
) -> Topic | None:
    """Return the topic that ``options`` declare at ``place`` of the settings, or None if it has a problem."""
    before = len(problems)
    own = read_values(problems, place, options, TOPIC_KEYS)
    values = {**defaults, **own}
    if len(problems) > before:
        return None
    has_type = "type" in values
    if not has_type:
        values = {**SOON, **values}
    values = {**_DEFAULTS, **values}
    values["type"] = TopicType(values["type"])
    if isinstance(values.get("max_rate"), PerSlot):
        values["slot_rate"] = values.pop("max_rate").rate

    _check_type(problems, place, values, own, has_type)
    _declare_body(problems, place, values, own)
    if values["type"] is TopicType.FIFO:
        _check_fifo(problems, place, values, own)
    # DEBOUNCE and ACCUMULATE that do not fit the type were removed before.
    _check_debounce(problems, place, values, own)
    _check_accumulate(problems, place, values, own)
    _check_identity(problems, place, values, own)
    _check_limits(problems, place, values)
    if len(problems) > before:
        return None
    topic = Topic(name, **values)
    # The lowest priority follows from MAX_RETRIES, so it is known only when the topic is complete.
    if topic.default_priority is not None and topic.default_priority < topic.min_priority:
        problems.report(
            "E006",
            f"{place} has DEFAULT_PRIORITY {topic.default_priority}: it must be at least {topic.min_priority}, because "
            "lower numbers are reserved for retries.",
        )
        return None
    return topic


def _check_type(
    problems: Problems, place: str, values: Values, own: Mapping[str, object], has_type: bool
) -> None:
    """Report settings that do not fit the type: errors in the topic itself, and ignored in the defaults."""
    kind = values["type"]
    for key, only in SETTINGS_OF_TYPES.items():
        name_of_field = TOPIC_KEYS[key][0]
        if kind is not only:
            values.pop(name_of_field, None)
            if own.get(name_of_field) and not has_type:
                problems.report(
                    "E005",
                    f"{place} has {key}, which only {only.value} topics have, and no TYPE.",
                    f'Set TYPE "{only.value}".',
                )
            elif own.get(name_of_field):
                problems.report(
                    "E006",
                    f'{place} has TYPE "{kind.value}" and {key}, which only {only.value} topics have.',
                    f'Remove {key}, or set TYPE "{only.value}".',
                )


def _check_identity(problems: Problems, place: str, values: Values, own: Mapping[str, object]) -> None:
    """Report options that another identity or form of the body rules out."""
    if values.get("slot_basis") is not None and values["body"] != "json":
        problems.report(
            "E006",
            f'{place} has SLOT_BASIS and BODY "{values["body"]}": a field of the body needs BODY "json".',
            "Give slot_basis= with each send instead.",
        )
    if values.get("origin") and values["identity"] != "key":
        if own.get("origin"):
            problems.report(
                "E006",
                f'{place} has ORIGIN and IDENTITY "{values["identity"]}": equal bodies are one message, '
                "which has no place for an origin.",
                'Set IDENTITY "key". A send without key= then gets a key of its own.',
            )
        # ORIGIN of the defaults does not hold for a topic whose bodies are the identities.
        values.pop("origin")


def _check_limits(problems: Problems, place: str, values: Values) -> None:
    """Report a HARD_TIMEOUT that is not above MAX_RUNTIME. Without MAX_RUNTIME, the heartbeat lasts longer than HARD_TIMEOUT."""
    hard, most = values.get("hard_timeout"), values.get("max_runtime")
    if hard is None:
        return
    if most is None:
        values["max_runtime"] = hard + AFTER_HARD_TIMEOUT
    elif hard <= most:
        problems.report(
            "E095",
            f"{place} has HARD_TIMEOUT {hard:g} and MAX_RUNTIME {most:g}: a listener is ended before its MAX_RUNTIME.",
            "Raise HARD_TIMEOUT, or leave out MAX_RUNTIME.",
        )
