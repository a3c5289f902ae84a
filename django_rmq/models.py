"""The messages of the outbox, those that listeners with ``once`` have processed, and topics, which have no table.

Topics exist in the settings and in Redis. A ``Topic`` here is a name to which permissions and the admin's
history refer.
"""

from __future__ import annotations

from typing import ClassVar

from django.db import models
from django.db.models.functions import Now
from django.utils.translation import gettext_lazy as _


class RowlessManager(models.Manager["Topic"]):
    """Asks no database. Programs such as ``dumpdata`` ask every model for its rows, and topics have no table."""

    def get_queryset(self) -> models.QuerySet[Topic]:
        return super().get_queryset().none()


class Topic(models.Model):
    """A topic by its name. It has one permission for each kind of action."""

    name = models.CharField(_("name"), max_length=100, primary_key=True)

    objects: ClassVar[RowlessManager] = RowlessManager()

    class Meta:
        managed = False
        base_manager_name = "objects"
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
            ("control_workers", "Can quiet, resume and stop workers"),
            ("view_stack", "Can see where the code of running listeners is"),
        ]

    def __str__(self) -> str:
        return self.name


class ProcessedMessage(models.Model):
    """A message that a listener with ``once`` has processed, in the database that has the effects.

    The listener's transaction writes the row, so the row exists if and only if the effects do. The workers
    delete rows older than ``RMQ["ONCE_RETENTION"]``.
    """

    topic = models.CharField(max_length=100)
    origin = models.UUIDField()
    # Workers delete old rows by the clock of the database, and the INSERT of ``worker.once`` has no time.
    processed_at = models.DateTimeField(db_default=Now())

    objects: ClassVar[models.Manager[ProcessedMessage]] = models.Manager()

    class Meta:
        default_permissions = ()
        constraints = [
            # Nearly every comparison is decided by the origin alone.
            models.UniqueConstraint(fields=["origin", "topic"], name="rmq_processed_once")
        ]

    def __str__(self) -> str:
        return f"{self.topic} {self.origin.hex}"


class OutboxMessage(models.Model):
    """A send or a removal that was committed with a transaction, until Redis has it. ``outbox`` has the rules.

    All times are in ms since the epoch.
    """

    topic = models.CharField(max_length=100)
    type = models.CharField(max_length=16)
    """The type of the topic at the send, which says what ``score`` means."""
    act = models.CharField(max_length=6)
    """send, ensure, remove or cancel."""
    identity = models.UUIDField(db_index=True)
    """A hash of topic, member and slot basis: what makes two rows those of the same message."""
    # A CRC-32 has no sign, so half of them exceed an IntegerField.
    crc = models.BigIntegerField()
    """The slot follows from it for any slot count of the topic."""
    member = models.BinaryField()
    envelope = models.BinaryField(null=True)
    score = models.BigIntegerField()
    """As given by the sender: ms to wait from ``sent_ms``, a priority, or the due time."""
    replicas = models.PositiveSmallIntegerField(default=0)
    fsync = models.BooleanField(default=False)
    sent_ms = models.BigIntegerField()
    due_ms = models.BigIntegerField(null=True, db_index=True)
    """When the relay sends it. None: it was refused, and the relay leaves it out."""
    attempts = models.PositiveSmallIntegerField(default=0)
    """How often the relay tried in vain, although Redis answered."""
    error = models.TextField(default="")
    """Why the last attempt failed."""
    failed_ms = models.BigIntegerField(null=True)

    objects: ClassVar[models.Manager[OutboxMessage]] = models.Manager()

    class Meta:
        verbose_name = _("message in the outbox")
        verbose_name_plural = _("messages in the outbox")
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.topic} {self.pk}"
