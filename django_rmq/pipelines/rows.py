"""Shows counted rows, as aligned columns or as JSON, and reads by which columns to count."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

from django_rmq.exceptions import InvalidRequest
from django_rmq.pipelines import Context


def columns_of(text: str, known: Collection[str]) -> list[str]:
    """Return the columns of ``--by``. Raises ``InvalidRequest`` for one that is not ``known``."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    unknown = [name for name in names if name not in known]
    if unknown:
        raise InvalidRequest(f"--by must be among {', '.join(known)}, got {', '.join(unknown)}")
    return names


def show(context: Context, names: Sequence[str], rows: Sequence[Sequence[Any]], *, as_json: bool) -> None:
    """Show rows under ``names``; numbers are aligned to the right."""
    if as_json:
        context.show(json.dumps([dict(zip(names, row, strict=True)) for row in rows], indent=2))
        return
    texts = [list(names), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    right = [bool(rows) and isinstance(cell, int | float) for cell in (rows[0] if rows else names)]
    for text in texts:
        cells = zip(text, widths, right, strict=True)
        context.show(
            "  ".join(cell.rjust(width) if is_right else cell.ljust(width) for cell, width, is_right in cells)
        )


__all__ = ["columns_of", "show"]
