"""What the recipe promises: an index that follows, with far fewer updates than changes."""

from unittest.mock import patch

from django.test import TestCase
from shop import listeners
from shop.models import Book, Entry

from django_rmq.testing import RMQTestMixin


class IndexTests(RMQTestMixin, TestCase):
    def change(self, book, title):
        with self.captureOnCommitCallbacks(execute=True):
            book.title = title
            book.save()

    def entries(self):
        return dict(Entry.objects.values_list("book", "text"))

    def test_many_changes_are_one_update(self):
        books = [Book(), Book()]
        for title in ("A", "AB", "ABC"):
            for book in books:
                self.change(book, title)
        with patch.object(listeners.Book.objects, "in_bulk", wraps=Book.objects.in_bulk) as reads:
            self.advance(3)
            self.drain()
            assert reads.call_count <= 2
        assert self.entries() == {book.pk: "abc" for book in books}

    def test_the_index_waits_for_the_last_change_and_for_a_minute_at_most(self):
        book = Book()
        updates = []
        for second in range(62):
            self.change(book, f"title {second}")
            updates += [second] * bool(self.drain())
            self.advance(1)
        # The seconds that the test itself takes count, too.
        assert len(updates) == 1
        assert updates[0] > 45

    def test_a_deleted_book_leaves_the_index(self):
        book = Book()
        self.change(book, "A")
        self.advance(3)
        self.drain()
        with self.captureOnCommitCallbacks(execute=True):
            book.delete()
        self.advance(3)
        self.drain()
        assert self.entries() == {}
