"""Questions to several servers at once, each in a thread, so that one that hangs delays none of the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from django.db import connections as databases

T = TypeVar("T")


class ParallelReads(threading.Thread, Generic[T]):
    """A question to a server. ``start`` asks it in a thread of its own, ``run`` in the calling one."""

    def __init__(self, name: str, ask: Callable[[], Iterable[T]]) -> None:
        super().__init__(name=name, daemon=True)
        self.answers: list[T] = []
        """The answers so far."""
        self._ask = ask
        self._error: BaseException | None = None
        self._end = float("inf")

    def run(self) -> None:
        try:
            for one in self._ask():
                self.answers.append(one)
        except BaseException as error:  # noqa: BLE001 - the thread that waits raises it
            self._error = error
        finally:
            if threading.current_thread() is self:
                databases.close_all()  # No other thread uses the connections of this one.

    def wait(self, end: float) -> bool:
        """Wait until the answer is complete, or until ``end`` (monotonic); return whether it is. Raises the error of ``ask``."""
        self._end = end
        # ``run`` was called in this thread, so there is no thread to wait for.
        if self.ident is not None:
            self.join(max(0.0, end - time.monotonic()))
        if self._error is not None:
            raise self._error
        return not self.is_alive()

    def wait_for_progress(self, seconds: float) -> bool:
        """Wait like ``wait``, but for as long as there is more of the answer within each ``seconds``."""
        count = -1
        while count < len(self.answers):
            count = len(self.answers)
            if self.wait(time.monotonic() + seconds):
                return True
        return False

    @property
    def hangs(self) -> bool:
        """Whether a caller has waited for the answer in vain, and it is still missing."""
        return self.is_alive() and time.monotonic() > self._end
