"""The transitions as methods, for callers without calls as yet."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from django_rmq.core.calls import (
    answers,
    claims,
    ending,
    history,
    limits,
    looking,
    moving,
    people,
    sending,
    taking,
    workers,
)
from django_rmq.core.calls.call import Call

P = ParamSpec("P")
T = TypeVar("T")

FUNCTIONS: dict[str, Callable[..., Call[Any]]] = {
    name: function
    for module in (
        answers,
        claims,
        ending,
        history,
        limits,
        looking,
        moving,
        people,
        sending,
        taking,
        workers,
    )
    for name, function in vars(module).items()
    if getattr(function, "__module__", "") == module.__name__ and not name.startswith("_")
}
"""Every function that makes a call, by its name."""


def at_once(function: Callable[P, Call[T]]) -> Callable[Concatenate[Any, P], T]:
    """Return a method that runs the call which ``function`` makes."""

    @wraps(function)
    def method(broker: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        found: T = broker.run(function(*args, **kwargs))
        return found

    return method


class Methods:
    """A method for each transition: it runs the call at once."""

    send_merge = at_once(sending.send_merge)
    send_replace = at_once(sending.send_replace)
    ensure = at_once(sending.ensure)

    acquire = at_once(taking.acquire)
    acquire_all = at_once(taking.acquire_all)
    held = at_once(taking.held)
    prepare = at_once(taking.prepare)

    commit = at_once(ending.commit)
    rollback = at_once(ending.rollback)
    release = at_once(ending.release)
    extend = at_once(ending.extend)
    expire = at_once(ending.expire)
    promote = at_once(ending.promote)

    claim = at_once(claims.claim)
    renew = at_once(claims.renew)
    ack = at_once(claims.ack)
    return_claim = at_once(claims.return_claim)
    read_claim = at_once(claims.read_claim)

    replay = at_once(people.replay)
    bury = at_once(people.bury)
    remove = at_once(people.remove)
    discard = at_once(people.discard)
    reschedule = at_once(people.reschedule)
    purge = at_once(people.purge)
    pause = at_once(people.pause)
    configure = at_once(people.configure)
    adopt = at_once(people.adopt)
    retire = at_once(people.retire)
    loose = at_once(people.loose)

    shut = at_once(moving.shut)
    reopen = at_once(moving.reopen)
    survey = at_once(moving.survey)
    move_out = at_once(moving.move_out)
    move_in = at_once(moving.move_in)

    peek = at_once(looking.peek)
    find = at_once(looking.find)
    count = at_once(looking.count)
    between = at_once(looking.between)
    look = at_once(looking.look)
    ranks = at_once(looking.ranks)
    seek = at_once(looking.seek)
    heads = at_once(looking.heads)
    audit = at_once(looking.audit)

    sample = at_once(history.sample)
    times = at_once(history.times)
    claim_minute = at_once(history.claim_minute)
    note_late = at_once(history.note_late)
    note_times = at_once(history.note_times)
    keep_minute = at_once(history.keep_minute)

    beat = at_once(workers.beat)
    leave = at_once(workers.leave)
    assign = at_once(workers.assign)
    roster = at_once(workers.roster)

    allow = at_once(limits.allow)
    end_permits = at_once(limits.end_permits)
    spend = at_once(limits.spend)

    begin_answer = at_once(answers.begin_answer)
    keep_answer = at_once(answers.keep_answer)
