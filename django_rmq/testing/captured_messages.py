"""The messages that a test sends: captured at the call, and compared with what the test expects.

Unless the test wants them delivered, no message reaches a broker. The broker for those that do is in ``testing.cases``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from django_rmq.core.model.send_results import SendResult
from django_rmq.core.producer.placement import SendOptions
from django_rmq.exceptions import InvalidBody

_ANY: object = object()


@dataclass(frozen=True, slots=True)
class CapturedMessage:
    """One send, as given by the caller and as validated."""

    topic: str
    body: Any
    options: SendOptions
    """The options given beside the body: key, priority, time_range, fixed_time, delay, slot_basis, headers, expires,
    max_retries, timeout."""
    slot: int
    member: bytes
    """The member that Redis would hold: the encoded body, or the key."""
    ensure: bool
    result: SendResult
    """The result, ``pending`` until the commit and ``discarded`` after a rollback."""

    @property
    def key(self) -> str | None:
        """The key that was given."""
        return self.options.get("key")


class CapturedMessages(list[CapturedMessage]):
    """The captured messages, in order."""

    def of(self, topic: str) -> list[CapturedMessage]:
        """Return the messages of one topic."""
        return [message for message in self if message.topic == topic]


class _Recorder:
    """An observer of ``sending``."""

    def __init__(self, delivers: bool) -> None:
        self.delivers = delivers
        self.messages = CapturedMessages()
        self._lock = threading.Lock()

    def see(self, outgoing: Any, body: object, options: SendOptions, result: SendResult) -> None:
        message = CapturedMessage(
            outgoing.topic.name,
            body,
            options,
            outgoing.slot,
            outgoing.member,
            outgoing.act == "ensure",
            result,
        )
        with self._lock:
            self.messages.append(message)


_recorders: list[_Recorder] = []


@contextmanager
def captured_messages(*, deliver: bool = False) -> Iterator[CapturedMessages]:
    """Capture what the process sends in this block, at the call, including what waits for a commit.

    Messages are validated as usual. Unless ``deliver`` is True nothing reaches a server: sends say
    ``stored``, removals ``not_found``, after the commit if there is a transaction.
    """
    from django_rmq import sending

    recorder = _Recorder(deliver)
    sending.observers.append(recorder)
    _recorders.append(recorder)
    try:
        yield recorder.messages
    finally:
        sending.observers.remove(recorder)
        _recorders.remove(recorder)


def assert_message_sent(
    topic: str,
    count: int | None = None,
    *,
    body: object = _ANY,
    key: str | None = None,
    messages: CapturedMessages | None = None,
    **options: object,
) -> list[CapturedMessage]:
    """Assert that ``topic`` was sent a matching message (``count``: exactly this often), and return the matches.

    On topics whose BODY names a type, ``body`` may be an instance or plain data, whichever was sent.
    ``options`` are compared with those of the send, like ``priority=500``; a duration may have any form. ``messages``: those of a
    ``captured_messages()`` block; by default of the innermost one. Messages that were rolled back do not
    count.
    """
    sent = _captured(messages)
    wanted = {**options, **({} if key is None else {"key": key})}
    compared = _comparable(topic, wanted)
    fitting = [
        message
        for message in sent.of(topic)
        if message.result.status != "discarded"
        and (body is _ANY or _has_body(message, body))
        and compared.items() <= _comparable(topic, message.options).items()
    ]
    if len(fitting) != count if count is not None else not fitting:
        given = wanted if body is _ANY else {"body": body, **wanted}
        described = "".join(f", {name}={value!r}" for name, value in given.items())
        expected = "at least 1 message" if count is None else f"exactly {count} message{'s' * (count != 1)}"
        raise AssertionError(
            f"expected {expected} of topic {topic!r}{described}, found {len(fitting)}; {_listed(sent)}"
        )
    return fitting


def assert_no_messages(topic: str | None = None, *, messages: CapturedMessages | None = None) -> None:
    """Assert that nothing was sent (to ``topic``), except for what was rolled back."""
    sent = _captured(messages)
    captured = CapturedMessages(
        message
        for message in (sent if topic is None else sent.of(topic))
        if message.result.status != "discarded"
    )
    if captured:
        where = "" if topic is None else f" of topic {topic!r}"
        raise AssertionError(f"expected no message{where}, found {len(captured)}; {_listed(captured)}")


def _comparable(name: str, options: SendOptions) -> SendOptions:
    """Return the options of a send with times in ms, so that ``60`` is the same as ``"1m"``."""
    from django_rmq.conf import get_config
    from django_rmq.sending import options_in_ms

    topic = get_config().topics.get(name)
    return dict(options) if topic is None else options_in_ms(topic, options)


def _has_body(message: CapturedMessage, body: object) -> bool:
    """Return whether a message was sent with ``body``, or with what is stored as the same."""
    from django_rmq.conf import get_config

    topic = get_config().topics.get(message.topic)
    if message.body == body or topic is None or topic.typed is None:
        return bool(message.body == body)
    try:
        return bool(topic.typed.plain(message.body) == topic.typed.plain(body))
    except InvalidBody:
        return False


def _captured(messages: CapturedMessages | None) -> CapturedMessages:
    if messages is not None:
        return messages
    if not _recorders:
        raise RuntimeError("no messages are captured here: use this inside `with captured_messages():`")
    return _recorders[-1].messages


def _listed(messages: CapturedMessages) -> str:
    if not messages:
        return "no message was sent"
    shown = [
        f"{message.topic}: {message.body!r} {dict(message.options) or ''}".rstrip()
        for message in messages[:20]
    ]
    more = f" and {len(messages) - 20} more" if len(messages) > 20 else ""
    return f"sent: {'; '.join(shown)}{more}"
