"""A small shop that uses django_rmq as a project would; `python -m example_project.demo` runs all of it."""
