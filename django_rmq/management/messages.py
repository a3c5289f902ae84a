"""One message, as commands name it and show it."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from dataclasses import asdict
from datetime import datetime
from typing import Any

from django.core.management import CommandError

from django_rmq.core.words.status import MessageStatus
from django_rmq.management import shown


def add_names(parser: ArgumentParser) -> None:
    """Add the options that name a message."""
    group = parser.add_argument_group("one message")
    group.add_argument("--id", metavar="ID", help="the message with this id, as a send returns it")
    group.add_argument("--key", metavar="KEY", help="the message with this key")
    group.add_argument("--body", metavar="JSON", help="the message with this body")
    group.add_argument("--slot-basis", metavar="TEXT", help="the slot basis that the send was given")


def name_of(options: dict[str, Any]) -> dict[str, Any] | None:
    """Return how the message is named. None: no message is."""
    named = {name: options[name] for name in ("id", "key", "body") if options[name] is not None}
    if len(named) > 1:
        raise CommandError("Name the message by one of --id, --key and --body.")
    if not named:
        return None
    if "body" in named:
        try:
            named["body"] = json.loads(named["body"])
        except ValueError as error:
            raise CommandError(f"--body is not JSON: {error}") from None
    return named if options["slot_basis"] is None else {**named, "slot_basis": options["slot_basis"]}


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
