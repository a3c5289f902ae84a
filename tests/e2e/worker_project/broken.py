"""A module of listeners that cannot be imported."""

from tests.e2e.worker_project import nothing_of_that_name  # type: ignore[attr-defined]  # noqa: F401
