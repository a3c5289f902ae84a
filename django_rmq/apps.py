"""The app: it registers the system checks and the rules for hiding contents, and notes which database connections are open.

It neither connects nor imports listeners.
"""

from __future__ import annotations

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class DjangoRmqConfig(AppConfig):
    """``"django_rmq"`` in INSTALLED_APPS."""

    name = "django_rmq"
    label = "django_rmq"
    verbose_name = _("Message queues")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from django_rmq import (
            checks,  # noqa: F401 - importing it registers the checks
            open_transactions,
        )
        from django_rmq.conf import get_config
        from django_rmq.core import redaction

        redaction.rules = redaction.RedactionRules(
            _sealed_id, lambda topic: get_config().admin.formatter_of(topic) is not None
        )
        # Sends of coroutines ask whether a transaction is open. ``open_transactions`` notes each connection that opens after
        # its import, and here those that were open before.
        open_transactions.record_opened_before()


def _sealed_id(topic: str, slot: int, member: bytes) -> str:
    # A process that logs no message does not load what searches for messages.
    from django_rmq.message_ids import sealed_id

    return sealed_id(topic, slot, member)
