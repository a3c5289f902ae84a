"""Tasks of ``django.tasks`` and of the package django-tasks: enqueued as messages, run by listeners, with results in Redis."""
