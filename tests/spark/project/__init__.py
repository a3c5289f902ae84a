"""An app with a pipeline of its own."""
