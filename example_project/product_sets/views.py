from __future__ import annotations

from django.db.models import Count, Exists, OuterRef
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render

from example_project.product_sets.models import Label, Member, ProductSet

SHOWN = 6
"""Members of each set."""


def sets(request: HttpRequest) -> HttpResponse:
    """The product sets, each with its newest members."""
    labels = Label.objects.filter(item=OuterRef("item"), product_set=OuterRef("product_set"))
    members = Member.objects.select_related("item").annotate(labelled=Exists(labels))
    counted = ProductSet.objects.annotate(size=Count("members"))
    shown = [(each, members.filter(product_set=each)[:SHOWN]) for each in counted]
    return render(request, "product_sets/sets.html", {"sets": shown})
