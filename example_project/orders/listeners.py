"""What happens when an order's time is up. `manage.py runrmqconsumers` imports this module."""

from django_rmq import Message, listener
from example_project.orders.checkout import close_order


@listener("order-timeouts")
def time_is_up(message: Message) -> None:
    """Close the order, unless it has been paid or closed already."""
    close_order(message.body["order"])
