"""`send_message` and related functions, in step with database transactions."""

from django_rmq.core.model.send_results import RemoveResult
from django_rmq.core.producer.placement import Send
from django_rmq.sending.api import (
    acancel_message,
    aensure_message,
    aremove_message,
    asend_message,
    asend_messages,
    cancel_message,
    ensure_message,
    observers,
    options_in_ms,
    remove_message,
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
