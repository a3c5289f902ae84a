"""Settings of the example shop, for development and for the project's tests.

Read from the environment: REDIS_URL, RMQ_KEY_PREFIX, SHOP_DATA (a folder for the database and the
images), SHOP_ORDER_SECONDS (how long an order may stay unpaid), SHOP_ZOOKEEPER (1: workers come together in
ZooKeeper, at ZOOKEEPER_HOSTS), DJANGO_DEBUG (1 or 0).
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import django

BASE_DIR = Path(__file__).resolve().parent
SHOP_DATA = Path(os.environ.get("SHOP_DATA") or BASE_DIR.parent / "var").absolute()
SHOP_DATA.mkdir(parents=True, exist_ok=True)

# For development only: anyone who knows the key can forge sessions.
SECRET_KEY = "an-example-is-no-secret-and-must-not-be-used-on-a-real-site"
DEBUG = os.environ.get("DJANGO_DEBUG", "1") == "1"
ALLOWED_HOSTS = ["127.0.0.1", "localhost", "[::1]"]

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "rest_framework",
    "rest_framework.authtoken",
    "drf_spectacular",
    "django_rmq",
    "example_project.prices",
    "example_project.orders",
    "example_project.product_sets",
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "example_project.csp.content_security_policy",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.locale.LocaleMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]

ROOT_URLCONF = "example_project.urls"
WSGI_APPLICATION = "example_project.wsgi.application"

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]

DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": SHOP_DATA / "shop.sqlite3",
        "OPTIONS": {
            # Web server and consumers write at the same time: readers must not block writers, and a
            # transaction has to queue for the write lock when it begins, not fail when it first writes.
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
            "transaction_mode": "IMMEDIATE",
            "timeout": 20,
        },
    },
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

RMQ = {
    # A database of its own: cache.clear() of a cache on the same one would empty the queues.
    "REDIS": os.environ.get("REDIS_URL") or "redis://127.0.0.1:6379/0",
    "KEY_PREFIX": os.environ.get("RMQ_KEY_PREFIX", ""),
    # Equal bodies are one message, unless a topic says otherwise.
    "TOPIC_DEFAULTS": {"IDENTITY": "body"},
    "TOPICS": {
        # Changes of one product within five seconds are one message.
        "price-changes": {"TYPE": "range_merge", "SLOTS": 64, "TIME_RANGE": 5},
        # Key accounts first, and the images of one shop one after the other.
        "image-renders": {"TYPE": "priority", "SLOTS": 16, "SLOT_BASIS": "shop"},
        # One message for each unpaid order, due when its time is up.
        "order-timeouts": {"TYPE": "fixed_time", "SLOTS": 16},
        # A message for each run of the schedule in orders/listeners.py.
        "reports": {"TYPE": "fixed_time", "SLOTS": 1, "IDENTITY": "key"},
        # All reports about one item within two seconds are one message. A Spark stream consumes them.
        "item-changes": {
            "TYPE": "range_merge",
            "SLOTS": 16,
            "TIME_RANGE": 2,
            "SLOT_BASIS": "item",
            "LISTENER": False,
        },
        # An item joined or left a product set: key accounts first, and one after the other for each item.
        "memberships": {"TYPE": "priority", "SLOTS": 16, "SLOT_BASIS": "item"},
    },
    # What a transaction sends is a row of its database until Redis has it, so nothing committed is lost.
    "OUTBOX": True,
    "ADMIN": {"PAGE_SIZE": 25},
}

# The shop's mails are tasks, which need no topic of their own here.
TASKS = {
    "default": {
        "BACKEND": "django_rmq.tasks.RMQBackend",
        "OPTIONS": {"TOPIC": {"SLOTS": 4, "MAX_RETRIES": 8}},
    },
}
MAILS = SHOP_DATA / "mails"
MAILERS = {
    "default": {
        "BACKEND": "django.core.mail.backends.filebased.EmailBackend",
        "OPTIONS": {"file_path": MAILS},
    },
}
if django.VERSION < (6, 1):
    EMAIL_BACKEND, EMAIL_FILE_PATH = MAILERS["default"]["BACKEND"], MAILS

# Who owns which slots is settled through Redis, or with this switch in ZooKeeper.
if os.environ.get("SHOP_ZOOKEEPER") == "1":
    RMQ["ZOOKEEPER"] = {
        "HOSTS": os.environ.get("ZOOKEEPER_HOSTS") or "127.0.0.1:2181",
        "ROOT": "/shop/rmq",
        "SESSION_TIMEOUT": 4,
    }

# Where the sources of the product sets put their files, and where Spark keeps its progress.
PRODUCT_SETS_FEEDS = SHOP_DATA / "feeds"
PRODUCT_SETS_CHECKPOINTS = SHOP_DATA / "checkpoints"

# Programs come with a token (`manage.py drf_create_token USER`), people with the session of the admin.
REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": [
        "rest_framework.authentication.TokenAuthentication",
        "rest_framework.authentication.SessionAuthentication",
    ],
    "DEFAULT_PERMISSION_CLASSES": ["rest_framework.permissions.IsAuthenticated"],
    "DEFAULT_SCHEMA_CLASS": "drf_spectacular.openapi.AutoSchema",
}
SPECTACULAR_SETTINGS = {"TITLE": "The shop's queues", "VERSION": "1", "SERVE_INCLUDE_SCHEMA": False}

SHOP_ORDER_TIMEOUT = timedelta(seconds=float(os.environ.get("SHOP_ORDER_SECONDS") or 15 * 60))

LANGUAGE_CODE = "en"
LANGUAGES = [("en", "English"), ("zh-hans", "简体中文")]
TIME_ZONE = "UTC"
USE_TZ = True

STATIC_URL = "static/"
STATICFILES_DIRS = [BASE_DIR / "static"]
MEDIA_URL = "media/"
MEDIA_ROOT = SHOP_DATA / "media"
