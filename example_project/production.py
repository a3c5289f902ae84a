"""Settings of the example shop on a server: what differs from development comes from the environment.

Required: DJANGO_SECRET_KEY, DATABASE_PASSWORD, REDIS_URL. Optional: DJANGO_ALLOWED_HOSTS (separated by commas),
DATABASE_HOST, DATABASE_NAME, DATABASE_USER, EMAIL_HOST, RMQ_METRICS_TOKEN, and what ``settings`` reads.
"""

from __future__ import annotations

import os

import django

from example_project.settings import *  # noqa: F403 - a settings module extends another one this way
from example_project.settings import ALLOWED_HOSTS, BASE_DIR, MIDDLEWARE, RMQ

DEBUG = False
SECRET_KEY = os.environ["DJANGO_SECRET_KEY"]
# The health check of the container asks 127.0.0.1.
ALLOWED_HOSTS = [*ALLOWED_HOSTS, *filter(None, os.environ.get("DJANGO_ALLOWED_HOSTS", "").split(","))]

DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "HOST": os.environ.get("DATABASE_HOST", "127.0.0.1"),
        "NAME": os.environ.get("DATABASE_NAME", "shop"),
        "USER": os.environ.get("DATABASE_USER", "shop"),
        "PASSWORD": os.environ["DATABASE_PASSWORD"],
        "CONN_MAX_AGE": 60,
        "CONN_HEALTH_CHECKS": True,
    }
}

SMTP = "django.core.mail.backends.smtp.EmailBackend"
MAILERS = {"default": {"BACKEND": SMTP, "OPTIONS": {"host": os.environ.get("EMAIL_HOST", "localhost")}}}
if django.VERSION < (6, 1):
    EMAIL_BACKEND, EMAIL_HOST = SMTP, os.environ.get("EMAIL_HOST", "localhost")

RMQ = {
    **RMQ,
    "REDIS": os.environ["REDIS_URL"],
    # Workers refuse to start on a Redis that may lose messages.
    "DURABILITY": "strict",
    "METRICS": {"TOKEN": os.environ.get("RMQ_METRICS_TOKEN") or None},
}

# The web process serves the static files that `collectstatic` puts here.
STATIC_ROOT = BASE_DIR.parent / "static"
MIDDLEWARE = [MIDDLEWARE[0], "whitenoise.middleware.WhiteNoiseMiddleware", *MIDDLEWARE[1:]]
