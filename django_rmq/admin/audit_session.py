"""Actions that take several requests: their LogEntry is kept in the user's session until they end."""

from __future__ import annotations

from uuid import uuid4

from django.http import HttpRequest

from django_rmq.operations import Trace

_KEY = "rmq_traces"
_KEPT = 20
"""The number of actions in progress in one session; the rest of an older one gets a LogEntry of its own."""


def begun(request: HttpRequest, run: str) -> Trace:
    """Return the trace of the action that ``run`` names, or a new one."""
    entry, outcomes = request.session.get(_KEY, {}).get(run, (None, {}))
    return Trace(entry, dict(outcomes))


def keep(request: HttpRequest, run: str, trace: Trace) -> str:
    """Store the trace of an action that goes on; return the name under which the next request finds it."""
    run = run or uuid4().hex
    kept = {name: value for name, value in request.session.get(_KEY, {}).items() if name != run}
    request.session[_KEY] = {
        **dict(list(kept.items())[1 - _KEPT :]),
        run: [trace.entry, trace.outcomes],
    }
    return run


def end(request: HttpRequest, run: str) -> None:
    """Forget an action that has ended."""
    kept = request.session.get(_KEY, {})
    if run in kept:
        request.session[_KEY] = {name: value for name, value in kept.items() if name != run}
