"""``python -m benchmarks.report``: run everything that is published, and write its tables into ``DOCUMENTS``.

Between ``<!-- name -->`` and ``<!-- end -->`` a document holds what was measured; the text around it stays. What one of the
parts printed as JSON into ``build/bench`` is used again with ``--again``.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

from benchmarks import scale
from benchmarks.harness import TITLES, cells, markdown, read_rows, told
from benchmarks.peers.__main__ import COMPARISONS, sections

ROOT = Path(__file__).parents[1]
DOCUMENTS = (ROOT / "docs/explanation/performance.md", ROOT / "benchmarks/README.md")
"""Results for users, and what concerns maintainers."""
RESULTS = ROOT / "build" / "bench"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--again", action="store_true", help="do not measure; write the last results")
    options = parser.parse_args()
    begun = time.monotonic()
    for name in options.only:
        module, tables_of = PARTS[name]
        path = RESULTS / f"{name}.json"
        if not options.again:
            command = [sys.executable, "-m", *module.split(), "--json", str(path)]
            if subprocess.run(command, cwd=ROOT, check=False).returncode:
                return 1
        write(tables_of(path))
    print(f"wrote the tables after {time.monotonic() - begun:.0f} s")
    return 0


def write(tables: dict[str, str]) -> None:
    """Write each table into the document that has a place for it."""
    for document in DOCUMENTS:
        text = document.read_text()
        here = {name: table for name, table in tables.items() if f"<!-- {name} -->" in text}
        document.write_text(filled(text, here))
        tables = {name: table for name, table in tables.items() if name not in here}
    if tables:
        raise ValueError(f"there is no place for {', '.join(tables)}")


def filled(text: str, tables: dict[str, str]) -> str:
    """Return ``text`` with each table between its marks."""
    for name, table in tables.items():
        marked = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not marked.search(text):
            raise ValueError(f"there is no place for {name}")
        text = marked.sub(lambda found, table=table: f"{found[1]}{table}\n{found[2]}", text)  # type: ignore[misc]
    return text


def _works(path: Path) -> dict[str, str]:
    rows = read_rows(path)
    where = told(json.loads(path.read_text())["conditions"])
    tables = {"works": f"{where}.\n\n{markdown(TITLES, cells(rows))}"}
    late = [row.values for row in rows if "histogram" in row.values]
    if late:
        titles, edges = ["later than due by"], late[0]["edges_ms"]
        classes = [f"{low} to {high} ms" for low, high in pairwise(edges)]
        columns = [["early", *classes, f"{edges[-1]} ms or more"]]
        for values in late:
            titles += [f"{values['rate']:,}/s", "control"]
            columns += [[f"{n:,}" for n in values[name]] for name in ("histogram", "control_histogram")]
        tables["lateness"] = markdown(titles, list(zip(*columns, strict=True)))
    return tables


def _peers(name: str, path: Path) -> dict[str, str]:
    found = json.loads(path.read_text())
    rows, comparison = read_rows(path), COMPARISONS["queues" if name == "peers" else name]
    return {name: "\n\n".join(sections(comparison, found["conditions"], found["queues"], rows, markdown))}


def _scale(path: Path) -> dict[str, str]:
    found = json.loads(path.read_text())
    parts = [told(found["conditions"]) + "."]
    for name, points in found["series"].items():
        parts.append(f"{name}: {scale.SERIES[name][2]}.\n\n{markdown(*scale.columns(name, points))}")
    return {"scale": "\n\n".join(parts)}


PARTS: dict[str, tuple[str, Callable[[Path], dict[str, str]]]] = {
    "lone": ("benchmarks.peers lone --rounds 5", partial(_peers, "lone")),
    "works": ("benchmarks", _works),
    "peers": ("benchmarks.peers", partial(_peers, "peers")),
    "scale": ("benchmarks.scale", _scale),
}
"""Name of a part -> the module that measures it, and what makes its tables."""


if __name__ == "__main__":
    sys.exit(main())
