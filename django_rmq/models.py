"""A model without a table, which connects topics with Django's permissions and with the admin and its history.

Topics exist in the settings and in Redis. A ``Topic`` here is a name to which a LogEntry can refer.
"""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _


class Topic(models.Model):
    """A topic by its name; never queried. It has one permission for each kind of action."""

    name = models.CharField(_("name"), max_length=100, primary_key=True)

    class Meta:
        managed = False
        verbose_name = _("topic")
        verbose_name_plural = _("topics")
        default_permissions = ()
        permissions = [
            ("view_topic", "Can see topics, depths, consumers and messages without their content"),
            ("view_bodies", "Can read bodies, keys and errors of messages"),
            ("send_messages", "Can send messages"),
            (
                "consume_messages",
                "Can consume messages over REST: take them with their content, and settle them",
            ),
            ("replay_messages", "Can replay dead messages"),
            ("edit_messages", "Can edit messages before a replay, and reschedule them"),
            ("delete_messages", "Can delete messages, and put them into Dead"),
            ("pause_topic", "Can pause and resume topics"),
            ("purge_topic", "Can purge topics"),
        ]

    def __str__(self) -> str:
        return self.name
