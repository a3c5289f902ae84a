"""A project with one no-op listener, for real worker processes. Settings come from the environment."""
