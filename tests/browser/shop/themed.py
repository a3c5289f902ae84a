"""The settings of the browser tests with another theme of the admin: SHOP_THEME names it."""

from __future__ import annotations

import os

from tests.browser.shop import THEMES
from tests.browser.shop.settings import *  # noqa: F403
from tests.browser.shop.settings import INSTALLED_APPS as SHOP_APPS
from tests.browser.shop.settings import MIDDLEWARE as SHOP_MIDDLEWARE

INSTALLED_APPS = [*THEMES[os.environ["SHOP_THEME"]], *SHOP_APPS]

# The pages of these themes have scripts and styles in their text, which the shop's policy would refuse.
MIDDLEWARE = [name for name in SHOP_MIDDLEWARE if not name.endswith(".content_security_policy")]
