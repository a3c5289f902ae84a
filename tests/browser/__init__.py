"""A package, so that its fixtures end before other tests begin."""
