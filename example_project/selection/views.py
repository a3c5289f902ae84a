from __future__ import annotations

from typing import Any

from django.db.models import Count
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render

from example_project.selection.models import Change, ProductSet
from example_project.selection.showing import Showing

SHOWN = 6
"""Changes of each set."""


def _current() -> dict[str, Any]:
    sets = ProductSet.objects.order_by("name").annotate(size=Count("members"))
    return {
        "sets": [(one, one.changes.select_related("item")[:SHOWN]) for one in sets],
        "batch": Showing.newest_batch(),
        "waiting": Change.objects.filter(labelled_at=None).count(),
    }


def sets(request: HttpRequest) -> HttpResponse:
    """The product sets, each with its last changes."""
    return render(request, "selection/sets.html", _current())


def set_list(request: HttpRequest) -> HttpResponse:
    """The live part of the page."""
    return render(request, "selection/_sets.html", _current())
