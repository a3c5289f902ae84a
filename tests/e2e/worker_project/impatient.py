"""The listeners of `listeners`, in a worker that is soon considered full."""

from __future__ import annotations

from django_rmq.worker import worker_process
from tests.e2e.worker_project.listeners import work

worker_process.FULL_SECONDS, worker_process.STUCK_SECONDS = 1.0, 2.0

__all__ = ["work"]
