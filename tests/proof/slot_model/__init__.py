"""The protocol of one slot, walked whole: begin with ``rules``."""
