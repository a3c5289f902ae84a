"""``manage.py rmqplan``: compute the memory, slots, processes, threads and connections that a load needs."""

from __future__ import annotations

from argparse import ArgumentParser
from dataclasses import asdict
from typing import Any

from django_rmq.core.words.servers import size_text
from django_rmq.management import RmqCommand, at_least
from django_rmq.operations.planning import Load, plan


class Command(RmqCommand):
    """Compute what a topic needs."""

    help = (
        "Compute what a topic needs: memory of Redis, SLOTS, worker processes and threads, connections. "
        "Contacts no server. The memory is an estimate for the default configuration of Redis."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        def add(flag: str, kind: type, unit: str, text: str, **options: Any) -> None:
            low = 1 if flag == "--threads" else 0
            parser.add_argument(flag, type=at_least(low, kind), metavar=unit, help=text, **options)

        waiting = "the largest number of messages that wait at the same time; on range_merge topics, only different ones"
        add("--messages", int, "N", waiting, required=True)
        add("--bytes", int, "N", "size of one body as it is stored", required=True)
        add("--key-bytes", int, "N", "size of a key, with IDENTITY key", default=0)
        add("--rate", float, "N", "messages consumed per second", default=0.0)
        add("--seconds", float, "S", "time that a listener takes for one message", default=0.0)
        add("--cpu-seconds", float, "S", "the part of --seconds that is CPU time", default=0.0)
        add("--threads", int, "N", "threads of a worker process (default: 8)", default=8)
        busy = "the part of the time in which threads are busy (default: 0.7)"
        add("--utilisation", float, "PART", busy, default=0.7)
        add("--slots", int, "N", "slots of an existing topic (default: computed)", default=0)
        parser.add_argument("--json", action="store_true", help="print JSON")

    def handle(self, *args: Any, **options: Any) -> None:
        found = plan(
            Load(
                messages=options["messages"],
                body_bytes=options["bytes"],
                rate=options["rate"],
                seconds=options["seconds"],
                cpu_seconds=options["cpu_seconds"],
                key_bytes=options["key_bytes"],
                threads=options["threads"],
                utilisation=options["utilisation"],
                slots=options["slots"],
            )
        )
        if options["json"]:
            self.print_json(asdict(found))
            return
        for name, value in (
            ("SLOTS", f"{found.slots:,}"),
            ("busy threads", f"{found.busy_threads:,}"),
            ("processes", f"{found.processes:,} with {options['threads']} threads each"),
            ("a message in Redis", f"{found.message_bytes:,} bytes"),
            ("waiting messages", size_text(found.waiting_bytes)),
            ("maxmemory", f"{size_text(found.maxmemory)} or more"),
            ("Redis connections", f"{found.redis_connections:,} at most"),
            ("database connections", f"{found.database_connections:,} at most"),
        ):
            self.stdout.write(f"{name:<21} {value}")
