"""Reports about the past and the present: events and history."""
