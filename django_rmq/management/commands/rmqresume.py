"""``manage.py rmqresume``: resume paused topics."""

from __future__ import annotations

from django_rmq.management.commands import rmqpause


class Command(rmqpause.Command):
    """Resume topics."""

    help = "Resume delivering messages of topics that rmqpause has paused."
    act = "resume"
