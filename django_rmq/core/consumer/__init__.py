"""Consuming: a dispatcher, its executor threads and a heartbeat. It imports nothing from Django or ZooKeeper."""

from django_rmq.core.consumer.loop import Dispatcher
from django_rmq.core.consumer.terms import Ownership, Terms, Watching
from django_rmq.core.consumer.threads import Hooks

__all__ = ["Dispatcher", "Hooks", "Ownership", "Terms", "Watching"]
