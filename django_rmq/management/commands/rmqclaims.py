"""``manage.py rmqclaims``: what Spark queries hold, and the return of a claim that no query will end."""

from __future__ import annotations

import time
from argparse import ArgumentParser
from dataclasses import asdict
from typing import Any

from django.core.management.base import CommandError

from django_rmq.exceptions import WrongType
from django_rmq.management.rmq_command import Options, RmqCommand, UsageError, ago, one_line
from django_rmq.operations import ClaimStats


class Command(RmqCommand):
    """List and return claims."""

    help = (
        "List the claims by which Spark queries hold messages. --return gives the messages of one topic back "
        "to their slots, in the order and with the retries that they had; with --spent each uses a retry, and "
        "one without retries left goes to Dead. Stop the query first: it reads its batch as empty afterwards. "
        "With --consumer the name is free for another query at once."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("topics", nargs="*", metavar="topic", help="only these (default: all)")
        parser.add_argument(
            "--return", action="store_true", dest="give_back", help="return the claims of the topic"
        )
        parser.add_argument(
            "--consumer", metavar="ID", help="with --return: only the claims of this consumer"
        )
        parser.add_argument("--spent", action="store_true", help="with --return: use a retry of each message")
        parser.add_argument(
            "--no-input", action="store_false", dest="interactive", help="with --return: do not ask"
        )
        parser.add_argument("--json", action="store_true", help="print JSON")

    def handle(self, *args: object, **options: Any) -> None:
        if options["give_back"]:
            self._return(options)
            return
        if options["consumer"] is not None or options["spent"]:
            raise UsageError("--consumer and --spent need --return")
        operations = self.operations()
        claims, problems = list[ClaimStats](), []
        for topic in self.topics(options["topics"]):
            try:
                claims += operations.claims(topic.name)
            except WrongType as error:
                # A key that another program has written hides no other topic.
                problems.append(f"{topic.name}: {error}")
        if options["json"]:
            self.print_json([asdict(one) for one in claims])
        elif claims:
            now_ms = time.time() * 1000
            heads = ("topic", "consumer", "claim", "state", "slots", "messages", "lease", "query")
            self.print_table([heads, *_rows(claims, now_ms)], right=(2, 4, 5, 6))
        elif not problems:
            self.stdout.write("no Spark query holds messages")
        if problems:
            raise CommandError(one_line("; ".join(problems)), returncode=1)

    def _return(self, options: Options) -> None:
        if len(options["topics"]) != 1:
            raise UsageError("--return needs the name of one topic")
        (topic,) = self.topics(options["topics"])
        operations = self.operations()
        consumer = options["consumer"]
        if consumer is not None and not consumer.isascii():
            raise UsageError(f"{consumer[:100]!r} is not the name of a consumer")
        claims = [one for one in operations.claims(topic.name) if consumer in (None, one.consumer)]
        messages = sum(one.messages for one in claims)
        if claims:
            question = f"{messages} messages of {topic.name} are returned. Their query must be stopped."
            self.confirm(question, topic.name, options)
        run = operations.return_claims(topic.name, consumer, spent=options["spent"])
        self.print_outcomes(topic.name, self.follow(run, f"return claims of {topic.name}", options), options)


def _rows(claims: list[ClaimStats], now_ms: float) -> list[tuple[str, ...]]:
    return [
        (
            one.topic,
            one_line(one.consumer),
            str(one.number),
            one.state,
            str(len(one.slots)),
            str(one.messages),
            "ended" if one.lease_ms <= now_ms else ago((one.lease_ms - now_ms) / 1000),
            one_line(one.driver) if one.driver else "-",
        )
        for one in claims
    ]
