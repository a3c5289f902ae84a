"""Commands of manage.py: they parse arguments, call operations and print results."""
