"""What runs the shop of `example_project` as a demo: servers of its own, traffic, and accounts of every message."""
