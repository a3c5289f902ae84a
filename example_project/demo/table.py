"""What the demo shows of the shop: a table for terminals, the same in one line, and the summary at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from example_project.demo.accounts import Accounts, Figures
    from example_project.demo.traffic import Done
    from example_project.product_sets.run import ProductSetsRun


NOT_COUNTED = ("image-renders", "tasks.default")
"""The topics into which nothing comes from outside, or what comes is the mail of an order that is counted."""


def totals(figures: dict[str, Figures], accounts: Accounts) -> dict[str, int]:
    """The whole shop in a few numbers; `sent` is what came from outside, not what listeners sent on."""
    topics = list(figures.values())
    return {
        "sent": sum(topic.counters["sent"] for name, topic in figures.items() if name not in NOT_COUNTED),
        "merged": sum(topic.merged for topic in topics),
        "rendered": figures["image-renders"].counters["committed"],
        "closed": accounts.closed_orders().count(),
        "retried": sum(topic.retried for topic in topics),
        "dead": sum(topic.dead for topic in topics),
        "waiting": sum(topic.store for topic in topics),
        "running": sum(topic.prepare for topic in topics),
        "resting": sum(topic.retry for topic in topics),
    }


COLUMNS = ("sent", "merged", "delivered", "done", "retried", "dead", "waiting", "running", "resting")


def row(figures: Figures) -> tuple[int, ...]:
    """A topic's figures in the order of COLUMNS."""
    counters = figures.counters
    return (
        counters["sent"],
        figures.merged,
        counters["prepared"] + counters["claimed"],
        counters["committed"] + counters["acked"],
        figures.retried,
        figures.dead,
        figures.store,
        figures.prepare + figures.claimed,
        figures.retry,
    )


def drawn(
    figures: dict[str, Figures], accounts: Accounts, sets: ProductSetsRun | None, seconds: float
) -> Any:
    """Return what a terminal shows."""
    from rich.console import Group
    from rich.table import Table

    early = accounts.closed_early()
    table = Table(
        title=f"{seconds:.0f} s",
        caption=f"orders closed: {accounts.closed_orders().count()}, early: {early}",
    )
    table.add_column("topic")
    for column in COLUMNS:
        table.add_column(column, justify="right", min_width=7)
    if sets is not None:
        figures = figures | sets.accounts.figures()
    for name, topic in figures.items():
        table.add_row(name, *(f"{value:,}" for value in row(topic)))
    return table if sets is None else Group(table, sets.rich_table())


def line(figures: dict[str, Figures], accounts: Accounts, sets: ProductSetsRun | None) -> str:
    """Return the same in one line."""
    found = "  ".join(f"{name} {value}" for name, value in totals(figures, accounts).items())
    return found if sets is None else f"{found}  sets {sets.sizes()}"


def summary(accounts: Accounts, done: Done, sets: ProductSetsRun | None) -> dict[str, object]:
    """Return what a run came to, by name."""
    found = totals(accounts.figures(), accounts)
    ledgers = [ledger for slots in accounts.ledgers().values() for ledger in slots]
    unbalanced = sum(not ledger.balanced for ledger in ledgers)
    late = accounts.latest_close().total_seconds()
    lines: dict[str, object] = {
        "sent": f"{found['sent']} ({done.price_changes} price changes, {done.orders} orders)",
        "merged": found["merged"],
        "rendered": found["rendered"],
        "confirmed by mail": accounts.confirmed(),
        "paid": done.paid,
        "closed": f"{found['closed']} (the latest {late:.3f} s after its time)",
        "retried": found["retried"],
        "dead": found["dead"],
        "not yet due or resting": found["waiting"] + found["resting"],
        "ledger": f"NOT balanced in {unbalanced} slots"
        if unbalanced
        else f"balanced in {len(ledgers)} slots",
        "delivered early": accounts.closed_early(),
    }
    if sets is not None:
        lines |= sets.summary()
    return lines
