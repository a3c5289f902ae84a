"""``manage.py rmqlist``: the messages of a state with their errors, one by one or in groups."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable
from typing import Any

from django_rmq.core.model.body_codec import dumps
from django_rmq.core.model.status import QUEUES
from django_rmq.management.messages import add_filter, add_priority, add_state, chosen_filter, instant
from django_rmq.management.rmq_command import Options, RmqCommand, at_least, one_line
from django_rmq.operations import MessageCopy, MessageGroup, MessageGroups
from django_rmq.operations.message_groups import GROUPED, KINDS
from django_rmq.operations.message_view import copy_as_json, shown_body
from django_rmq.operations.messages import pages

LISTED = 20
"""The number of messages that are listed unless --limit gives another one."""

LONGEST_CELL = 100

_TIMES = {"waiting": "due", "running": "delivered", "resting": "next", "dead": "died", "claimed": "due"}
"""State → what the time of its messages is."""


class Command(RmqCommand):
    """List messages."""

    help = (
        "List the messages of one state of a topic with their errors; of dead ones, the last that died first. With "
        "--group-by: how many have the same error, are in the same slot, or came in the same hour. All times are in "
        "UTC. A topic with a FORMATTER is shown as in the admin."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("topic")
        add_state(parser, *QUEUES)
        add_filter(parser)
        add_priority(parser)
        parser.add_argument(
            "--group-by",
            choices=KINDS,
            help="error: its class and first line, without numbers, ids and quoted parts",
        )
        parser.add_argument(
            "--limit",
            type=at_least(1),
            metavar="N",
            help=f"at most N messages (default: {LISTED}; with --group-by {GROUPED})",
        )
        parser.add_argument("--json", action="store_true", help="print JSON, with bodies and whole errors")

    def handle(self, *args: object, **options: Any) -> None:
        operations = self.operations(as_shown=True)
        name, state, wanted = options["topic"], options["state"], chosen_filter(options)
        if options["group_by"] is not None:
            limit = options["limit"] or GROUPED
            self._show_groups(
                operations.groups(name, state, options["group_by"], wanted, limit=limit), options
            )
            return
        read = list(pages(operations, name, state, wanted, limit=options["limit"] or LISTED))
        copies, cursor = [copy for page in read for copy in page.copies], read[-1].cursor
        problems = dict.fromkeys(problem for page in read for problem in page.problems)
        if options["json"]:
            rows = [copy_as_json(copy) for copy in copies]
            self.print_json({"messages": rows, "complete": not cursor, "problems": list(problems)})
            return
        self._show(copies, state)
        if cursor:
            self.stdout.write(f"the first {len(copies)}; there are more: use --limit or --group-by")
        self._print_problems(list(problems))

    def _show(self, copies: list[MessageCopy], state: str) -> None:
        if not copies:
            self.stdout.write("no messages")
            return
        is_priority = copies[0].topic.is_priority and state in ("waiting", "claimed")
        head = ("id", "priority" if is_priority else _TIMES[state], "failures", "error", "body")
        rows = [
            (
                copy.log_id,
                ("-" if copy.priority is None else copy.priority) if is_priority else instant(copy.at_ms),
                copy.failures,
                _cell(copy.error.partition("\n")[0] or copy.error_class) or "-",
                _cell(_body_text(copy)),
            )
            for copy in copies
        ]
        self.print_table([head, *rows], right=[2])

    def _show_groups(self, groups: MessageGroups, options: Options) -> None:
        if options["json"]:
            self.print_json(_groups_as_json(groups))
            return
        if not groups.rows:
            self.stdout.write("no messages")
        else:
            rows = [
                (
                    one.count,
                    f"{one.share:.0%}",
                    instant(one.first_ms),
                    instant(one.last_ms),
                    *_named(groups.by, one),
                )
                for one in groups.rows
            ]
            head = ("count", "share", "first", "last", groups.by, "such as")
            self.print_table([head, *rows], right=[0, 1])
        if not groups.is_complete:
            self.stdout.write(
                f"looked at {groups.looked_at} messages of {groups.total}; --limit N looks at more"
            )
        self._print_problems(groups.problems)

    def _print_problems(self, problems: list[str]) -> None:
        for problem in problems:
            self.stderr.write(one_line(problem))


def _groups_as_json(groups: MessageGroups) -> dict[str, object]:
    rows = [
        {
            "count": one.count,
            "share": one.share,
            "first_ms": one.first_ms,
            "last_ms": one.last_ms,
            **_KEYS[groups.by](one),
            "samples": [sample.log_id for sample in one.samples],
        }
        for one in groups.rows
    ]
    return {
        "by": groups.by,
        "groups": rows,
        "looked_at": groups.looked_at,
        "total": groups.total,
        "complete": groups.is_complete,
        "problems": groups.problems,
    }


_KEYS: dict[str, Callable[[MessageGroup], dict[str, object]]] = {
    "error": lambda one: {"cause": one.cause, "error_class": one.error_class, "error": one.error},
    "slot": lambda one: {"slot": one.slot},
    "hour": lambda one: {"hour_ms": one.hour_ms},
}


def _named(by: str, group: MessageGroup) -> tuple[str, str]:
    """Return what the messages of a group have in common, and the id of one of them."""
    if by == "slot":
        return str(group.slot), group.samples[0].log_id
    if by == "hour":
        return instant(group.hour_ms), group.samples[0].log_id
    text = ": ".join(part for part in (group.error_class, group.error) if part)
    return _cell(text) or "no error", group.samples[0].log_id


def _body_text(copy: MessageCopy) -> str:
    body, kind = shown_body(copy)
    if kind in ("hidden", "withheld"):
        return f"({kind})"
    return dumps(body, ensure_ascii=False) if kind == "json" else str(body)


def _cell(text: str) -> str:
    line = one_line(text)
    return line if len(line) <= LONGEST_CELL else f"{line[: LONGEST_CELL - 1]}…"
