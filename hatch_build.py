"""What the package index shows: the addresses of the project, and the README with links that lead somewhere from there.

hatchling asks ``Addresses`` at each build. The addresses stand in one place: ``[tool.hatch.metadata.hooks.custom]`` of
pyproject.toml.

    python hatch_build.py      ends with an error while one of them is a placeholder; `make dist` begins with it
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

ROOT = Path(__file__).parent
LINK = re.compile(r"(!?)(\[(?:[^\[\]]|!\[[^\]]*\]\([^)]*\))*\]\()([^)\s]+)(\))")
ATTRIBUTE = re.compile(r'\b(src|srcset|href)="([^"]+)"')
PAGE = r"(?![a-z]+:|#|/)"
"""A target begins like this if it is a path: neither an address nor a place in the page itself."""


class Addresses(MetadataHookInterface):
    """Gives a distribution its addresses and its long description."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set ``urls`` and ``readme``. The README is the one beside the distribution's own pyproject.toml."""
        addresses = read_addresses()
        repository, version = addresses["repository"], metadata["version"]
        metadata["urls"] = {
            "Documentation": addresses["documentation"],
            "Source": repository,
            "Issues": f"{repository}/issues",
            "Changelog": f"{repository}/blob/v{version}/CHANGELOG.md",
        }
        text = (Path(self.root) / "README.md").read_text()
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": with_absolute_links(text, repository, f"v{version}"),
        }


def read_addresses() -> dict[str, str]:
    """Return the addresses of the project: ``repository`` and ``documentation``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    addresses: dict[str, str] = project["tool"]["hatch"]["metadata"]["hooks"]["custom"]
    return {name: addresses[name].rstrip("/") for name in ("repository", "documentation")}


def with_absolute_links(text: str, repository: str, tag: str) -> str:
    """Return a page of the root with each path in a link or a picture as an address in the repository at ``tag``."""

    def address(path: str, kind: str) -> str:
        if not re.match(PAGE, path):
            return path
        kind = "tree" if path.endswith("/") and kind == "blob" else kind
        return f"{repository}/{kind}/{tag}/{path}"

    def link(found: re.Match[str]) -> str:
        label = LINK.sub(link, found[2][1:-2])
        return f"{found[1]}[{label}]({address(found[3], 'raw' if found[1] else 'blob')})"

    def attribute(found: re.Match[str]) -> str:
        return f'{found[1]}="{address(found[2], "blob" if found[1] == "href" else "raw")}"'

    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    parts[::2] = [ATTRIBUTE.sub(attribute, LINK.sub(link, part)) for part in parts[::2]]
    return "".join(parts)


def main() -> None:
    """Refuse a release with addresses that lead nowhere."""
    wrong = [
        f"{name} = {address!r}"
        for name, address in read_addresses().items()
        if not re.fullmatch(r"https://[\w.-]+(?<!\.invalid)(/\S*)?", address)
    ]
    if wrong:
        sys.exit(
            "No release without the addresses of the project. Write them into [tool.hatch.metadata.hooks.custom] of "
            f"pyproject.toml: {', '.join(wrong)}"
        )


if __name__ == "__main__":
    main()
