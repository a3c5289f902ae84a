"""Listeners, and the worker process that calls them: Django's side of ``core.consumer``, which fetches and settles messages."""
