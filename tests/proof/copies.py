"""Runs pytest in copies of the package: for each line of arguments on the input a line [exit code, output], in JSON.

    python -m tests.proof.copies

runs where it is started, with the `tests` and the package of that folder. Each run is a child of this process, which
has imported what takes long and nothing of ours: so it meets the files as they are by then.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import tempfile

import pytest

TAKES_LONG = (
    "django.test",
    "hypothesis.stateful",
    "kazoo.client",
    "redis.asyncio",
    "django.contrib.admin",
    "rest_framework",
    "sqlite3",
    # Plugins of pytest, which loads them for each run.
    "anyio.pytest_plugin",
    "pytest_django.plugin",
)
QUIET = [
    "-q",
    "-p",
    "no:cacheprovider",
    "-W",
    "ignore::pytest.PytestAssertRewriteWarning",
]


def main() -> None:
    for module in TAKES_LONG:
        importlib.import_module(module)
    gc.freeze()
    for line in sys.stdin:
        with tempfile.TemporaryFile() as output:
            child = os.fork()
            if child == 0:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                code = 70
                try:
                    code = int(pytest.main([*QUIET, *json.loads(line)]))
                finally:
                    sys.stdout.flush()
                    os._exit(code)
            _, status = os.waitpid(child, 0)
            output.seek(0)
            text = output.read().decode(errors="replace")
        print(json.dumps([os.waitstatus_to_exitcode(status), text]), flush=True)


if __name__ == "__main__":
    main()
