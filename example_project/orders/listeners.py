"""What happens when an order's time is up, and every night. `manage.py runrmqconsumers` imports this module."""

from datetime import datetime

from django_rmq import Message, listener, schedule
from example_project.orders.checkout import close_order
from example_project.orders.reports import write_report


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
