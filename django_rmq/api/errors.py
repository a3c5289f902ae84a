"""Errors as a status and a stable code; the text may change.

    {"code": "message_gone", "detail": "topic orders does not hold the message 3.IjEi. It may have been processed or deleted"}

Only the views of this package use it; a project's own EXCEPTION_HANDLER is left alone.
"""

from __future__ import annotations

import logging
import math
from typing import NamedTuple

from django.core.exceptions import PermissionDenied, RequestDataTooBig
from django.db import connections as databases
from django.http import Http404, UnreadablePostError
from rest_framework import exceptions as rest
from rest_framework.response import Response

from django_rmq.core.log import LogThrottle
from django_rmq.exceptions import (
    ConfigurationError,
    InvalidBody,
    InvalidMessage,
    InvalidRequest,
    MessageGone,
    MessageTooLarge,
    NotPermitted,
    OperationRefused,
    ServerFull,
    ServerTrouble,
    SlotMoved,
    TooManySends,
    TopicFull,
    UnknownSchedule,
    UnknownTask,
    UnknownTopic,
    WrongType,
)
from django_rmq.operations.sends import OtherContent, RequestRunning

_log_throttled = LogThrottle(logging.getLogger("django_rmq.api"))


class ErrorStatus(NamedTuple):
    """The response to an error."""

    status: int
    code: str
    retry_seconds: int | None = None
    """The value of Retry-After in seconds."""


ANSWERS: dict[type[Exception], ErrorStatus] = {
    OtherContent: ErrorStatus(422, "idempotency_key_reused"),
    RequestRunning: ErrorStatus(409, "request_running", 1),
    UnknownTask: ErrorStatus(404, "task_not_found"),
    UnknownTopic: ErrorStatus(404, "topic_not_found"),
    UnknownSchedule: ErrorStatus(404, "schedule_not_found"),
    MessageGone: ErrorStatus(404, "message_gone"),
    MessageTooLarge: ErrorStatus(413, "message_too_large"),
    InvalidBody: ErrorStatus(400, "invalid_body"),
    InvalidMessage: ErrorStatus(400, "invalid_message"),
    InvalidRequest: ErrorStatus(400, "invalid_request"),
    OperationRefused: ErrorStatus(409, "refused"),
    WrongType: ErrorStatus(409, "wrong_type"),
    SlotMoved: ErrorStatus(409, "slot_moved", 1),
    NotPermitted: ErrorStatus(403, "permission_denied"),
    TooManySends: ErrorStatus(429, "too_many_sends"),
    TopicFull: ErrorStatus(507, "topic_full", 30),
    ServerFull: ErrorStatus(507, "redis_full", 30),
    ServerTrouble: ErrorStatus(503, "redis_unavailable", 2),
    ConfigurationError: ErrorStatus(503, "misconfigured", 30),
}
"""The first class of which an error is an instance decides the response."""


class BodyTooLarge(rest.APIException):
    """The request has more bytes than ``RMQ["API"]["MAX_BYTES"]``."""

    status_code = 413
    default_code = "body_too_large"


class LengthRequired(rest.APIException):
    """The request has a body and no Content-Length."""

    status_code = 411
    default_code = "length_required"


class Invalid(rest.ParseError):
    """A request whose parts contradict each other."""

    default_code = "invalid_request"


class NotFound(rest.NotFound):
    """A topic that does not exist, or that this user must not know of."""

    default_code = "topic_not_found"


class Conflict(rest.APIException):
    """An action found a message in another state than it requires; ``outcome`` is that state."""

    status_code = 409
    default_code = "conflict"

    def __init__(self, detail: str, outcome: str) -> None:
        super().__init__(detail)
        self.outcome = outcome


def answer(error: Exception, context: object) -> Response | None:
    """Return the response to ``error``. None: it is a bug, and is not handled here."""
    if isinstance(error, rest.APIException):
        return _of_framework(error)
    if isinstance(error, PermissionDenied):
        return _of_framework(rest.PermissionDenied())
    if isinstance(error, Http404):
        return _of_framework(rest.NotFound())
    if isinstance(error, UnreadablePostError):
        return _of_framework(Invalid("The request body did not arrive completely."))
    if isinstance(error, RequestDataTooBig):
        return _of_framework(BodyTooLarge(str(error)))
    problem = next((answer for kind, answer in ANSWERS.items() if isinstance(error, kind)), None)
    if problem is None:
        return None
    detail = str(error)
    if isinstance(error, ConfigurationError):
        # The content of the settings is not shown to clients.
        _log_throttled(type(error), "REST API: request failed: %s", error)
        detail = "The message queue is misconfigured. See the log of the server."
    elif isinstance(error, ServerTrouble):
        # The address and the replies of Redis are not shown to clients either.
        _log_throttled(type(error), "REST API: request failed: %s", error)
        detail = "Redis is unavailable. Repeat the request later."
        if error.refuses_writes:
            detail = (
                "Redis refuses writes, because it is full or for another reason. Repeat the request later."
            )
    data: dict[str, object] = {"code": problem.code, "detail": detail}
    if isinstance(error, InvalidBody):
        data["errors"] = error.fields
    response = Response(data, status=problem.status)
    seconds = math.ceil(error.seconds) if isinstance(error, TooManySends) else problem.retry_seconds
    if seconds is not None:
        response["Retry-After"] = str(seconds)
    _roll_back()
    return response


def _of_framework(error: rest.APIException) -> Response:
    code = getattr(error.detail, "code", None) or error.default_code
    data: dict[str, object] = {"code": str(code), "detail": str(error.detail)}
    if isinstance(error, rest.ValidationError):
        data = {"code": "invalid", "detail": "The request is not valid.", "errors": error.detail}
    if isinstance(error, Conflict):
        data["outcome"] = error.outcome
    response = Response(data, status=error.status_code)
    wait = getattr(error, "wait", None)
    if wait is not None:
        response["Retry-After"] = str(math.ceil(wait))
    header = getattr(error, "auth_header", None)
    if header:
        response["WWW-Authenticate"] = header
    _roll_back()
    return response


def _roll_back() -> None:
    """Roll back the database changes of a failed request, if the project wraps requests in transactions."""
    # The exception handler of the framework does this, and ``answer`` takes its place.
    for database in databases.all(initialized_only=True):
        if database.settings_dict["ATOMIC_REQUESTS"] and database.in_atomic_block:
            database.set_rollback(True)
