"""The processes of a worker command: a parent forks them, watches them, replaces those that die, and settles their messages."""
