"""Log lines that never harm the thread that writes them, and are written less often when they repeat."""
