"""Reads and checks `RMQ` in Django's settings."""

from django_rmq.conf.config import Config
from django_rmq.conf.problems import SettingsProblem
from django_rmq.conf.redis_settings import RedisServer
from django_rmq.conf.settings_reader import (
    get_config,
    is_debug,
    read_settings,
    set_schedule_topics,
    with_unwritten_identity,
)
from django_rmq.conf.value_text import did_you_mean

__all__ = [
    "Config",
    "RedisServer",
    "SettingsProblem",
    "did_you_mean",
    "get_config",
    "is_debug",
    "read_settings",
    "set_schedule_topics",
    "with_unwritten_identity",
]
