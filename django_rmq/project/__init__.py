"""What Django adds to the queue; nothing else reads the settings."""
