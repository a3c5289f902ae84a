"""Log lines that never harm the thread that writes them, and never repeat themselves."""
