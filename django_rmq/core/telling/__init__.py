"""What happened, for those who watch: events and history."""
