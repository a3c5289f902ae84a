"""Orders that are closed, and their goods put back, unless they are paid in time."""
