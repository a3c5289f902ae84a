"""Runs calls of several threads in one round trip, because most of what a small call costs is its round trip."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from django_rmq.core.commands.broker_interface import Broker, run_all
from django_rmq.core.commands.script_call import Call
from django_rmq.exceptions import ServerUnavailable


class _Waiting:
    """A call whose thread sleeps until it has its answer, or until it is its turn to run the next round trip."""

    def __init__(self, call: Call[Any]) -> None:
        self.call = call
        self.answer: Any = None
        self.leads = False
        self.woken = threading.Lock()
        self.woken.acquire()


class WriteBatching:
    """Calls that come while a round trip is under way are run together in the next one. Safe to share between threads."""

    def __init__(self, broker: Callable[[], Broker]) -> None:
        self._broker = broker
        self._lock = threading.Lock()
        self._waiting: list[_Waiting] = []
        self._is_busy = False

    def run(self, call: Call[Any]) -> Any:
        """Return the answer of ``call``, or raise its error."""
        own = _Waiting(call)
        with self._lock:
            own.leads = not self._is_busy
            self._is_busy = True
            self._waiting.append(own)
        if not own.leads:
            own.woken.acquire()
        if own.leads:
            self._lead()
        if isinstance(own.answer, BaseException):
            raise own.answer
        return own.answer

    def _lead(self) -> None:
        """Run what waits in one round trip; then wake those who waited, and the one who leads the next."""
        with self._lock:
            together, self._waiting = self._waiting, []
        answers: list[Any] = [ServerUnavailable("the thread that asked Redis was interrupted")] * len(
            together
        )
        try:
            answers = run_all(self._broker(), [each.call for each in together])
        except Exception as error:  # noqa: BLE001 - each of them raises it
            answers = [error] * len(together)
        finally:
            with self._lock:
                self._is_busy = bool(self._waiting)
                following = self._waiting[0] if self._waiting else None
            if following is not None:
                following.leads = True
                following.woken.release()
            for each, answer in zip(together, answers, strict=True):
                each.answer = answer
                if not each.leads:
                    each.woken.release()


__all__ = ["WriteBatching"]
