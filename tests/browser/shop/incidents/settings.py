"""The settings of the browser tests, with topics for what goes wrong."""

from __future__ import annotations

from tests.browser.shop.settings import *  # noqa: F403
from tests.browser.shop.settings import INSTALLED_APPS as SHOP_APPS
from tests.browser.shop.settings import RMQ as SHOP_RMQ

INSTALLED_APPS = [*SHOP_APPS, "tests.browser.shop.incidents"]

RMQ = {
    **SHOP_RMQ,
    "TOPICS": {
        **SHOP_RMQ["TOPICS"],  # type: ignore[dict-item]
        "hung": {"TYPE": "fixed_time", "SLOTS": 4},
        "behind": {"TYPE": "fixed_time", "SLOTS": 4},
        "slow": {"TYPE": "fixed_time", "SLOTS": 1, "TIMEOUT": 7_200, "LISTENER": False},
        "nightly": {"TYPE": "fixed_time", "SLOTS": 1, "IDENTITY": "key", "LISTENER": False},
    },
}
