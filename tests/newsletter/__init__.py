"""An app as others publish it for reuse: it knows tasks, and nothing of the backend that runs them.

Nothing in here imports RMQ. What its project needs is the app in INSTALLED_APPS and a setting TASKS.
"""
