"""`RMQ` in Django's settings, read and checked."""
