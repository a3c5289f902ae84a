"""``manage.py rmqresume``: resume paused topics."""

from __future__ import annotations

from django_rmq.management.commands import rmqpause


class Command(rmqpause.Command):
    """Resume topics."""

    help = "Go on with topics that rmqpause has paused; their workers are woken."
    act = "resume"
