"""Logging that never ends the thread that writes a line, and that writes repeated errors less often."""
