"""The example project's selection on PostgreSQL: Spark's tasks read the facts, and the driver reads none."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connections
from django.test import override_settings
from django.test.utils import CaptureQueriesContext

from example_project.selection.models import Item, ProductSet
from example_project.selection.rules import parse
from tests.e2e.postgres import postgres

pytestmark = pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas:FutureWarning")
ALIAS = "sets"
RULES = ("price < 20 and stock >= 1", 'title contains "STRASSE"', "rating is not known", "not stock > 3")


class Router:
    """All of the selection is in the PostgreSQL."""

    def db_for_read(self, model: Any, **hints: Any) -> str | None:
        return ALIAS if model._meta.app_label == "selection" else None

    db_for_write = db_for_read


@pytest.fixture
def database(django_db_blocker: Any) -> Iterator[Any]:
    with postgres() as server:
        address = {"NAME": "shop", "USER": "shop", "HOST": "127.0.0.1", "PORT": str(server.port)}
        engine = {"ENGINE": "django.db.backends.postgresql", "OPTIONS": {"application_name": "driver"}}
        connections.settings[ALIAS] = {**connections.settings["default"], **engine, **address}
        router = f"{__name__}.Router"
        with django_db_blocker.unblock(), override_settings(DATABASE_ROUTERS=[router]):
            try:
                call_command("migrate", "selection", database=ALIAS, verbosity=0)
                yield connections[ALIAS]
            finally:
                connections[ALIAS].close()
                del connections[ALIAS]
                del connections.settings[ALIAS]


def test_tasks_read_the_facts_that_rules_are_about(spark: Any, database: Any) -> None:
    from example_project.selection.engine import evaluate

    Item.objects.bulk_create(
        Item(
            sku=sku,
            title=("", "Lange Straße", "Mug")[sku % 3],
            price=None if sku % 7 == 0 else Decimal(sku) / 4,
            stock=None if sku % 5 == 0 else sku % 9,
            rating=None if sku % 4 == 0 else Decimal("3.5"),
        )
        for sku in range(1, 301)
    )
    sets = [ProductSet.objects.create(name=f"set {n}", rule=rule) for n, rule in enumerate(RULES)]
    asked = [*range(1, 251), 9_999]
    with CaptureQueriesContext(database) as queries:
        found = evaluate(spark, asked)
    assert not [one for one in queries if f'"{Item._meta.db_table}"' in one["sql"]]
    known = {item.sku: item.facts for item in Item.objects.filter(sku__in=asked)}
    assert len(known) == 250
    assert (found.facts, set(found.items)) == (known, set(known))
    for one in sets:
        rule = parse(one.rule)
        belonging = {sku for sku, facts in known.items() if rule.holds(facts)}
        assert 0 < len(belonging) < 250
        assert found.belonging[one.pk] == belonging
