"""A process that re-slots a topic and dies by -9 as it makes a given step for the n-th time.

python -m tests.e2e.mover TOPIC SLOTS STEP N
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import django

STEPS = ("begun", "shut", "moved_out", "moved_in", "settled", "reopened", "moved")


def main(topic: str, slots: str, step: str) -> None:
    django.setup()
    from django.core.management import call_command

    from django_rmq.core import reslotting

    move = reslotting.move

    def note(made: str, progress: Any = None) -> None:
        if made == step:
            os.kill(os.getpid(), signal.SIGKILL)

    def watched(*args: Any, **options: Any) -> Any:
        note("begun")
        moved = move(*args, **{**options, "report": note})
        note("moved")
        return moved

    reslotting.move = watched
    call_command("rmqreslot", topic, slots, at_once=1)


if __name__ == "__main__":
    main(*sys.argv[1:])
