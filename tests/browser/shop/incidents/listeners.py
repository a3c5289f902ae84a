"""A listener that waits for a service that never answers."""

import threading

from django_rmq import Message, listener


@listener("hung")
def wait_for_ever(message: Message) -> None:
    threading.Event().wait()


@listener("behind")
def never_reached(message: Message) -> None:
    raise AssertionError("every thread hangs")
