"""Coroutine functions made of the public functions: the same calls, in the thread that has the database connections.

A transaction belongs to a thread, so a send from a coroutine has to run in the thread of Django's ORM. A send that neither a
transaction nor a receiver of signals concerns needs no thread: it may go over the connection that its event loop shares
(``api``).
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from functools import wraps
from typing import ParamSpec, TypeVar

from asgiref.sync import sync_to_async

P = ParamSpec("P")
R = TypeVar("R")


Shortcut = Callable[[tuple[object, ...], Mapping[str, object]], Coroutine[object, object, R | None]]
"""A function that does a call without a thread, or returns None if it cannot; it takes the arguments of the call."""


def coroutine_of(
    function: Callable[P, R], shortcut: Shortcut[R] | None = None
) -> Callable[P, Coroutine[object, object, R]]:
    """Return a coroutine function that does the same as ``function``, by ``shortcut`` where that is possible.

    It has the signature of ``function``. So each parameter is declared once, and type checkers and editors know them all.
    """
    called = sync_to_async(function)

    @wraps(function)
    async def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if shortcut is not None:
            result = await shortcut(args, kwargs)
            if result is not None:
                return result
        return await called(*args, **kwargs)

    call.__name__ = call.__qualname__ = f"a{function.__name__}"
    call.__doc__ = (
        f"Do the same as ``{function.__name__}`` from a coroutine, in the thread of its database connections."
    )
    return call
