"""What happens when an order's time is up, and every night. `manage.py runrmqconsumers` imports this module."""

from __future__ import annotations

from datetime import datetime, timedelta
from decimal import Decimal
from zoneinfo import ZoneInfo

from django.db.models import Sum

from django_rmq import Message, listener, schedule
from example_project.orders.checkout import close_order
from example_project.orders.models import DailyReport, Order, State

ZONE = ZoneInfo("Europe/Berlin")
"""Where the shop is: its days begin and end there."""


@listener("order-timeouts")
def time_is_up(message: Message) -> None:
    """Close the order, unless it has been paid or closed already."""
    close_order(message.body["order"])


@schedule("daily-report", topic="reports", cron="0 3 * * *", timezone="Europe/Berlin")
@listener("reports")
def report(message: Message) -> None:
    """Write the report of the day before, also if somebody runs the schedule by hand."""
    when = message.headers.get("tick") or message.headers["run"]
    write_report(datetime.fromisoformat(when))


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
