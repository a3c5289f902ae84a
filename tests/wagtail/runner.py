"""Django's test runner, which also writes what failed into a file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from django.test.runner import DiscoverRunner

from tests.wagtail.apps import ran


class Runner(DiscoverRunner):
    """Writes the outcome into the file that the environment variable OUTCOME names."""

    def run_suite(self, suite: Any, **kwargs: Any) -> Any:
        """Run the tests, and write which failed and how many tasks have ended."""
        result = super().run_suite(suite, **kwargs)
        outcome = {
            "tests": result.testsRun,
            "failed": sorted(test.id() for test, _ in [*result.failures, *result.errors]),
            "tasks": dict(sorted(ran.items())),
        }
        Path(os.environ["OUTCOME"]).write_text(json.dumps(outcome))
        return result
