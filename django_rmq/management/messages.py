"""How commands name, select and print messages: their options, their status, and what holds them."""

from __future__ import annotations

import time
from argparse import ArgumentParser, ArgumentTypeError
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from django_rmq.core.model.body_codec import exact_json
from django_rmq.core.model.status import QUEUES, STATE_OF, MessageStatus
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import MessageGone
from django_rmq.management.rmq_command import (
    Options,
    UsageError,
    ago,
    at_least,
    duration,
    one_line,
    refuse_beside,
)
from django_rmq.operations import Filter, Hold, MessageCopy, Operations
from django_rmq.operations.filters import filter_of


def add_names(parser: ArgumentParser, *, many: bool = False) -> None:
    """Add the options that name a message. ``many``: several ids may be given."""
    parser.add_argument(
        "--id",
        action="append" if many else "store",
        metavar="ID",
        help="the message with this id, as a send, a list or the log shows it"
        + (", can be repeated" if many else ""),
    )
    parser.add_argument("--key", metavar="KEY", help="the message with this key (topics with IDENTITY 'key')")
    parser.add_argument(
        "--body",
        metavar="JSON",
        help="the message with this body; beside --key, on topics with SLOT_BASIS: an object with that field",
    )
    parser.add_argument("--slot-basis", metavar="TEXT", help="the slot basis that the send was given")


def add_filter(parser: ArgumentParser) -> None:
    """Add the options that select messages of a state."""
    parser.add_argument(
        "--error",
        metavar="CLASS",
        help="messages whose last error has this class, with or without its module",
    )
    parser.add_argument(
        "--cause",
        metavar="ID",
        help="messages of this cause, as `rmqlist --group-by error --json` names it",
    )
    parser.add_argument(
        "--text", help="messages with this text in the body, the key, the headers or the error"
    )
    parser.add_argument(
        "--older-than",
        type=duration,
        metavar="AGE",
        help="messages that have been due, running or dead for at least: 90, 15m, 2h or 7d",
    )
    parser.add_argument("--newer-than", type=duration, metavar="AGE", help="for at most")
    parser.add_argument("--slot", type=at_least(0), metavar="N", help="messages of this slot")


def add_priority(parser: ArgumentParser) -> None:
    """Add the option that selects waiting messages by their priority."""
    parser.add_argument(
        "--priority", type=at_least(1), metavar="N", help="priority topics: waiting messages of this priority"
    )


def add_bulk_options(
    parser: ArgumentParser, *, has_rate: bool = True, in_background: bool = True, counted: str = ""
) -> None:
    """Add the options of an action on many messages. ``counted``: how a dry run counts them."""
    parser.add_argument("--limit", type=at_least(1), metavar="N", help="at most N messages")
    if has_rate:
        parser.add_argument(
            "--rate", type=at_least(0.001, float), metavar="N", help="at most N messages per second"
        )
    if in_background:
        parser.add_argument(
            "--background",
            action="store_true",
            help="let workers do it, and end at once; see rmqworkers --actions",
        )
    parser.add_argument("--dry-run", action="store_true", help=f"only print how many there are{counted}")
    # Django's own commands take both spellings.
    parser.add_argument(
        "--no-input", "--noinput", action="store_false", dest="interactive", help="skip the confirmation"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_state(
    parser: ArgumentParser, *states: str, default: str | None = None, is_optional: bool = False
) -> None:
    """Add the option for one of these states of messages. The name of its queue is taken, too."""

    def parse(text: str) -> str:
        if STATE_OF.get(text, text) in states:
            return STATE_OF.get(text, text)
        raise ArgumentTypeError(f"{text!r} is not one of {', '.join(states)}")

    names = [state if state == QUEUES[state] else f"{state} (or {QUEUES[state]})" for state in states]
    text = ", ".join(names) + ("" if default is None else f"; default: {default}")
    parser.add_argument(
        "--state",
        required=default is None and not is_optional,
        default=default,
        type=parse,
        metavar="STATE",
        help=text,
    )


def chosen_filter(options: Options) -> Filter:
    """Return the filter that the options select by. An empty text is an error, because it would select all messages."""
    for name in ("error", "cause", "text"):
        if options[name] == "":
            raise UsageError(f"--{name} must not be empty")
    return filter_of(options)


FILTERS = ("error", "cause", "text", "older_than", "newer_than", "slot", "priority")
"""The options that ``add_filter`` and ``add_priority`` add."""

_NAMES = ("id", "key", "body", "slot_basis")


def is_named(options: Options) -> bool:
    """Return whether options that name a message are given, even if they do not suffice."""
    return any(options[name] is not None for name in _NAMES)


def name_of(topic: Topic, options: Options) -> dict[str, Any]:
    """Return how the message is named: ``id``, or the arguments ``key``, ``body`` and ``slot_basis``."""
    arguments = {name: options[name] for name in _NAMES if options[name] is not None}
    if not arguments.keys() - {"slot_basis"} or ("id" in arguments and len(arguments) > 1):
        raise UsageError("Name the message by --id, or by --key or --body.")
    if "body" in arguments and topic.body != "text":
        arguments["body"] = json_of("--body", arguments["body"])
    return arguments


def json_of(flag: str, text: str) -> object:
    """Read JSON that a person has typed."""
    try:
        return exact_json(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{flag} is not JSON: {error}") from None


def chosen_ids(operations: Operations, options: Options, wanted: Filter, filters: str) -> list[str]:
    """Return the ids of the messages that the options name; none if all that ``wanted`` selects are meant.

    ``filters``: the options that filter. Raises ``UsageError`` unless messages are chosen in exactly one way.
    """
    if sum((is_named(options), options["all"], not wanted.is_empty)) != 1:
        raise UsageError(
            f"choose messages: use --id, --key or --body, or filters ({filters}, --older-than, --newer-than, "
            "--slot), or --all"
        )
    if not is_named(options):
        return []
    refuse_beside("--id, --key or --body", options, "limit", "rate", "background")
    arguments = name_of(operations.config.topic(options["topic"]), options)
    return arguments["id"] if "id" in arguments else [operations.id_of(options["topic"], **arguments)]


def copies_of(operations: Operations, name: str, message_id: str) -> list[MessageCopy]:
    """Return the copies of a message; none if there is no such message."""
    try:
        return operations.get(name, message_id)
    except MessageGone:
        return []


def as_json(one: MessageStatus) -> dict[str, object]:
    """Return a status for JSON; times as text."""
    values = {name: _plain(value) for name, value in asdict(one).items()}
    return {**values, "took": one.took}


def lines_of_status(one: MessageStatus) -> list[str]:
    """Return a line for each fact that is known."""
    facts = {name: _plain(value) for name, value in asdict(one).items()}
    facts["took"] = None if one.took is None else f"{one.took:.3f} s"
    if one.progress is not None:
        facts["progress"] = f"{one.progress:.0%}"
    return [f"{name:14}{one_line(str(value))}" for name, value in facts.items() if value not in (None, "")]


def instant(ms: int | None) -> str:
    """Return a time in UTC. None: a dash."""
    if ms is None:
        return "-"
    return (
        datetime.fromtimestamp(ms / 1000, UTC).isoformat(sep=" ", timespec="seconds").removesuffix("+00:00")
    )


def line_of_hold(hold: Hold) -> str:
    """Return what keeps a message from being delivered now, as a line."""
    seconds = None if hold.since_ms is None else abs(time.time() - hold.since_ms / 1000)
    number = 0.0 if hold.count is None else hold.count
    texts = {
        "paused": "the topic is paused",
        "no_worker": "no worker serves the topic",
        "slot_unowned": "no worker owns the slot",
        "behind_failed": f"strict order, behind the failed message {hold.message_id}",
        "slot_busy": f"slot busy for {ago(seconds)}, with {number:g} in flight: {hold.message_id}",
        "claimed": f"{number:g} of the slot are claimed by Spark",
        "in_flight_limit": f"in flight limit: {number:g} are in flight (MAX_IN_FLIGHT)",
        "behind": f"behind {number:g} of its slot, first {hold.message_id}",
        "rate": f"rate: at most {number:g} per second (MAX_RATE)",
        "not_due": f"its time, in {ago(seconds)}",
    }
    return f"{'held by':14}{texts[hold.reason]}"


def _plain(value: object) -> object:
    return value.isoformat(timespec="milliseconds") if isinstance(value, datetime) else value
