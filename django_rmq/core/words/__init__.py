"""What the queue speaks of: topics, messages, answers, key names, bounds."""
