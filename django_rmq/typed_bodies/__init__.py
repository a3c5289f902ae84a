"""Typed bodies: the types that BODY names, by pydantic; and what their topics need."""
