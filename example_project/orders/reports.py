"""What became of the orders of a day."""

from __future__ import annotations

from datetime import datetime, timedelta
from decimal import Decimal
from zoneinfo import ZoneInfo

from django.db.models import Sum

from example_project.orders.models import DailyReport, Order, State

ZONE = ZoneInfo("Europe/Berlin")
"""Where the shop is: its days begin and end there."""


def write_report(tick: datetime) -> DailyReport:
    """Count the orders of the day before `tick`, a second time as well as the first."""
    day = tick.astimezone(ZONE).date() - timedelta(days=1)
    begin = datetime.combine(day, datetime.min.time(), ZONE)
    end = datetime.combine(day + timedelta(days=1), datetime.min.time(), ZONE)
    orders = Order.objects.filter(created_at__gte=begin, created_at__lt=end)
    paid = orders.filter(state=State.PAID)
    report, _ = DailyReport.objects.update_or_create(
        day=day,
        defaults={
            "orders": orders.count(),
            "paid": paid.count(),
            "closed": orders.filter(state=State.CLOSED).count(),
            "revenue": paid.aggregate(sum=Sum("total"))["sum"] or Decimal(0),
        },
    )
    return report
