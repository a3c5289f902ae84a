"""Every built-in pipeline once, for an environment and a PySpark of its own: ``python piped.py FOLDER``.

Prints as JSON what each has done, counted in Redis and in files, or what it said instead, and what was there after
that. RMQ_URL says where Redis is. Nothing of the tests is imported here, because they need more than a project does.
"""

from __future__ import annotations

import io
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import django
from django.conf import settings
from django.core.management import CommandError, call_command

SENT, DEAD, SLOTS = 20, 6, 2
TOPICS = {
    "notes": {"TYPE": "range_merge", "SLOTS": SLOTS, "TIME_RANGE": "1ms"},
    "old": {"TYPE": "priority", "SLOTS": SLOTS},
}


def run(*arguments: object) -> str:
    output = io.StringIO()
    call_command("runrmqpipeline", *map(str, arguments), stdout=output, stderr=io.StringIO())
    return output.getvalue()


def rows(folder: Path) -> int:
    import pyarrow.parquet

    return pyarrow.parquet.read_table(folder).num_rows if folder.exists() else 0


def reached(name: str) -> tuple[Any, Any]:
    """Return the broker, and a topic with its present slots."""
    from django_rmq import connections
    from django_rmq.conf import get_config

    broker = connections.get_broker("worker")
    return broker, connections.with_present_slots(get_config().topic(name), broker)


class Project:
    """What a pipeline may change."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def count(self, name: str, state: str) -> int:
        from django_rmq.core.commands import inspect

        broker, topic = reached(name)
        return sum(getattr(broker.run(inspect.count(topic, slot)), state) for slot in range(topic.slots))

    def ingest(self) -> int:
        source = self.folder / "rows.csv"
        source.write_text("n\n" + "".join(f"{n}\n" for n in range(SENT)))
        run("ingest", "notes", source)
        return self.count("notes", "store")

    def report(self) -> int:
        return int(json.loads(run("report", "notes", "--json"))["notes"]["backlog"]["store"])

    def consume(self) -> int:
        arguments = ("--checkpoint", self.folder / "checkpoint", "--available-now")
        run("consume", "notes", "--parquet", self.folder / "out", *arguments)
        return rows(self.folder / "out")

    def keep(self) -> int:
        from django_rmq import send_messages
        from django_rmq.core.commands import inspect, operate
        from django_rmq.spark.pipelines.archive import YOUNGEST_MS

        send_messages("old", list(range(DEAD)), priority=100)
        broker, topic = reached("old")
        for slot in range(SLOTS):
            names = [
                entry.member for entry in broker.run(inspect.list_messages(topic, slot, "store")).entries
            ]
            broker.run(operate.bury(topic, slot, names, "by hand"))
        time.sleep(YOUNGEST_MS / 1000)
        run("archive", self.folder / "kept", "old", "--keep")
        return rows(self.folder / "kept")

    def archive(self) -> int:
        run("archive", self.folder / "dead", "old")
        return rows(self.folder / "dead")

    def replay(self) -> int:
        run("replay", "old", "--archive", self.folder / "kept")
        return self.count("old", "store")

    def left(self) -> dict[str, int]:
        """Return what there is now: a pipeline that is refused has touched nothing."""
        return {
            "waiting": self.count("notes", "store"),
            "dead": self.count("old", "dead"),
            "archived": rows(self.folder / "dead"),
        }


def main(folder: Path) -> None:
    rmq = {"REDIS": os.environ["RMQ_URL"], "KEY_PREFIX": f"{folder.name}:", "TOPICS": TOPICS}
    databases = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
    settings.configure(INSTALLED_APPS=["django_rmq"], DATABASES=databases, USE_TZ=True, RMQ=rmq)
    django.setup()
    import pyspark

    from django_rmq.spark.java import open_session

    open_session("piped", master="local[2]")
    project = Project(folder)
    told: dict[str, Any] = {"pyspark": pyspark.__version__}
    each: tuple[Callable[[], int], ...] = (
        *(project.ingest, project.report, project.consume),
        *(project.keep, project.archive, project.replay),
    )
    for one in each:
        try:
            told[one.__name__] = one()
        except CommandError as error:
            told[one.__name__] = str(error)
    print(json.dumps({**told, "left": project.left()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
