"""Reports of the core about messages: events, which are published as they happen, and the history, which is stored."""
