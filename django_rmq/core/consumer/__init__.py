"""Consuming: a dispatcher, its executor threads and a heartbeat. Knows no Django and no ZooKeeper."""

from django_rmq.core.consumer.loop import Dispatcher
from django_rmq.core.consumer.terms import Ownership, Terms, Watching
from django_rmq.core.consumer.threads import Hooks

__all__ = ["Dispatcher", "Hooks", "Ownership", "Terms", "Watching"]
