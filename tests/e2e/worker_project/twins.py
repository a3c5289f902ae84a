"""Listeners of workers that all draw the same id, as a broken source of chance would have it."""

from __future__ import annotations

from uuid import UUID

from django_rmq.core.consumer import dispatcher
from tests.e2e.worker_project import listeners

vars(dispatcher)["uuid4"] = lambda: UUID(int=7)

__all__ = ["listeners"]
