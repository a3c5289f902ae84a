"""Run by `make wheel` inside an environment that has the built wheel and no extras: is everything in it, does it load?

Takes the checkout as its argument, to compare with; imports nothing from there.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import sys
from importlib.resources import files
from pathlib import Path

import django
from django.conf import settings
from django.core.management import call_command

import django_rmq
from django_rmq.core import lua

# They may need an extra, which this environment does not have.
NEEDS_AN_EXTRA = (
    "django_rmq.api.metrics_view",
    "django_rmq.health_check",
    "django_rmq.metrics",
    "django_rmq.pytest_plugin",
    "django_rmq.spark",
)
EXTRAS = {"django_tasks", "health_check", "prometheus_client", "pyarrow", "pyspark", "pytest"}

checkout = Path(sys.argv[1]).resolve()
installed = Path(str(files(django_rmq)))
assert checkout / "build" in installed.parents, f"{installed} is not the wheel's package"
assert installed != checkout / "django_rmq", f"{installed} is the source tree"

for package in ("django_rmq", "pyspark_rmq"):
    sources = sorted((checkout / package).rglob("*"))
    assert checkout / package / "py.typed" in sources, f"{package} does not say that it has types"
    for source in sources:
        if source.is_file() and "__pycache__" not in source.parts:
            copy = installed.parent / source.relative_to(checkout)
            assert copy.is_file(), f"the wheel lacks {copy.relative_to(installed.parent)}"
            assert copy.read_bytes() == source.read_bytes(), f"{copy} is not what the source tree has"

slot_files = (checkout / "django_rmq/core/lua/slot").glob("*.lua")
expected = {
    name for file in slot_files for name in re.findall(r"^-- script: (\w+)$", file.read_text(), re.MULTILINE)
}
assert set(lua.names()) == expected, set(lua.names()) ^ expected
for name in lua.names():
    assert b"-- include:" not in lua.load(name).text, f"{name}: an include was not replaced"

settings.configure(
    INSTALLED_APPS=[
        "django.contrib.admin",
        "django.contrib.auth",
        "django.contrib.contenttypes",
        "django.contrib.messages",
        "django.contrib.sessions",
        "rest_framework",
        "django_rmq",
    ],
    MIDDLEWARE=[
        "django.contrib.sessions.middleware.SessionMiddleware",
        "django.contrib.auth.middleware.AuthenticationMiddleware",
        "django.contrib.messages.middleware.MessageMiddleware",
    ],
    TEMPLATES=[
        {
            "BACKEND": "django.template.backends.django.DjangoTemplates",
            "APP_DIRS": True,
            "OPTIONS": {
                "context_processors": [
                    "django.template.context_processors.request",
                    "django.contrib.auth.context_processors.auth",
                    "django.contrib.messages.context_processors.messages",
                ]
            },
        }
    ],
    RMQ={"BROKER": "memory", "TOPICS": {"smoke": {"TYPE": "priority", "SLOTS": 4, "LISTENER": False}}},
    SECRET_KEY="of no use to anybody",
    USE_TZ=True,
)
django.setup()
call_command("check", fail_level="ERROR")

modules = []
for module in pkgutil.walk_packages(django_rmq.__path__, "django_rmq."):
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in EXTRAS or not module.name.startswith(NEEDS_AN_EXTRA):
            raise
    else:
        modules.append(module.name)
for name in django_rmq.__all__:
    assert getattr(django_rmq, name) is not None

print(f"wheel: {len(modules)} modules and {len(expected)} scripts load without extras")
