"""Other Python queues, and this one, doing the same nothing on the same Redis."""
