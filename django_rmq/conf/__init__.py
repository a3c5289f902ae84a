"""The settings: `RMQ` and `TASKS` of Django, read once, checked, and given to everything else as a frozen ``Config``."""

from django_rmq.conf.known_keys import SettingsProblem, did_you_mean
from django_rmq.conf.server_settings import RedisServer
from django_rmq.conf.settings_reader import (
    Config,
    get_config,
    is_debug,
    read_settings,
    set_schedule_topics,
    with_unwritten_identity,
)

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
