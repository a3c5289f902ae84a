"""Wagtail's own tests of the modules that use tasks, with this package as the backend of tasks: `make wagtail`."""
