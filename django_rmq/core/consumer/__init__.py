"""Consuming: a dispatcher, its executor threads and a heartbeat. It imports nothing from Django or ZooKeeper."""

from django_rmq.core.consumer.dispatcher import Dispatcher
from django_rmq.core.consumer.options import AssignmentCallbacks, WorkerCallbacks, WorkerOptions
from django_rmq.core.consumer.thread_executor import Hooks

__all__ = ["AssignmentCallbacks", "Dispatcher", "Hooks", "WorkerCallbacks", "WorkerOptions"]
