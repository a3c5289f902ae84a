"""What the recipe promises of answered, unanswered and postponed tickets."""

from datetime import timedelta

from django.test import TestCase
from django.utils import timezone
from shop.models import Ticket

from django_rmq.testing import RMQTestMixin


class TicketTests(RMQTestMixin, TestCase):
    def open(self, minutes):
        ticket = Ticket()
        with self.captureOnCommitCallbacks(execute=True):
            ticket.set_deadline(timezone.now() + timedelta(minutes=minutes))
        return ticket

    def is_escalated(self, ticket, after):
        self.advance(60 * after)
        self.drain()
        ticket.refresh_from_db()
        return ticket.is_escalated

    def test_a_ticket_is_escalated_at_its_deadline(self):
        ticket = self.open(minutes=10)
        assert not self.is_escalated(ticket, after=9)
        assert self.is_escalated(ticket, after=2)

    def test_an_answer_takes_the_message_back(self):
        ticket = self.open(minutes=10)
        with self.captureOnCommitCallbacks(execute=True):
            ticket.give_answer("Yes.")
        self.advance(3600)
        assert self.drain() == 0
        assert not self.is_escalated(ticket, after=0)

    def test_a_new_deadline_moves_the_message(self):
        ticket = self.open(minutes=10)
        with self.captureOnCommitCallbacks(execute=True):
            ticket.set_deadline(timezone.now() + timedelta(minutes=30))
        assert not self.is_escalated(ticket, after=20)
        assert self.is_escalated(ticket, after=11)
