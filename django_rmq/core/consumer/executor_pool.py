"""The crew: a worker's threads by index, and the successors of those that died or hang."""

from __future__ import annotations

from collections.abc import Mapping
from queue import SimpleQueue
from typing import Any

from django_rmq.core.consumer.async_executor import AsyncExecutor
from django_rmq.core.consumer.batch import Batch
from django_rmq.core.consumer.progress import SPARE, SharedProgress, ThreadProgress
from django_rmq.core.consumer.thread_executor import ExecutorThread, Hooks

Member = ExecutorThread | AsyncExecutor


class ExecutorPool:
    """``count`` executor threads, and behind them the event loop if any topic has a ``concurrency``.

    Each records the progress of its messages in its own part of ``notes``.
    """

    def __init__(
        self,
        count: int,
        inbox: SimpleQueue[Any],
        hooks: Hooks,
        notes: SharedProgress | None,
        concurrency: Mapping[str, int] | None = None,
    ) -> None:
        self._count = count
        self._inbox = inbox
        self._hooks = hooks
        self._notes = notes
        self._concurrency = concurrency or {}
        members = range(count + bool(concurrency))
        self.threads = [self._new(i, None if notes is None else notes.thread(i)) for i in members]
        self._unused = iter(range(len(members), count + SPARE))
        self._free: list[ThreadProgress] = []
        """The marks of threads that hung and have ended."""
        self._hanging: list[tuple[Member, list[Batch]]] = []

    def _new(self, index: int, marks: ThreadProgress | None) -> Member:
        if index < self._count:
            return ExecutorThread(index, self._inbox, self._hooks, marks)
        return AsyncExecutor(index, self._inbox, self._hooks, marks, self._concurrency)

    def start(self) -> None:
        """Start all threads."""
        for thread in self.threads:
            thread.start()

    def stop(self) -> list[Member]:
        """Make all threads end when nothing is left for them; return those that run nothing."""
        for thread in self.threads:
            thread.stop()
        return [thread for thread in self.threads if not thread.batches()]

    def running(self) -> list[Batch]:
        """Return the batch that each executor thread runs."""
        members = (thread for thread in self.threads if isinstance(thread, ExecutorThread))
        return [batch for thread in members if (batch := thread.current) is not None]

    def blocked_seconds(self) -> float:
        """Return for how long something has blocked the event loop. 0: nothing does, or there is none."""
        last = self.threads[-1]
        return last.blocked_seconds() if isinstance(last, AsyncExecutor) else 0.0

    def is_manned(self, index: int) -> bool:
        """Return whether a live thread has this index."""
        thread = self.threads[index]
        thread.look()
        return not (thread.hangs or thread.is_dead)

    def succeed(self, index: int) -> None:
        """Start another thread in place of one that is dead or hangs.

        Raises ``RuntimeError`` or ``MemoryError`` if no thread can be started, or too many hang already.
        """
        before = self.threads[index]
        # What the hung thread runs. It is read before the thread's state, because the thread may end meanwhile.
        batches, lives = before.batches(), not before.is_dead
        # A thread that hangs may still write into its own marks, so its successor needs others.
        marks = self._spare_marks() if lives else before.marks  # rule: successors_share_marks
        fresh = self._new(index, marks)
        try:
            fresh.start()
        except BaseException:
            if lives and marks is not None:
                self._free.append(marks)
            raise
        self.threads[index] = fresh
        before.stop()
        if lives:
            self._hanging.append((before, batches))

    def _spare_marks(self) -> ThreadProgress | None:
        if self._notes is None:
            return None
        if self._free:
            return self._free.pop()
        index = next(self._unused, None)
        if index is None:
            raise RuntimeError(f"{SPARE} listeners that exceeded MAX_RUNTIME are still running")
        return self._notes.thread(index)

    def returned(self) -> list[Batch]:
        """Return the batches of the threads that hung and have since ended."""
        ended = [hung for hung in self._hanging if hung[0].is_dead]
        for hung in ended:
            self._hanging.remove(hung)
            if hung[0].marks is not None:
                self._free.append(hung[0].marks)
        return [batch for _, batches in ended for batch in batches]


__all__ = ["ExecutorPool"]
