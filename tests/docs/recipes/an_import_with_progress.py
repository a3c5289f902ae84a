"""What the recipe promises: rows that arrive, a page that says how far it is, and a second run that changes nothing."""

import json
import tempfile
from unittest.mock import patch

from django.test import RequestFactory, TestCase
from shop import views
from shop.models import Book

from django_rmq.testing import RMQTestMixin


class ImportTests(RMQTestMixin, TestCase):
    def start(self, path):
        with self.captureOnCommitCallbacks(execute=True):
            return json.loads(views.start(RequestFactory().post("/", {"path": path})).content)["id"]

    def progress(self, message_id):
        return json.loads(views.progress(RequestFactory().get("/"), message_id).content)

    def test_the_books_arrive_and_the_page_says_how_far_it_is(self):
        with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
            file.write("isbn,title\n" + "".join(f"{n:013},Book {n}\n" for n in range(1_200)))
            file.flush()
            started = self.start(file.name)
            assert self.progress(started)["state"] == "waiting"
            seen = []
            create = Book.objects.bulk_create

            def noted(*arguments, **options):
                seen.append(self.progress(started)["state"])
                return create(*arguments, **options)

            with patch.object(Book.objects, "bulk_create", noted):
                self.drain()
            assert seen == ["running"] * 3
            assert Book.objects.count() == 1200
            found = self.progress(started)
            assert (found["state"], found["progress"]) == ("done", 1)
            self.start(file.name)
            assert self.drain() == 1
        assert Book.objects.count() == 1200
