"""What is tracked here works on any machine: no registry host, no path of one machine, nothing unpinned."""

from __future__ import annotations

import ast
import os
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.support.commands import ROOT, output_of

# Written in pieces, so that this file does not find itself.
HOSTS = ["files.python" + "hosted", "pypi." + "org", "registry.npm" + "js", "deb.debian." + "org"]
MACHINE_PATHS = r"(?<![\w.~/-])/(?:root|home|Users|work|farm)/\w"
FORBIDDEN = re.compile("|".join([re.escape(host) for host in HOSTS] + [MACHINE_PATHS]))

LOCK_FILES = {"uv.lock", "poetry.lock", "Pipfile.lock", "package-lock.json", "yarn.lock", "pnpm-lock.yaml"}
NAMES_THAT_SAY_NOTHING = {"utils", "util", "helpers", "helper", "common", "base", "manager", "core", "misc"}


MADE = {"__pycache__", "build", "dist", "var"}
"""Folders of what is made in an unpacked source distribution, beside the hidden ones of tools."""


def tracked_files() -> list[Path]:
    if not (ROOT / ".git").exists():  # a source distribution, which holds what was tracked
        files = [path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file()]
        hidden = {part for path in files for part in path.parts if part.startswith(".")} - {".ci", ".github"}
        return [ROOT / path for path in files if not (MADE | hidden) & set(path.parts)]
    answer = output_of(["git", "ls-files", "-z"])
    return [ROOT / name for name in answer.split("\0") if name and (ROOT / name).is_file()]


def pins(path: Path) -> dict[str, list[str]]:
    """Requirement line → its hashes."""
    found: dict[str, list[str]] = {}
    for line in path.read_text().replace("\\\n", " ").splitlines():
        if line.strip() and not line.startswith("#"):
            requirement, *hashes = line.split(" --hash=")
            found[requirement.strip()] = [value.strip() for value in hashes]
    return found


@pytest.mark.parametrize(
    "text",
    ["see https://" + HOSTS[0] + ".org/x", "cd /ro" + "ot/x", 'open("/ho' + 'me/me/x")', "=/wo" + "rk/main"],
)
def test_the_search_finds_what_it_looks_for(text: str) -> None:
    assert FORBIDDEN.search(text)


@pytest.mark.parametrize(
    "text", ["api/ho" + "me/x", "~/wo" + "rk/x", "https://redis.io/ho" + "me/x", "/metrics"]
)
def test_the_search_leaves_alone_what_is_no_path_of_a_machine(text: str) -> None:
    assert not FORBIDDEN.search(text)


def test_no_tracked_file_names_a_registry_host_or_a_path_of_one_machine() -> None:
    found = []
    for path in tracked_files():
        content = path.read_bytes()
        if b"\0" in content:
            continue
        for number, line in enumerate(content.decode().splitlines(), start=1):
            if FORBIDDEN.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line[:120]}")
    assert found == []


def test_no_lock_file_records_download_addresses() -> None:
    assert [path for path in tracked_files() if path.name in LOCK_FILES] == []


@pytest.mark.parametrize("path", sorted((ROOT / "requirements").glob("*.txt")), ids=lambda path: path.name)
def test_requirements_are_pinned_with_hashes_and_name_no_index(path: Path) -> None:
    lines = pins(path)
    assert lines
    for line, hashes in lines.items():
        (pin,) = Requirement(line).specifier
        assert pin.operator == "==", line
        assert hashes, f"{line} has no hash"
        assert all(re.fullmatch("sha256:[0-9a-f]{64}", value) for value in hashes), line


def test_every_dependency_of_the_package_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {canonicalize_name(Requirement(line).name) for line in project["dependencies"]}
    for name in ("dev.txt", "core.txt"):
        pinned = {canonicalize_name(Requirement(line).name) for line in pins(ROOT / "requirements" / name)}
        assert needed <= pinned, name


def test_make_lowest_installs_the_lower_bounds_of_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    # A Spark of its own would take another gigabyte: it is that of the tests.
    tried = [line for extra in extras.keys() - {"connect", "spark"} for line in extras[extra]]
    installed = {
        canonicalize_name(pin.name): Version(str(pin.specifier).removeprefix("=="))
        for pin in map(Requirement, pins(ROOT / "requirements" / "lowest.txt"))
    }
    for needed in map(Requirement, [*project["dependencies"], *tried]):
        (lowest,) = [bound.version for bound in needed.specifier if bound.operator == ">="]
        assert installed[canonicalize_name(needed.name)] == Version(lowest), needed


def test_no_module_of_the_package_has_a_name_that_says_nothing() -> None:
    modules = {path for path in (ROOT / "django_rmq").rglob("*.py") if path.parent.name != "commands"}
    assert modules
    assert [path for path in modules if path.stem in NAMES_THAT_SAY_NOTHING] == []


def test_no_module_of_the_package_passes_all_its_locals() -> None:
    # Who reads them would depend on every name in the function, also on those that are its own business.
    modules = [*(ROOT / "django_rmq").rglob("*.py"), *(ROOT / "pyspark_rmq").rglob("*.py")]
    calls = {
        f"{module.relative_to(ROOT)}:{node.lineno}"
        for module in modules
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8")))
        if isinstance(node, ast.Name) and node.id == "locals"
    }
    assert modules and not calls


def test_a_style_sheet_takes_no_variable_of_a_page_for_granted() -> None:
    """A theme need not define Django's variables: an undefined one would leave, say, white text on a white page."""
    for path in (ROOT / "django_rmq").rglob("*.css"):
        text = path.read_text()
        ours = set(re.findall(r"^\s*(--rmq-[\w-]+):", text, re.MULTILINE))
        used = re.findall(r"var\((--[\w-]+)\s*([,)])", text)
        assert used
        assert [name for name, following in used if following == ")" and name not in ours] == [], path


def test_decisions_are_numbered_without_a_gap_and_say_their_number() -> None:
    pages = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    assert [path.name[:5] for path in pages] == [f"{number:04}-" for number in range(1, len(pages) + 1)]
    assert [path.name for path in pages if not path.read_text().startswith(f"# {path.name[:4]}. ")] == []


def test_every_page_that_a_text_links_to_is_there() -> None:
    linked = [
        (path, match[1])
        for path in tracked_files()
        if path.suffix == ".md"
        for match in re.finditer(r"\]\((?!https?:|#)([^)#\s]+)[^)]*\)", path.read_text())
    ]
    assert any("decisions/" in target for _, target in linked)
    assert [f"{path.name}: {target}" for path, target in linked if not (path.parent / target).exists()] == []


def test_files_of_the_repository_that_pages_link_to_are_links_within_docs() -> None:
    """So every generator of sites copies them. A page that leads out of docs/ would have a dead link there."""
    links = [path for path in (ROOT / "docs/files").rglob("*") if not path.is_dir() or path.is_symlink()]
    assert links
    for path in links:
        assert path.is_symlink(), f"{path} is a copy, which may become old"
        assert path.resolve() == ROOT / path.relative_to(ROOT / "docs/files") and path.is_file(), path
    named = {
        (page.parent / found[1]).absolute()
        for page in (ROOT / "docs").rglob("*.md")
        for found in re.finditer(r"\]\((?!https?:|#)([^)#\s]+)[^)]*\)", page.read_text())
    }
    inside = {Path(os.path.normpath(path)) for path in named}
    assert [path for path in inside if ROOT / "docs" not in path.parents] == []
    assert set(links) <= inside, "a link that no page uses"


def test_every_decision_that_is_named_is_there() -> None:
    numbers = {path.name[:4] for path in (ROOT / "docs" / "decisions").glob("*.md")}
    named = [
        (path.name, number)
        for path in tracked_files()
        if path.suffix in (".md", ".py", ".lua")
        for number in re.findall(r"decisions?[ /](\d{4})\b", path.read_text())
    ]
    assert named
    assert [(name, number) for name, number in named if number not in numbers] == []


def test_make_lists_every_target_with_a_word_of_help() -> None:
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony
    listed = output_of(["make", "--no-print-directory"])
    assert {line.split()[1] for line in listed.splitlines()} == set(phony[1].split())
