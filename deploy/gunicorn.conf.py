"""gunicorn for a Django project that sends messages and serves the admin, REST and metrics of RMQ."""

import os

bind = "0.0.0.0:8000"

# REST consumers that wait hold a thread each, so one process has several.
worker_class = "gthread"
workers = int(os.environ.get("WEB_CONCURRENCY", "2"))
threads = int(os.environ.get("WEB_THREADS", "8"))

# A long poll takes up to 20 s: both limits leave it time to end.
timeout = 60
graceful_timeout = 30

# On disk the files that show gunicorn its processes live can block; in memory they do not.
worker_tmp_dir = "/dev/shm"  # noqa: S108 - gunicorn creates files of its own there

accesslog = "-"
