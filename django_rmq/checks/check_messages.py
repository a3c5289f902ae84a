"""What checks report: errors and warnings, which a project silences by their ids. And what they look at: the settings,
after all listeners and tasks of the project are imported."""

from __future__ import annotations

from contextlib import suppress

from django.core import checks
from django.core.checks import CheckMessage

from django_rmq.conf import Config, read_settings
from django_rmq.exceptions import ConfigurationError
from django_rmq.tasks import task_modules
from django_rmq.worker import listener_registry


class _OldIds(CheckMessage):
    """A message that is also silenced by its id of older versions, which began with ``rmq``."""

    def is_silenced(self) -> bool:
        """Return whether the project silences this message."""
        old = CheckMessage(self.level, self.msg, id=str(self.id).removeprefix("django_"))
        return super().is_silenced() or old.is_silenced()


class AppError(_OldIds, checks.Error):
    """An error of this app."""


class AppWarning(_OldIds, checks.Warning):
    """A warning of this app."""


class AppInfo(_OldIds, checks.Info):
    """A note of this app."""


def read_project() -> Config | None:
    """Return the settings with all that the project's modules bring along. None: they are wrong; check_settings says why.

    Django runs checks in any order. So each imports for itself what a worker imports: schedules declare topics, and modules
    of tasks may have listeners.
    """
    if read_settings()[0] is None:
        return None
    with suppress(ConfigurationError):  # which check_listeners and check_tasks report
        listener_registry.discover()
        task_modules.import_tasks()
    return read_settings()[0]


def sentence(text: object) -> str:
    """Return the text of an error with a full stop, which texts of servers and drivers may have already."""
    return f"{str(text).rstrip('. ')}."
