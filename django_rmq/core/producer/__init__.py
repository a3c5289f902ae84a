"""From a body to its slot, and there in as few round trips as possible."""
