"""Sets and their members: the one way to change a rule, and the one way to write what an evaluation found."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from django.db import transaction
from django.utils import timezone

from django_rmq import Send, SendResults, remove_message, send_message, send_messages
from example_project.selection.changes import KEY_ACCOUNT_WAIT, differing_labels, key_accounts, move, send_on
from example_project.selection.facts import is_noted, note
from example_project.selection.models import Batch, Item, Member, ProductSet, Work
from example_project.selection.rules import Facts, reason

TOPIC = "selection-changes"
TIMES = "set-times"
SOON = timedelta(seconds=1)
"""From now to the next look at a set whose time is just coming."""
LONGEST = timedelta(days=365)
"""The longest time without a look: a look too many is harmless, and people type any year."""


def save_set(product_set: ProductSet, now: datetime | None = None) -> None:
    """Save a set and have its members follow: of all items, if the rule is new; none, if it is not running.

    The messages go out when the transaction commits. `now` decides whether the set is running (None: this machine's
    clock). Raises ValidationError for a rule that cannot be read.
    """
    product_set.full_clean()
    now = now or timezone.now()
    with transaction.atomic():
        before = ProductSet.objects.select_for_update().filter(pk=product_set.pk).first()
        product_set.running = product_set.is_due(now)
        if before is None:
            product_set.save(force_insert=True)
            follow = True
        else:
            follow = (before.rule, before.running) != (product_set.rule, product_set.running)
            # Spark writes the other columns meanwhile.
            product_set.revision = before.revision + follow
            product_set.save(
                update_fields=["name", "rule", "active", "starts_at", "ends_at", "running", "revision"]
            )
        if follow and product_set.running:
            evaluate_all()
        elif follow:
            members = product_set.members.values_list("item_id", flat=True)
            why = "the time of the set is over" if product_set.active else "the set is not active"
            move(product_set, {}, dict.fromkeys(members, why))
        _wake(product_set, now)


def _wake(product_set: ProductSet, now: datetime) -> None:
    """Let a message come when the set begins or ends. It has the body of the one before, whose time it replaces."""
    at, body = product_set.next_time(now), {"set": product_set.pk}
    if at is None:
        remove_message(TIMES, body)
    else:
        send_message(TIMES, body, fixed_time=min(max(at, now + SOON), now + LONGEST))


def turn(pk: int, now: datetime | None = None) -> None:
    """Let a set begin or end if it is time; harmless at any other moment."""
    with transaction.atomic():
        product_set = ProductSet.objects.select_for_update().filter(pk=pk).first()
        if product_set is not None:
            save_set(product_set, now)


def resume() -> None:
    """Send again what is still to do, for a Redis that has lost it."""
    send_on(differing_labels())
    for pk in ProductSet.objects.exclude(starts_at=None, ends_at=None).values_list("pk", flat=True):
        turn(pk)


def delete_set(product_set: ProductSet) -> None:
    """Delete a set; its members leave it."""
    with transaction.atomic():
        send_on([(sku, product_set.pk) for sku in product_set.members.values_list("item_id", flat=True)])
        remove_message(TIMES, {"set": product_set.pk})
        product_set.delete()


def evaluate_all() -> SendResults:
    """Ask for all items to be looked at again: a changed rule is one more reason to, and merges with all others."""
    skus = list(Item.objects.values_list("sku", flat=True))
    first = key_accounts(skus)
    waits = {sku: KEY_ACCOUNT_WAIT if sku in first else None for sku in skus}
    return send_messages(TOPIC, [Send({"item": sku}, time_range=wait) for sku, wait in waits.items()])


@dataclass
class Evaluation:
    """What a batch found: which `items` were looked at, and by which rules which of them belong where."""

    items: Collection[int]
    revisions: dict[int, int] = field(default_factory=dict)
    """Set -> the revision of the rule it was evaluated by."""
    belonging: Mapping[int, set[int]] = field(default_factory=dict)
    """Set -> those of the items that its rule holds for."""
    facts: Mapping[int, Facts] = field(default_factory=dict)
    """Item -> what was known of it."""

    def reasons(self, product_set: ProductSet, skus: Collection[int]) -> dict[int, str]:
        """Return the facts that decided about these items, in words."""
        rule = product_set.parsed
        return {sku: reason(rule, self.facts[sku]) for sku in skus}


def settle(query: str, number: int, found: Evaluation, *, rows: int, unusable: int = 0) -> Batch | None:
    """Make the sets hold of the evaluated items exactly those that belong; None if this batch has been written before.

    What joins and leaves is sent on in the same transaction. A set whose rule has changed since is left alone: messages
    that came with the change have all its items evaluated.
    """
    with transaction.atomic():
        if is_noted(query, number):
            return None
        known = set(Item.objects.filter(sku__in=found.items).values_list("sku", flat=True))
        all_joined = all_left = 0
        for product_set in ProductSet.objects.filter(running=True, pk__in=found.revisions):
            if product_set.revision != found.revisions[product_set.pk]:
                continue
            members = Member.objects.filter(product_set=product_set, item__in=found.items)
            present = set(members.values_list("item_id", flat=True))
            belonging = found.belonging[product_set.pk] & known
            joined = found.reasons(product_set, belonging - present)
            left = found.reasons(product_set, present - belonging)
            move(product_set, joined, left)
            all_joined, all_left = all_joined + len(joined), all_left + len(left)
        return note(
            query,
            number,
            work=Work.SELECTION,
            rows=rows,
            unusable=unusable,
            items=len(known),
            joined=all_joined,
            left=all_left,
        )


def differing_sets() -> dict[str, tuple[set[int], set[int]]]:
    """Where the members are not those that the rules hold for by now: set -> (missing, too many), by plain Python."""
    facts = {item.sku: item.facts for item in Item.objects.all()}
    found = {}
    for product_set in ProductSet.objects.all():
        present = set(product_set.members.values_list("item_id", flat=True))
        rule = product_set.parsed
        belonging = {sku for sku, known in facts.items() if product_set.running and rule.holds(known)}
        if present != belonging:
            found[product_set.name] = (belonging - present, present - belonging)
    return found
