"""The Django layer of the queue. Only this package reads the settings."""
