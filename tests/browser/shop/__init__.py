"""The example shop with a few topics more, as the browser tests see it."""
