"""What a worker process reports about itself: versions, load, memory, and the messages that it runs.

Here are also what people ask of a worker (``WorkerRequest``: quiet, resume, stop), the stacks of messages that they ask for
(``StackRequest``, and the answer, ``Stack``), and the versions of the project's code that workers report (``CodeVersion``).

Redis keeps all of it as text. Another program may have written it, so that every value is checked when it is read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple

from django_rmq.core.model.bounds import OTHER_FORM

MOST_CALLS = 20
"""The maximum number of messages in a report: those that have run longest. The admin and REST say "its twenty longest"."""

LONGEST_REPORTED_TEXT = 200
"""Maximum length of a text that is read from a report."""

LONGEST_ID = 1_000
"""Maximum length of a sealed id."""

MOST_NUMBER = 1e15
"""The largest number that is read from a report: later than any date that is shown."""


MOST_STACKS = 8
"""The maximum number of messages of which one worker is asked for the stack within a minute: those asked for last."""

LONGEST_STACK = 16_000
"""Maximum number of characters of a stack: its innermost calls."""

REPLACED = " (replaced)"
"""How the name of a thread ends that has a successor, because its listener exceeded MAX_RUNTIME."""

WorkerRequest = Literal["quiet", "resume", "stop"]
"""What people ask of a worker. quiet: take no more messages, and go on with those that run. resume: take messages again.
stop: end the command with all its processes, as SIGTERM does."""


class RunningCall(NamedTuple):
    """A message whose listener runs."""

    topic: str
    id: str
    """The sealed id of the message."""
    since_ms: int
    """When the call of the listener began, by the clock of Redis."""
    attempt: int
    thread: str
    progress: float | None = None
    """The part that is done, from 0 to 1; None: the listener has not reported any."""
    progress_text: str = ""
    """What the listener says about it."""


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """A worker process as it described itself at ``at_ms``, by the clock of Redis."""

    at_ms: int
    host: str
    pid: int
    version: str
    """The version of django_rmq."""
    python: str
    code: str
    """``RMQ["CODE_VERSION"]``, or an empty text."""
    load: float
    """The number of processes that ran or waited for a processor on its host, in the mean of a minute."""
    memory_mib: float
    """The resident memory of the process."""
    threads: int
    taken: int
    """How many of its threads run a listener, without those that have a successor."""
    messages: int
    """The number of messages that it holds: running, and waiting for a thread."""
    running: int
    """The number of messages whose listeners run, in threads and in the event loop."""
    calls: tuple[RunningCall, ...]
    """Those that have run longest."""
    state: str = ""
    """working, quiet or stopping; empty if its version takes no requests."""
    parent: int = 0
    """The process id of its command, which may have other worker processes; 0 if it has none."""

    def encode(self) -> str:
        """Return the text that Redis keeps."""
        return json.dumps(asdict(self), separators=(",", ":"))


def decode(text: bytes) -> WorkerReport | None:
    """Return the report in a text, or None if another program wrote it."""
    try:
        fields = json.loads(text)
        return WorkerReport(
            at_ms=_whole(fields["at_ms"]),
            host=_short(fields["host"]),
            pid=_whole(fields["pid"]),
            version=_short(fields["version"]),
            python=_short(fields["python"]),
            code=_short(fields["code"]),
            load=_finite(fields["load"]),
            memory_mib=_finite(fields["memory_mib"]),
            threads=_whole(fields["threads"]),
            taken=_whole(fields["taken"]),
            messages=_whole(fields["messages"]),
            running=_whole(fields["running"]),
            calls=tuple(
                RunningCall(
                    _short(topic),
                    _short(message, LONGEST_ID),
                    _whole(since),
                    _whole(attempt),
                    _short(thread),
                    None if done is None else min(1.0, _finite(done)),
                    _short(words),
                )
                for topic, message, since, attempt, thread, done, words in fields["calls"][:MOST_CALLS]
            ),
            state=_short(fields.get("state", "")),
            parent=_whole(fields.get("parent", 0)),
        )
    except OTHER_FORM:
        return None


class CodeVersion(NamedTuple):
    """A version of the project's code (``RMQ["CODE_VERSION"]``), by the clock of Redis."""

    name: str
    since_ms: int
    """When workers began to report it, after a time without any."""
    seen_ms: int
    """When a worker reported it last, to within a minute."""


def decode_code_version(name: str, text: bytes) -> CodeVersion | None:
    """Return the version that Redis keeps under ``name``, or None if another program wrote it."""
    try:
        since, seen = text.split()
        return CodeVersion(_short(name), _whole(int(since)), _whole(int(seen)))
    except OTHER_FORM:
        return None


class StackRequest(NamedTuple):
    """A message that a person wants to see the stack of."""

    id: str
    """The sealed id of the message, as the worker reports it."""
    asked_ms: int
    """When the person asked, by the clock of Redis."""


class Stack(NamedTuple):
    """Where the listener of a message was at ``at_ms``, by the clock of Redis."""

    id: str
    asked_ms: int
    """The request that it answers."""
    at_ms: int
    text: str
    """File, line, function and source line of each call, the innermost last; empty if the worker did not run the message."""


def encode_stack_requests(requests: Sequence[StackRequest]) -> str:
    """Return the text that Redis keeps."""
    return json.dumps(requests, separators=(",", ":"))


def decode_stack_requests(text: str | bytes) -> list[StackRequest]:
    """Return the requests in a text; none if another program wrote it."""
    try:
        rows = json.loads(text)
        return [StackRequest(_short(of, LONGEST_ID), _whole(asked)) for of, asked in rows[-MOST_STACKS:]]
    except OTHER_FORM:
        return []


def encode_stacks(stacks: Sequence[Stack]) -> str:
    """Return the text that Redis keeps."""
    return json.dumps(stacks, separators=(",", ":"))


def decode_stacks(text: bytes) -> list[Stack]:
    """Return the stacks in a text; none if another program wrote it."""
    try:
        return [
            Stack(_short(of, LONGEST_ID), _whole(asked), _whole(at), _short(stack, LONGEST_STACK))
            for of, asked, at, stack in json.loads(text)[-MOST_STACKS:]
        ]
    except OTHER_FORM:
        return []


def _whole(value: object) -> int:
    return round(_finite(value))


def _finite(value: object) -> float:
    if not isinstance(value, (int, float)) or not 0 <= value <= MOST_NUMBER:
        raise ValueError("not a number that a worker reports")
    return value


def _short(value: object, longest: int = LONGEST_REPORTED_TEXT) -> str:
    if not isinstance(value, str):
        raise TypeError("not a text")
    # A lone surrogate is no valid text in a page.
    return value[:longest].encode("utf-8", "replace").decode()
