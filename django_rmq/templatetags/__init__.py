"""Filters and tags of the admin's templates."""
