"""``manage.py rmqsend``: send messages from a shell, one by one or as JSON lines."""

from __future__ import annotations

import math
import os
import sys
from argparse import ArgumentParser
from collections import Counter
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any

from django.core.management.base import CommandError

from django_rmq import Send
from django_rmq.core.model.body_codec import exact_json, floats_beside_bodies
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import CallerError, InvalidMessage, RmqError
from django_rmq.management.rmq_command import (
    Options,
    RmqCommand,
    UsageError,
    allow_options_between_arguments,
    at_least,
    duration,
    exit_code_of,
    instant_of,
    one_line,
    outcomes_text,
)

CHUNK = 5_000
"""The number of lines that are sent together."""

PER_LINE = tuple(one.name for one in fields(Send))


class Command(RmqCommand):
    """Send messages."""

    help = (
        "Send a message to a topic at once, and print the result. The body is JSON (text where the topic's BODY "
        "is text); without it, or with -, it is read from standard input. Exits with 1 if a full topic refused messages."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        allow_options_between_arguments(parser)
        parser.add_argument("topic")
        parser.add_argument(
            "body", nargs="?", default="-", help="the body; - (default): read it from standard input"
        )
        parser.add_argument(
            "--jsonl", action="store_true", help="read one JSON body per line from standard input"
        )
        parser.add_argument(
            "--options",
            action="store_true",
            help=f"with --jsonl: each line is an object with a body and its own options: {', '.join(PER_LINE)}",
        )
        parser.add_argument(
            "--ensure",
            action="store_true",
            help="send nothing if the message already waits, rests or runs (status present)",
        )
        parser.add_argument(
            "--id",
            metavar="ID",
            help="with --ensure, in place of --key: the id of an earlier send of the message",
        )
        self._add_options(parser)
        self._add_keyed_options(parser)
        parser.add_argument("--json", action="store_true", help="print JSON")

    @staticmethod
    def _add_options(parser: ArgumentParser) -> None:
        parser.add_argument("--priority", type=int, metavar="N", help="priority topics: the priority")
        parser.add_argument(
            "--time-range", metavar="TIME", help="range_merge topics: due after 5, 250ms, 15m or 2h"
        )
        parser.add_argument("--delay", metavar="TIME", help="fifo topics: due after 5, 250ms, 15m or 2h")
        when = parser.add_mutually_exclusive_group()
        when.add_argument(
            "--in",
            type=duration,
            dest="after",
            metavar="TIME",
            help="fixed_time topics: due after 90, 15m, 2h or 7d",
        )
        when.add_argument(
            "--at",
            metavar="WHEN",
            help="fixed_time topics: due at 2026-12-24T18:00 (TIME_ZONE, or with +01:00)",
        )
        parser.add_argument(
            "--slot-basis", metavar="TEXT", help="messages with the same text go to the same slot"
        )

    @staticmethod
    def _add_keyed_options(parser: ArgumentParser) -> None:
        parser.add_argument("--key", help="IDENTITY key: messages with equal keys are the same message")
        parser.add_argument(
            "--header",
            action="append",
            default=[],
            metavar="NAME=VALUE",
            help="IDENTITY key: a header of the message",
        )
        parser.add_argument(
            "--expires",
            metavar="WHEN",
            help="IDENTITY key: not delivered after this time, in the form of --at",
        )
        parser.add_argument(
            "--max-retries",
            type=at_least(0),
            metavar="N",
            help="IDENTITY key: fewer retries than the topic's",
        )
        parser.add_argument(
            "--timeout", metavar="TIME", help="IDENTITY key: a shorter time-out than the topic's"
        )

    def handle(self, *args: object, **options: Any) -> None:
        operations, name = self.operations(), options["topic"]
        topic = operations.config.topic(name)
        shared = _shared(options)
        if options["options"] and not options["jsonl"]:
            raise UsageError("--options requires --jsonl")
        if options["id"] is not None and not options["ensure"]:
            raise UsageError("--id requires --ensure")
        if options["jsonl"]:
            if options["ensure"]:
                raise UsageError("--ensure is for one message")
            if options["body"] != "-":
                raise UsageError("--jsonl reads from standard input: give no body")
            self._send_lines(topic, shared, options)
            return
        raw = sys.stdin.buffer.read() if options["body"] == "-" else os.fsencode(options["body"])
        body = _body(topic, raw)
        if options["ensure"]:
            result = operations.ensure(name, Send(body, **shared), message_id=options["id"])
        else:
            result = operations.send(name, body, **shared)
        sent_id = operations.sent_id(result)
        score = None if math.isnan(result.score) else result.score
        answer = {"id": sent_id, "slot": result.slot, "status": result.status, "score": score}
        self.print_answer(answer, f"{result.status} in slot {result.slot} as {sent_id}", options)

    def _send_lines(self, topic: Topic, shared: dict[str, object], options: Options) -> None:
        operations, outcomes = self.operations(), Counter[str]()
        # JSON is UTF-8, and the text of standard input has the encoding of the locale.
        lines = enumerate(sys.stdin.buffer, 1)
        next_line, numbered = 1, list[tuple[int, bytes]]()
        try:
            while chunk := list(islice(lines, CHUNK)):
                numbered = [(number, line) for number, line in chunk if line.strip()]
                items = [_item(topic, number, line, options["options"]) for number, line in numbered]
                if items:
                    outcomes.update(operations.send_many(topic.name, items, **shared))
                next_line = chunk[-1][0] + 1
        except (RmqError, CommandError, KeyboardInterrupt) as error:
            code = (
                exit_code_of(type(error)) if isinstance(error, RmqError) else getattr(error, "returncode", 1)
            )
            sent = getattr(error, "sent", 0)
            before = _sent_before({**outcomes, "sent": sent}, numbered[sent][0] if sent else next_line)
            if not isinstance(error, (CallerError, CommandError)):
                before = f"{before}; later lines may have been sent"
            text = f"{_with_line(str(error), numbered) or 'stopped by Ctrl-C'} ({before})"
            raise CommandError(one_line(text), returncode=code) from error
        answer = {"outcomes": dict(outcomes), "total": outcomes.total()}
        self.print_answer(answer, f"{topic.name}: {outcomes_text(dict(outcomes))}", options)
        if outcomes["refused"]:
            raise CommandError(
                f"{outcomes['refused']} messages were refused: {_what_is_full(topic)}", returncode=1
            )


def _what_is_full(topic: Topic) -> str:
    reasons = ["their slots hold their share of MAX_BACKLOG"] if topic.max_backlog else []
    if topic.accumulate:
        reasons.append("they have collected all their bodies (ACCUMULATE, MAX_BODY)")
    return ", or ".join(reasons)


_AS_GIVEN = ("key", "priority", "time_range", "delay", "slot_basis", "max_retries", "timeout")


def _shared(options: Options) -> dict[str, Any]:
    shared = {name: options[name] for name in _AS_GIVEN}
    if options["after"] is not None:
        shared["fixed_time"] = datetime.now(UTC) + timedelta(seconds=options["after"])
    elif options["at"] is not None:
        shared["fixed_time"] = instant_of("--at", options["at"])
    if options["expires"] is not None:
        shared["expires"] = instant_of("--expires", options["expires"])
    if options["header"]:
        pairs = [header.partition("=") for header in options["header"]]
        if not all(equals for _, equals, _ in pairs):
            raise UsageError("--header must be NAME=VALUE")
        shared["headers"] = {name: value for name, _, value in pairs}
    if options["jsonl"] and shared["key"] is not None:
        raise UsageError("--key is for one message; with --options, give each line its own key")
    return {name: value for name, value in shared.items() if value is not None}


def _body(topic: Topic, raw: bytes) -> object:
    """Return the body that a person has typed or piped."""
    if topic.body == "bytes":
        return raw
    try:
        text = raw.decode()
        return text if topic.body == "text" else exact_json(text)
    except (ValueError, RecursionError) as error:
        raise InvalidMessage(f"the body is not {topic.body}: {error}") from None


def _item(topic: Topic, number: int, line: bytes, with_options: bool) -> object:
    try:
        item = exact_json(line)
        if with_options:
            item = floats_beside_bodies(item)
    except (ValueError, RecursionError) as error:
        raise InvalidMessage(f"line {number} is not JSON: {error}") from None
    if with_options:
        if not isinstance(item, dict) or "body" not in item or not set(item) <= set(PER_LINE):
            raise InvalidMessage(f"line {number} must be an object of {', '.join(PER_LINE)}, with a body")
        options = dict(item)
        for name in ("fixed_time", "expires"):
            if isinstance(options.get(name), str):
                options[name] = instant_of(f"line {number}: {name}", options[name])
        item = Send(**options)
    elif topic.body == "bytes":
        raise InvalidMessage(f"topic {topic.name} has BODY 'bytes', which a JSON line cannot hold")
    return item


def _sent_before(outcomes: dict[str, int], line: int) -> str:
    return f"{outcomes_text(outcomes)} before line {line}" if any(outcomes.values()) else "nothing was sent"


def _with_line(error: str, numbered: list[tuple[int, bytes]]) -> str:
    """Replace the index in the chunk by the line of the input."""
    if not error.startswith("item "):
        return error
    index, _, rest = error.removeprefix("item ").partition(":")
    return f"line {numbered[int(index)][0]}:{rest}" if index.isdigit() else error
