"""What the recipe promises, with customers whose servers answer what the test wants."""

import hashlib
import hmac
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from django.test import TestCase
from shop.events import tell
from shop.models import Customer

from django_rmq.testing import RMQTestMixin


class Server(ThreadingHTTPServer):
    """Notes each call, and answers with the next of its codes (200 if there is none)."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.calls, self.codes = [], []
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.calls.append((json.loads(body), dict(self.headers), body))
        self.send_response(self.server.codes.pop(0) if self.server.codes else 200)
        self.send_header("Retry-After", "30")
        self.end_headers()

    def log_message(self, *arguments):
        pass


class WebhookTests(RMQTestMixin, TestCase):
    def setUp(self):
        super().setUp()
        self.server = Server()
        self.addCleanup(self.server.server_close)
        self.addCleanup(self.server.shutdown)
        address = f"http://127.0.0.1:{self.server.server_port}/"
        self.customer = Customer.objects.create(address=address, secret="of one")
        self.other = Customer.objects.create(address=address, secret="of the other")

    def send(self, *numbers, customer=None):
        with self.captureOnCommitCallbacks(execute=True):
            for number in numbers:
                tell(customer or self.customer, number)

    def called(self):
        return [body["event"] for body, _, _ in self.server.calls]

    def test_calls_are_signed_and_come_in_order(self):
        self.send(1, 2, 3)
        self.drain()
        assert self.called() == [1, 2, 3]
        for _, headers, body in self.server.calls:
            assert headers["Signature"] == hmac.new(b"of one", body, hashlib.sha256).hexdigest()

    def test_a_failed_call_is_repeated_with_its_key_before_later_ones_and_holds_no_other_customer(self):
        self.server.codes = [500]
        self.send(1, 2)
        self.drain(raise_errors=False)
        assert self.called() == [1]
        self.send(7, customer=self.other)
        self.drain()
        assert self.called() == [1, 7]
        self.advance(60)
        self.drain()
        assert self.called() == [1, 7, 1, 2]
        keys = [headers["Idempotency-Key"] for _, headers, _ in self.server.calls]
        assert keys[0] == keys[2]
        assert len(set(keys)) == 3

    def test_too_many_requests_are_repeated_when_the_customer_says(self):
        self.server.codes = [429]
        self.send(1)
        self.drain(raise_errors=False)
        self.advance(29)
        self.drain()
        assert self.called() == [1]
        self.advance(2)
        self.drain()
        assert self.called() == [1, 1]

    def test_what_the_customer_refuses_is_dead_and_later_events_go_on(self):
        self.server.codes = [410]
        self.send(1, 2)
        self.drain(raise_errors=False)
        assert self.called() == [1, 2]
        self.advance(3600)
        assert self.drain() == 0
