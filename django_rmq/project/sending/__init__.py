"""`send_message` and related functions, in step with database transactions."""

from django_rmq.core.producer.placing import Send
from django_rmq.project.sending.bulk import options_in_ms
from django_rmq.project.sending.dispatching import observers
from django_rmq.project.sending.front import (
    aensure_message,
    asend_message,
    asend_messages,
    ensure_message,
    send_message,
    send_messages,
    send_outgoing,
)
from django_rmq.project.sending.removing import (
    acancel_message,
    aremove_message,
    cancel_message,
    remove_message,
)
from django_rmq.project.sending.results import RemoveResult

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
