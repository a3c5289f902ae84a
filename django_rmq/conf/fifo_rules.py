"""Settings that contradict each other on fifo topics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django_rmq.conf.problems import Problems


def fifo(problems: Problems, place: str, values: dict[str, Any], own: Mapping[str, Any]) -> None:
    """Report what contradicts TYPE "fifo", and complete the values of the topic.

    A setting that does not fit is an error in the topic itself, and ignored in the defaults; but not OUTBOX, on
    which a project may rely.
    """
    if own.get("identity") == "body":
        problems.report(
            "E006",
            f'{place} has TYPE "fifo" and IDENTITY "body": equal bodies would be one message, but every send to a '
            "fifo topic is a message of its own.",
            "Remove IDENTITY. A send without key= gets a key of its own.",
        )
    values["identity"] = "key"
    if values.get("order", "strict") == "strict" and values.get("serial") is False:
        if own.get("serial") is False:
            problems.report(
                "E006",
                f'{place} has TYPE "fifo", SERIAL False and ORDER "strict": several messages of a slot would run at '
                "the same time.",
                'Remove SERIAL, or set ORDER "loose".',
            )
        values.pop("serial")
    if values.get("outbox") and values.get("order", "strict") == "strict":
        problems.report(
            "E006",
            f'{place} has ORDER "strict" and OUTBOX: a strict topic promises the order of sending, and what the outbox '
            "sends later comes behind what was sent meanwhile.",
            'Set "OUTBOX": False for this topic, or ORDER "loose".',
        )
