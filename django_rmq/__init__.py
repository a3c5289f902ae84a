"""A message queue for Django in Redis: merging, priorities, delivery at a given time, strictly serial slots.

    from django_rmq import listener, send_message

All names but the errors are imported when they are first used: ``import django_rmq`` loads neither Django nor a
Redis driver, so that Spark executors and plain scripts can use the core.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from django_rmq.exceptions import (
    CallerError,
    Cancelled,
    ConfigurationError,
    InvalidBody,
    InvalidMessage,
    InvalidRequest,
    LostRace,
    MessageGone,
    MessageTooLarge,
    NotPermitted,
    OperationRefused,
    Reject,
    Retry,
    RmqError,
    ServerFull,
    ServerRefused,
    ServerTrouble,
    ServerUnavailable,
    SlotMoved,
    TopicFull,
    TopicMismatch,
    UnknownSchedule,
    UnknownTopic,
    WrongType,
)

__version__ = "0.1.0"

if TYPE_CHECKING:
    from django_rmq.core.log import WorkerFilter
    from django_rmq.core.model.delivered_message import Message
    from django_rmq.core.model.send_results import SendResult, SendResults
    from django_rmq.core.model.status import MessageStatus
    from django_rmq.core.model.topic import TopicType
    from django_rmq.message_tracking import (
        amessage_status,
        areplay_message,
        message_status,
        replay_message,
    )
    from django_rmq.sending import (
        RemoveResult,
        Send,
        acancel_message,
        aensure_message,
        aremove_message,
        asend_message,
        asend_messages,
        cancel_message,
        ensure_message,
        remove_message,
        send_message,
        send_messages,
    )
    from django_rmq.worker.listener_registry import listener, schedule
else:
    _HOMES = {
        "core.log": ("WorkerFilter",),
        "core.model.delivered_message": ("Message",),
        "core.model.send_results": (
            "SendResult",
            "SendResults",
        ),
        "core.model.status": ("MessageStatus",),
        "core.model.topic": ("TopicType",),
        "worker.listener_registry": ("listener", "schedule"),
        "sending": (
            "RemoveResult",
            "Send",
            "acancel_message",
            "aensure_message",
            "aremove_message",
            "asend_message",
            "asend_messages",
            "cancel_message",
            "ensure_message",
            "remove_message",
            "send_message",
            "send_messages",
        ),
        "message_tracking": ("amessage_status", "areplay_message", "message_status", "replay_message"),
    }
    _HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

    def __getattr__(name):
        from importlib import import_module

        try:
            home = _HOME_OF[name]
        except KeyError:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
        value = getattr(import_module(f"{__name__}.{home}"), name)
        globals()[name] = value
        return value

    def __dir__():
        return sorted({*globals(), *_HOME_OF})


__all__ = [
    "CallerError",
    "Cancelled",
    "ConfigurationError",
    "InvalidBody",
    "InvalidMessage",
    "InvalidRequest",
    "LostRace",
    "Message",
    "MessageGone",
    "MessageStatus",
    "MessageTooLarge",
    "NotPermitted",
    "OperationRefused",
    "Reject",
    "RemoveResult",
    "Retry",
    "RmqError",
    "Send",
    "SendResult",
    "SendResults",
    "ServerFull",
    "ServerRefused",
    "ServerTrouble",
    "ServerUnavailable",
    "SlotMoved",
    "TopicFull",
    "TopicMismatch",
    "TopicType",
    "UnknownSchedule",
    "UnknownTopic",
    "WorkerFilter",
    "WrongType",
    "__version__",
    "acancel_message",
    "aensure_message",
    "amessage_status",
    "aremove_message",
    "areplay_message",
    "asend_message",
    "asend_messages",
    "cancel_message",
    "ensure_message",
    "listener",
    "message_status",
    "remove_message",
    "replay_message",
    "schedule",
    "send_message",
    "send_messages",
]
