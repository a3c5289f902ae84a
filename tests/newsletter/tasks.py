"""The tasks of the newsletter."""

from __future__ import annotations

from typing import Any

from django.core.mail import EmailMessage

try:
    from django.tasks import TaskContext, task
except ImportError:
    from django_tasks import TaskContext, task  # type: ignore[assignment, no-redef]


@task()
def send_issue(issue: int, address: str) -> int:
    """Send an issue to one reader; return how many mails were sent."""
    mail = EmailMessage(f"Issue {issue}", "News", "news@example.com", [address])
    return mail.send()


@task(priority=-10, takes_context=True)
def publish(context: TaskContext, issue: int, addresses: list[str]) -> list[str]:
    """Send an issue to all readers, each in a task of its own; return the ids of their results."""
    if context.attempt > 1:
        return []
    return [send_issue.enqueue(issue, address).id for address in addresses]


@task()
async def count(ids: list[str]) -> dict[str, Any]:
    """Return how many of these mails are sent."""
    found = [await send_issue.aget_result(each) for each in ids]
    return {"sent": sum(result.return_value for result in found if result.is_finished), "of": len(found)}
