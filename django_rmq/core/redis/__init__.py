"""One Redis server: the broker and its connections."""
