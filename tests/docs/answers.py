"""What a page shows as the answer to a request is what a server answers.

A page shows a request as a ``sh`` block with curl, and its answer as the ``json`` block after it.
"""

from __future__ import annotations

import re
from typing import Any

CHANGING = re.compile(
    r".*_ms|receipt|delivery|cursor|next|worker|host|pid|text|version|python|load|memory_mib|action_id|undo|selection"
)
"""Fields whose value is another one each time. The others are as shown."""


class Answers:
    def __init__(self) -> None:
        self._receipts: dict[str, str] = {}

    def filled(self, request: str) -> str:
        """Return a request with the receipts and ids of actions that were given in the place of those that are shown."""
        for shown, given in self._receipts.items():
            request = request.replace(f'"{shown}"', f'"{given}"').replace(f"/{shown}/", f"/{given}/")
        return request

    def difference(self, shown: Any, given: Any, name: str = "") -> str:
        """Return how an answer differs from what is shown. Empty: it does not.

        A list may have more items than are shown.
        """
        if isinstance(shown, dict) and isinstance(given, dict):
            if shown.keys() != given.keys():
                return f"{name or 'the answer'} has the fields {sorted(given)}, not {sorted(shown)}"
            found = (self.difference(value, given[field], field) for field, value in shown.items())
            return next(filter(None, found), "")
        if name == "report" and given is None:
            return ""  # a worker has not reported before it has run for some seconds
        if isinstance(shown, list) and isinstance(given, list):
            return self._of_lists(shown, given, name)
        if name in ("receipt", "action_id", "undo"):
            self._receipts[shown] = given
        if CHANGING.fullmatch(name) and type(shown) is type(given):
            return ""
        return "" if shown == given and type(shown) is type(given) else f"{name} is {given!r}, not {shown!r}"

    def _of_lists(self, shown: list[Any], given: list[Any], name: str) -> str:
        if bool(shown) != bool(given):
            return f"{name} is {given}, not {shown}"
        left, why = iter(given), ""
        for one in shown:
            for other in left:
                why = self.difference(one, other, name)
                if not why:
                    break
            else:
                return why or f"{name} has no {one}"
        return ""
