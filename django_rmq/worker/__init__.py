"""Listeners, and the worker process that calls them."""
