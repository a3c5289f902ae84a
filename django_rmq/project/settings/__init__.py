"""Reads and checks `RMQ` in Django's settings."""

from django_rmq.project.settings.config import Config
from django_rmq.project.settings.problems import Problem
from django_rmq.project.settings.reader import (
    get_config,
    is_debug,
    read_settings,
    set_schedule_topics,
    with_unwritten_identity,
)
from django_rmq.project.settings.redis import RedisServer
from django_rmq.project.settings.wording import did_you_mean

__all__ = [
    "Config",
    "Problem",
    "RedisServer",
    "did_you_mean",
    "get_config",
    "is_debug",
    "read_settings",
    "set_schedule_topics",
    "with_unwritten_identity",
]
