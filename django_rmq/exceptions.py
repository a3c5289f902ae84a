"""What can go wrong, as one tree whose branches say what the caller may do.

    RmqError
    ├── CallerError             the call is wrong: repeating it cannot help
    │   ├── ConfigurationError    settings, topic definitions or listeners disagree
    │   │   └── TopicMismatch       Redis holds another definition of the topic
    │   ├── UnknownTopic          no such topic is declared
    │   ├── UnknownSchedule       no worker has declared such a schedule
    │   ├── UnknownTask           no module that is imported has such a task
    │   ├── InvalidMessage        a body, priority, time or key breaks a rule
    │   │   ├── MessageTooLarge     the body exceeds the topic's MAX_BODY
    │   │   └── InvalidBody         the body does not fit the type that BODY names
    │   ├── WrongType             a key holds something that RMQ did not put there
    │   │   └── Unreadable          a value in it cannot be read
    │   ├── NotPermitted          the caller lacks the permission
    │   ├── InvalidRequest        an id, a filter, a cursor or an option of an operation cannot be used
    │   └── OperationRefused      the operation has no meaning for this topic or state
    ├── LostRace                something else happened first: read again, then decide
    │   ├── MessageGone           the message is not there, or not any more
    │   ├── SlotMoved             the topic now has another slot count
    │   ├── TopicFull             MAX_BACKLOG is reached: try later
    │   └── TooManySends          the sender has used up its rate: try later
    └── ServerTrouble           Redis or the coordinator failed: try later
        ├── ServerUnavailable     no connection, time-out, loading, fail-over
        │   └── NodeUnavailable     the same for one node of a Redis Cluster
        ├── ServerFull            Redis is out of memory (or refuses to persist)
        └── ServerRefused         the server refuses the command

    Retry, Reject, Cancelled    raised by listeners; not errors of RMQ

A listener raises ``Retry`` or ``Reject`` to decide the outcome of its message, and ``Cancelled`` to stop because
it was cancelled; they are outside the tree, so that ``except RmqError`` never swallows them.
"""

from collections.abc import Mapping, Sequence
from typing import Self

from django_rmq.durations import Duration, InvalidDuration, parse_duration


class RmqError(Exception):
    """Anything that RMQ raises on purpose."""

    sent: int = 0
    """How many messages of a call of ``send_messages`` were sent for certain before the error. Some of those behind
    them may have been sent if a server did not answer."""


class CallerError(RmqError):
    """The call is wrong; repeating it cannot help."""

    def reworded(self, text: str) -> Self:
        """Return the same error with another text."""
        # Some of these classes take other arguments in ``__init__``, such as the fields of an ``InvalidBody``. Their
        # attributes are copied.
        error = type(self).__new__(type(self), text)
        error.__dict__.update(self.__dict__)
        return error


class ConfigurationError(CallerError):
    """The settings, a topic's definition or a listener is wrong."""


class TopicMismatch(ConfigurationError):
    """Redis holds another definition of this topic than the settings do."""


class UnknownTopic(CallerError):
    """No topic of this name is declared in ``RMQ["TOPICS"]``."""


class UnknownSchedule(CallerError):
    """No worker has declared a schedule of this name."""


class UnknownTask(CallerError):
    """No module that this process has imported has a task of this name. A name from Redis is never imported."""


class InvalidMessage(CallerError):
    """The message breaks a rule of its topic; nothing was written."""


class MessageTooLarge(InvalidMessage):
    """The encoded body is larger than the topic's ``MAX_BODY``; nothing was written."""


class InvalidBody(InvalidMessage, ValueError):
    """The body does not fit the type that the topic's ``BODY`` names.

    ``fields``: place in the body, such as ``lines[2].price`` (empty: the body itself) → what is wrong there.
    """

    def __init__(self, text: str, fields: Mapping[str, Sequence[str]] | None = None) -> None:
        super().__init__(text)
        self.fields = dict(fields or {})


class WrongType(CallerError):
    """A key of the slot holds another Redis type than RMQ keeps there; nothing was changed."""


class Unreadable(WrongType):
    """A key holds a value that RMQ did not write. The call may have run, and its answer cannot be read."""


class NotPermitted(CallerError):
    """The caller lacks the permission for it; nothing was done."""


class InvalidRequest(CallerError):
    """An id, a filter, a cursor or an option of an operation cannot be used; nothing was done."""


class OperationRefused(CallerError):
    """The operation has no meaning for this topic or state; the text says why. Nothing was done."""


class LostRace(RmqError):
    """Something else happened first; read the present state, then decide."""


class MessageGone(LostRace):
    """The message is not there, or not any more."""


class SlotMoved(LostRace):
    """The topic now has another slot count; reload its definition and try again."""

    slots: int | None = None
    """The slot count that the slot has, if the slot itself has refused a call."""


class TopicFull(LostRace):
    """The slot holds its share of ``MAX_BACKLOG``, or the message all its bodies; nothing was written. Try again later."""


class TooManySends(LostRace):
    """The sender has used up its rate; nothing was written. Try again in ``seconds``."""

    def __init__(self, text: str, seconds: float) -> None:
        super().__init__(text)
        self.seconds = seconds


class ServerTrouble(RmqError):
    """Redis or the coordinator failed; the same call may succeed later."""

    refuses_writes = False
    """Whether the server answers and refuses only what changes data: it is full, a replica, or lacks something."""


class ServerUnavailable(ServerTrouble):
    """The server does not answer, is loading, or is failing over."""


class NodeUnavailable(ServerUnavailable):
    """One node of a Redis Cluster does not answer, or a slot is just moving to another node; the others still work."""


class ServerFull(ServerTrouble):
    """The server is out of memory or refuses writes; operations that empty the queue still work."""

    refuses_writes = True


class ServerRefused(ServerTrouble):
    """The server refuses the command: authentication, permission, or a script it cannot run."""


def retry_seconds(call: str, reason: object, delay: object) -> float | None:
    """Return the delay in seconds that ``call``, ``Retry`` or ``message.retry``, was given. None: the topic's back-off.

    Raises ``TypeError`` for a reason that is not text, and ``ValueError`` for a delay that is not a duration.
    """
    if not isinstance(reason, str):
        kind_text = InvalidDuration("", "", reason).given
        advice = f"{call}(str(error))" if isinstance(reason, BaseException) else f"{call}(delay={kind_text})"
        raise TypeError(f"the first argument of {call} is the reason, a text, got {kind_text}: say {advice}")
    if delay is None:
        return None
    try:
        return parse_duration(delay).total_seconds()
    except InvalidDuration as error:
        raise ValueError(f"{call}(delay=) must be {error}, or None, got {error.given}") from None


class Retry(Exception):
    """Raised by a listener: try this message again after ``delay``.

    It uses a retry, like any failure. ``delay`` is seconds, a timedelta or text such as "15m"; None: the topic's
    back-off. Raises ``TypeError`` for a reason that is not text, and ``ValueError`` for a delay that is not a
    duration; the message then fails with it.
    """

    def __init__(self, reason: str = "", *, delay: Duration | None = None) -> None:
        super().__init__(reason)
        self.delay = retry_seconds("Retry", reason, delay)
        """In seconds. None: the topic's back-off."""


class Cancelled(Exception):
    """Raised by a listener: it stops, because ``message.cancelled`` is true. Otherwise the message fails."""


class Reject(Exception):
    """Raised by a listener: this message can never succeed; put it into Dead at once."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
