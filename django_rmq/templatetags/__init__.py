"""Words of the admin's templates."""
