"""What the recipe promises: one report for each day, of the orders of that day."""

from datetime import timedelta

from django.test import TestCase
from django.utils import timezone
from shop.models import Order, Report

from django_rmq.testing import RMQTestMixin, schedule_state, start_schedules


class ReportTests(RMQTestMixin, TestCase):
    def test_each_night_has_the_report_of_the_day_before(self):
        start_schedules()
        first = schedule_state("nightly-report").next_run
        today = timezone.now().date()
        for days in range(-1, 3):
            Order.objects.create(paid_on=today + timedelta(days=days), amount=10 + days)
        assert first.strftime("%H:%M") == "03:00"
        self.advance(24 * 3600)
        self.drain()
        self.advance(24 * 3600)
        self.drain()
        yesterday = first.date() - timedelta(days=1)
        totals = dict(Report.objects.values_list("day", "total"))
        assert list(totals) == [yesterday, yesterday + timedelta(days=1)]
        for day, total in totals.items():
            assert total == 10 + (day - today).days
