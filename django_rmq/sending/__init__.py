"""`send_message` and related functions, in step with database transactions."""

from django_rmq.core.producer.placement import Send
from django_rmq.sending.bulk import options_in_ms
from django_rmq.sending.deferred_results import RemoveResult
from django_rmq.sending.dispatch import observers
from django_rmq.sending.removal import (
    acancel_message,
    aremove_message,
    cancel_message,
    remove_message,
)
from django_rmq.sending.send_api import (
    aensure_message,
    asend_message,
    asend_messages,
    ensure_message,
    send_message,
    send_messages,
    send_outgoing,
)

__all__ = [
    "RemoveResult",
    "Send",
    "acancel_message",
    "aensure_message",
    "aremove_message",
    "asend_message",
    "asend_messages",
    "cancel_message",
    "ensure_message",
    "observers",
    "options_in_ms",
    "remove_message",
    "send_message",
    "send_messages",
    "send_outgoing",
]
