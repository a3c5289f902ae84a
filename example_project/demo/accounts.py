"""What became of everything that was sent: the ledgers of all slots, held against the shop's database."""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db.models import F
from django.utils import timezone

from django_rmq.conf import get_config
from django_rmq.connections import get_broker
from django_rmq.core.commands import inspect
from django_rmq.core.commands.broker_interface import walk
from django_rmq.core.model.body_codec import decode_body
from django_rmq.core.model.ledger import Ledger
from example_project.demo.traffic import Done
from example_project.orders.models import Order, State
from example_project.prices.models import Product

PRICES, RENDERS, ORDERS = "price-changes", "image-renders", "order-timeouts"
MAILS = "tasks.default"
DEPTHS = ("store", "prepare", "retry", "dead", "claimed")


class TopicAccounts:
    """What was done in some topics, from the moment it is made; depths are those of now."""

    def __init__(self, *names: str) -> None:
        self.broker = get_broker()
        self.topics = {name: get_config().topic(name) for name in names}
        self.began = timezone.now()
        self._before = {name: ledger.counters for name, ledger in self._sums().items()}

    def ledgers(self) -> dict[str, list[Ledger]]:
        """The ledger of every slot."""
        return {
            name: list(walk(self.broker, (inspect.audit_ledger(topic, slot) for slot in range(topic.slots))))
            for name, topic in self.topics.items()
        }

    def figures(self) -> dict[str, Ledger]:
        """What happened since the beginning, by topic: the ledgers of its slots, added up."""
        sums = self._sums()
        for name, ledger in sums.items():
            for counter, before in self._before[name].items():
                ledger.counters[counter] -= before
        return sums

    def _sums(self) -> dict[str, Ledger]:
        return {
            name: Ledger(
                sum((Counter(ledger.counters) for ledger in ledgers), Counter()),
                **{depth: sum(getattr(ledger, depth) for ledger in ledgers) for depth in DEPTHS},
            )
            for name, ledgers in self.ledgers().items()
        }

    def unbalanced(self) -> list[str]:
        """Slots whose ledger is not balanced, a sentence each."""
        return [
            f"the ledger of {name} slot {slot} is not balanced: {ledger}"
            for name, ledgers in self.ledgers().items()
            for slot, ledger in enumerate(ledgers)
            if not ledger.balanced
        ]


def merged(figures: Ledger) -> int:
    """Return the number of sends that met a message which was waiting still."""
    return figures["merged"] + figures["replaced"]


def live(figures: Ledger) -> int:
    """Return the number of messages that are neither done nor dead."""
    return figures.store + figures.prepare + figures.retry + figures.claimed


class Accounts(TopicAccounts):
    """Those of the shop's topics, with what the database says."""

    def __init__(self) -> None:
        super().__init__(PRICES, RENDERS, ORDERS, MAILS)

    def totals(self) -> dict[str, int]:
        """The whole shop in a few numbers; `sent` is what came from outside, not what listeners sent on."""
        figures = self.figures()
        topics = list(figures.values())
        return {
            "sent": figures[PRICES]["sent"] + figures[ORDERS]["sent"],
            "merged": sum(map(merged, topics)),
            "rendered": figures[RENDERS]["committed"],
            "closed": self.closed_orders().count(),
            "retried": sum(topic["failed"] + topic["expired"] for topic in topics),
            "dead": sum(topic.dead for topic in topics),
            "waiting": sum(topic.store for topic in topics),
            "running": sum(topic.prepare for topic in topics),
            "resting": sum(topic.retry for topic in topics),
        }

    def summary(self, done: Done) -> dict[str, object]:
        """What a run came to, by name."""
        totals = self.totals()
        slots = sum(topic.slots for topic in self.topics.values())
        unbalanced = len(self.unbalanced())
        return {
            "sent": f"{totals['sent']} ({done.price_changes} price changes, {done.orders} orders)",
            "merged": totals["merged"],
            "rendered": totals["rendered"],
            "confirmed by mail": Order.objects.filter(confirmed_at__gte=self.began).count(),
            "paid": done.paid,
            "closed": f"{totals['closed']} (the latest {self.latest_close().total_seconds():.3f} s after its time)",
            "retried": totals["retried"],
            "dead": totals["dead"],
            "not yet due or resting": totals["waiting"] + totals["resting"],
            "ledger": f"NOT balanced in {unbalanced} slots" if unbalanced else f"balanced in {slots} slots",
            "delivered early": self.closed_early(),
        }

    def closed_orders(self) -> Any:
        """Orders closed since the beginning."""
        return Order.objects.filter(state=State.CLOSED, closed_at__gte=self.began)

    def closed_early(self) -> int:
        """Orders closed before their time; both times are of this machine's clock, as is Redis' own."""
        return int(self.closed_orders().filter(closed_at__lt=F("due_at")).count())

    def latest_close(self) -> timedelta:
        """The longest time from an order's due time until it was closed."""
        times: list[tuple[datetime, datetime]] = self.closed_orders().values_list("due_at", "closed_at")
        return max((closed - due for due, closed in times), default=timedelta())

    def finished(self) -> bool:
        """Whether nothing is left that will happen by itself soon. Orders are waited for if they take a minute at most."""
        figures = self.figures()
        if live(figures[PRICES]) or live(figures[RENDERS]) or live(figures[MAILS]):
            return False
        orders = figures[ORDERS]
        patience: timedelta = settings.SHOP_ORDER_TIMEOUT
        if patience <= timedelta(minutes=1):
            return not live(orders)
        return not (orders.prepare or orders.retry or self._overdue())

    def complaints(self, done: Done) -> list[str]:
        """What does not add up, a sentence each; call it when the consumers have stopped."""
        complaints = self.unbalanced()
        figures = self.figures()
        for name, returned in ((PRICES, done.price_changes), (ORDERS, done.orders), (MAILS, done.orders)):
            if figures[name]["sent"] < returned:
                complaints.append(
                    f"{returned} sends to {name} returned, Redis counts {figures[name]['sent']}"
                )
        for name in (PRICES, RENDERS, MAILS):
            waiting = figures[name].store + figures[name].prepare
            if waiting:
                complaints.append(f"{waiting} messages of {name} were not consumed")
        if figures[ORDERS].prepare:
            complaints.append(
                f"{figures[ORDERS].prepare} messages of {ORDERS} are in flight although no worker runs"
            )

        if unconfirmed := Order.objects.filter(confirmed_at=None).count() - figures[MAILS].dead:
            complaints.append(f"{unconfirmed} orders were not confirmed by mail")
        if overdue := self._overdue():
            complaints.append(f"{overdue} orders are past their time but neither paid nor closed")
        still_open = Order.objects.filter(state=State.OPEN).count()
        if still_open > live(figures[ORDERS]) + figures[ORDERS].dead:
            complaints.append(
                f"{still_open} orders are open, but only {live(figures[ORDERS])} messages will close them"
            )
        # What failed for good shows an old price, and is where a person finds it; nothing else may.
        excused = self._skus("dead") | self._skus("retry")
        stale = [
            sku for sku in Product.objects.outdated().values_list("sku", flat=True) if sku not in excused
        ]
        if stale:
            complaints.append(f"{len(stale)} products do not show their price, such as {stale[:5]}")
        wrong = Product.objects.exclude(rendered_at=None).filter(rendered_version=F("price_version"))
        if differing := wrong.exclude(rendered_price=F("price")).count():
            complaints.append(f"{differing} images carry another price than their product")
        if early := self.closed_early():
            complaints.append(f"{early} orders were closed before their time")
        return complaints

    def _overdue(self) -> int:
        return Order.objects.filter(state=State.OPEN, due_at__lte=timezone.now()).count()

    def _skus(self, state: str) -> set[int]:
        """The products whose renders are in this state."""
        topic = self.topics[RENDERS]
        pages = walk(
            self.broker,
            (inspect.list_messages(topic, slot, state, limit=1000) for slot in range(topic.slots)),
        )
        return {decode_body(topic, entry.member)["sku"] for page in pages for entry in page.entries}
