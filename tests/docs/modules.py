"""Modules that the documents show, for tests that run them as they stand there."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def shown(page: str, name: str) -> ModuleType:
    """Return the blocks of a page that begin with ``# name`` as one module."""
    module = ModuleType(Path(name).stem)
    start = re.escape(f"```python\n# {name}\n")
    blocks = re.findall(rf"^{start}(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    assert blocks, f"{page} shows no {name}"
    for block in blocks:
        exec(block, module.__dict__)
    return module
