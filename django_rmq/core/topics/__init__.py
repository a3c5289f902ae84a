"""What concerns a topic as a whole: its definition, its slot count, what Redis must keep of it."""
