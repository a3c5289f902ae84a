"""Commands of manage.py, and what all of them have in common: errors in one line, and exit codes that say why.

0 all is well, 1 it is not, 2 usage or configuration, 3 Redis or the coordinator.
"""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError

from django_rmq.exceptions import RmqError, ServerTrouble


class RmqCommand(BaseCommand):
    """A command whose RMQ errors become one line and an exit code."""

    # The settings are checked by reading them: `check` would print a page and exit with 1.
    requires_system_checks: list[str] = []

    def execute(self, *args: Any, **options: Any) -> str | None:
        """Run the command; raises ``CommandError`` for whatever RMQ raises."""
        try:
            return super().execute(*args, **options)
        except RmqError as error:
            returncode = 3 if isinstance(error, ServerTrouble) else 2
            raise CommandError(" ".join(str(error).split()), returncode=returncode) from error
