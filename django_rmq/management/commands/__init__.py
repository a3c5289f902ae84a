"""Commands of manage.py: they parse, call and print; what they do is done elsewhere."""
