"""The running test case, by which a broker in memory is cleared between tests.

With pytest, this package's plugin calls ``connections.begin_test``. The runners of unittest and Django have no such hook,
but while a test case runs, its method ``run`` is on the stack.
"""

from __future__ import annotations

import inspect
import sys
import threading


def running_test() -> object | None:
    """Return the ``unittest.TestCase`` that runs in this thread, or else the one in the main thread, or None."""
    if "unittest" not in sys.modules:
        return None
    from unittest import TestCase

    stacks = [inspect.currentframe()]
    # A thread that a test has started, such as that of a live server, belongs to the test of the main thread.
    if threading.current_thread() is not threading.main_thread():
        stacks.append(sys._current_frames().get(threading.main_thread().ident or 0))
    for frame in stacks:
        while frame is not None:
            if frame.f_code.co_name == "run" and isinstance(case := frame.f_locals.get("self"), TestCase):
                return case
            frame = frame.f_back
    return None


__all__ = ["running_test"]
