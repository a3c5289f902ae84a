from __future__ import annotations

from typing import Any

from django.db.models import Count, Exists, OuterRef
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render

from example_project.product_sets.models import Label, Member, ProductSet

SHOWN = 6
"""Members of each set."""


def _current() -> dict[str, Any]:
    labels = Label.objects.filter(item=OuterRef("item"), product_set=OuterRef("product_set"))
    members = Member.objects.select_related("item").annotate(labelled=Exists(labels))
    sets = ProductSet.objects.annotate(size=Count("members"))
    return {"sets": [(each, members.filter(product_set=each)[:SHOWN]) for each in sets]}


def sets(request: HttpRequest) -> HttpResponse:
    """The product sets, each with its newest members."""
    return render(request, "product_sets/sets.html", _current())


def set_list(request: HttpRequest) -> HttpResponse:
    """The live part of the page."""
    return render(request, "product_sets/_sets.html", _current())
