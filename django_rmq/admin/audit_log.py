"""The audit log in the language of its reader: ``operations.audit_trail`` writes the records in English."""

from __future__ import annotations

import re
from collections.abc import Mapping

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_rmq.admin.labels import OUTCOMES, Text

AUDITED: Mapping[str, Text] = {
    "Replay": gettext_lazy("Replay"),
    "Replay all": gettext_lazy("Replay all"),
    "Replay edited": gettext_lazy("Replay an edited copy"),
    "Delete": gettext_lazy("Delete"),
    "Delete all": gettext_lazy("Delete all matches"),
    "Delete from the outbox": gettext_lazy("Delete from the outbox"),
    "Retry in the outbox": gettext_lazy("Retry in the outbox"),
    "Purge": gettext_lazy("Purge"),
    "Undo delete": gettext_lazy("Undo a deletion"),
    "Undo purge": gettext_lazy("Undo a purge"),
    "Bury": gettext_lazy("Put into Dead"),
    "Bury all": gettext_lazy("Put all into Dead"),
    "Cancel": gettext_lazy("Cancel"),
    "Reschedule": gettext_lazy("Reschedule"),
    "Reschedule all": gettext_lazy("Reschedule all"),
    "Pause": gettext_lazy("Pause"),
    "Resume": gettext_lazy("Resume"),
    "Send": gettext_lazy("Send"),
    "Edit": gettext_lazy("Edit"),
    "Reset": gettext_lazy("Reset"),
    "Run": gettext_lazy("Run"),
    "Return claims": gettext_lazy("Return claims"),
    "Change limits": gettext_lazy("Change limits"),
    "Reset limits": gettext_lazy("Reset limits"),
    "Export": gettext_lazy("Export"),
    "Show stack": gettext_lazy("Show stack"),
}
"""The actions as they are recorded."""
_AUDITED_OUTCOMES = {
    **OUTCOMES,
    "not_found": gettext_lazy("not found"),
    "asked": gettext_lazy("asked for"),
    "exported": gettext_lazy("exported"),
}
"""The outcomes, without advice for a person who has just pressed a button."""

_RECORD = re.compile(
    r"(?P<act>[A-Z][a-z ]+?)(?P<background> in the background)?(?P<note> \(.*\))?: "
    r"(?P<counts>nothing|\d+ [a-z ]+(?:, \d+ [a-z ]+)*)(?P<via> \(\w+\))",
    re.DOTALL,
)


def translate_record(record: str) -> str:
    """Return the text of a recorded action with its name and outcomes in the language of the reader.

    Records are stored in English, because people of all languages read them. A text of another form is returned unchanged.
    """
    match = _RECORD.fullmatch(record)
    if match is None or match["act"] not in AUDITED:
        return record
    counts = [each.split(" ", 1) for each in match["counts"].split(", ") if each != "nothing"]
    outcomes = _(", ").join(
        _("%(count)s %(outcome)s")
        % {"count": count, "outcome": _AUDITED_OUTCOMES.get(word.replace(" ", "_"), word)}
        for count, word in counts
    )
    act = str(AUDITED[match["act"]])
    if match["background"]:
        act = _("%(act)s in the background") % {"act": act}
    return f"{act}{match['note'] or ''}: {outcomes or _('nothing')}{match['via']}"
