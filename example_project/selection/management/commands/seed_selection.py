from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand

from example_project.selection.models import ProductSet
from example_project.selection.sets import save_set

SETS = {
    "Under twenty": "price < 20 and stock > 0",
    "Mugs and bowls": '(title contains "mug" or title contains "bowl") and stock > 0',
    "Best rated": "rating >= 4.5 and price is known",
    "Last pieces": "stock between 1 and 4",
    "Fine lamps": 'price >= 100 and title contains "lamp" and not rating < 3',
}


class Command(BaseCommand):
    help = "Create a few product sets with rules, unless some exist."

    def handle(self, *args: Any, **options: Any) -> None:
        if not ProductSet.objects.exists():
            for name, rule in SETS.items():
                save_set(ProductSet(name=name, rule=rule))
        self.stdout.write(f"{ProductSet.objects.count()} product sets")
