"""The worker without Django: a dispatcher fetches messages, executors call listeners, and a heartbeat extends deliveries.

This package imports nothing from Django or ZooKeeper. Its users pass in topics, listeners, hooks and callbacks.
"""

from django_rmq.core.consumer.batch_run import Hooks
from django_rmq.core.consumer.dispatcher import (
    AssignmentCallbacks,
    Dispatcher,
    WorkerCallbacks,
    WorkerOptions,
)

__all__ = ["AssignmentCallbacks", "Dispatcher", "Hooks", "WorkerCallbacks", "WorkerOptions"]
