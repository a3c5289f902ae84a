"""A project with tasks, and nothing else that RMQ would have to be told of."""
