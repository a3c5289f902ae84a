"""One message, as commands name it and show it."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Any

from django.core.management import CommandError

from django_rmq.core.words.status import MessageStatus
from django_rmq.core.words.topics import Topic
from django_rmq.management import shown


def add_names(parser: ArgumentParser, *, many: bool = False) -> None:
    """Add the options that name a message. ``many``: several ids may be given."""
    group = parser.add_argument_group("several messages or one" if many else "one message")
    group.add_argument(
        "--id",
        action="append" if many else "store",
        metavar="ID",
        help="the message with this id" + (", can be repeated" if many else ", as a send returns it"),
    )
    group.add_argument("--key", metavar="KEY", help="the message with this key (topics with IDENTITY 'key')")
    group.add_argument(
        "--body",
        metavar="JSON",
        help="the message with this body; beside --key, on topics with SLOT_BASIS: an object with that field",
    )
    group.add_argument("--slot-basis", metavar="TEXT", help="the slot basis that the send was given")


def is_named(options: Mapping[str, Any]) -> bool:
    """Return whether the options name a message."""
    return any(options[name] is not None for name in ("id", "key", "body"))


def name_of(topic: Topic, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return how the message is named: ``id``, or the arguments ``key``, ``body`` and ``slot_basis``."""
    named = {name: options[name] for name in ("id", "key", "body", "slot_basis") if options[name] is not None}
    if not is_named(options) or ("id" in named and len(named) > 1):
        raise CommandError("Name the message by --id, or by --key or --body.", returncode=2)
    if "body" in named and topic.body != "text":
        try:
            named["body"] = json.loads(named["body"])
        except ValueError as error:
            raise CommandError(f"--body is not JSON: {error}", returncode=2) from None
    return named


def as_json(one: MessageStatus) -> dict[str, Any]:
    """Return a status for JSON; times as text."""
    found = {name: _plain(value) for name, value in asdict(one).items()}
    return {**found, "took": one.took}


def lines_of_status(one: MessageStatus) -> list[str]:
    """Return a line for each fact that is known."""
    facts = {name: _plain(value) for name, value in asdict(one).items()}
    facts["took"] = None if one.took is None else f"{one.took:.3f} s"
    if one.progress is not None:
        facts["progress"] = f"{one.progress:.0%}"
    return [f"{name:14}{shown(str(value))}" for name, value in facts.items() if value not in (None, "")]


def _plain(value: Any) -> Any:
    return value.isoformat(timespec="milliseconds") if isinstance(value, datetime) else value
