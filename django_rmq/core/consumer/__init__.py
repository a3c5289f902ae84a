"""Consuming: a dispatcher, its executor threads and a heartbeat. Knows no Django and no ZooKeeper."""

from django_rmq.core.consumer.dispatcher import Dispatcher
from django_rmq.core.consumer.executor import Hooks

__all__ = ["Dispatcher", "Hooks"]
