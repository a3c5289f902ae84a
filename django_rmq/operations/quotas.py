"""How much somebody may send, and requests that are done once however often they come: both kept in Redis.

They hold over all web processes, and forget by themselves.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from uuid import uuid4

from django_rmq.core.calls import answers, limits
from django_rmq.core.calls.broker import Broker
from django_rmq.exceptions import InvalidRequest, OperationRefused, RmqError, TooManySends
from django_rmq.operations.actors import Actor

ATTEMPT_MS = 30_000
"""How long a repeated request waits for an attempt that is silent; then it is thought dead, and done again."""

KEPT_MS = 86_400_000
"""How long an answer is kept: a day."""


class Charge(NamedTuple):
    """What a send takes from one rate of its sender: ``size`` in ``seconds``, all at once or evenly."""

    what: str
    """What is counted. Each has a bucket of its own."""
    wanted: int
    size: int
    seconds: float

    def spend(self, broker: Broker, actor: Actor, wanted: int) -> int:
        """Spend so much, or nothing: return us until there is enough, 0 if it is spent. Below 0 it is given back."""
        return broker.run(
            limits.spend(_name(actor, self.what), self.seconds * 1e6 / self.size, self.size, wanted)
        )


def spend(broker: Broker, actor: Actor, charges: Sequence[Charge]) -> None:
    """Charge ``actor`` with all ``charges``, or with none of them.

    Raises ``TooManySends``, and ``InvalidRequest`` for more at once than can ever be had.
    """
    for one in charges:
        if one.wanted > one.size:
            raise InvalidRequest(
                f"{one.wanted} {one.what} at once are more than may be sent in {one.seconds:g} s, {one.size}"
            )
    for index, one in enumerate(charges):
        wait_us = one.spend(broker, actor, one.wanted)
        if wait_us:
            _give_back(broker, actor, charges[:index])
            raise TooManySends(
                f"more than {one.size} {one.what} in {one.seconds:g} s: "
                f"{one.wanted} more can be sent in {wait_us / 1e6:.1f} s",
                wait_us / 1e6,
            )


def _give_back(broker: Broker, actor: Actor, charges: Sequence[Charge]) -> None:
    for one in charges:
        one.spend(broker, actor, -one.wanted)


class RequestRunning(OperationRefused):
    """The same request is being done just now."""


class OtherContent(OperationRefused):
    """The key was used for a request with other content."""


@dataclass(slots=True)
class Once:
    """One attempt at a request that shall be done once."""

    answer: Any = None
    """What came of an earlier attempt; None: this is the first, and ``done`` is to be called."""
    kept: bytes = b""

    def done(self, answer: Any) -> None:
        """Say what came of it, as JSON takes it."""
        self.answer = answer
        self.kept = json.dumps(answer, separators=(",", ":")).encode()


@contextmanager
def once(
    broker: Broker, actor: Actor, key: str, content: Any, charges: Sequence[Charge] = ()
) -> Iterator[Once]:
    """Let a request of ``actor`` be done once, which it names by ``key``: a repeated one gets the same answer.

    What fails inside is forgotten, so that it can be tried again. An attempt whose process dies is thought dead after
    half a minute. ``charges`` bound the answers that are kept of one actor: only a first attempt spends them, so what
    was answered once is always answered alike. Raises ``OtherContent``, ``RequestRunning`` and what ``spend`` does.
    """
    name, token = _name(actor, key), uuid4().hex
    print_ = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    word, kept = broker.run(answers.begin_answer(name, print_, token, ATTEMPT_MS))
    if word == "other":
        raise OtherContent("the key of this request was used for another one")
    if word == "running":
        raise RequestRunning("this request is being done just now: ask again in a moment")
    if word == "done":
        yield Once(json.loads(kept))
        return
    attempt, charged = Once(), False
    try:
        spend(broker, actor, charges)
        charged = True
        yield attempt
    finally:
        try:
            broker.run(answers.keep_answer(name, token, attempt.kept, KEPT_MS))
            if charged and not attempt.kept:
                _give_back(broker, actor, charges)
        except RmqError:
            # What has been done is done: better an answer that is not kept than none.
            pass


def _name(actor: Actor, key: str = "") -> str:
    who = getattr(actor.user, "pk", None) or actor.name
    return hashlib.sha256(f"{actor.via}\n{who}\n{key}".encode()).hexdigest()[:32]


__all__ = ["Charge", "Once", "OtherContent", "RequestRunning", "once", "spend"]
