"""A project with a few listeners for tests of real worker processes."""
