"""A test never sees what another test has sent: under pytest and under Django's runner, with and without our helpers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from django.core.management import call_command
from django.test import override_settings

from django_rmq import connections, send_message
from django_rmq.conf import get_config
from django_rmq.connections.brokers import running_test
from django_rmq.testing import InMemoryBroker, drain
from django_rmq.worker.listener_registry import isolated

ROOT = Path(__file__).parents[2]

SETTINGS = """
SECRET_KEY = "of a test"
INSTALLED_APPS = ["django_rmq", "shop"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
USE_TZ = True
STATIC_URL = "static/"
# Nothing listens there: whoever tries to reach it fails.
RMQ = {"REDIS": "redis://127.0.0.1:1/0", "TOPICS": {"orders": {"TYPE": "range_merge", "TIME_RANGE": 60}}}
"""

TESTS = '''
from django.db import transaction
from django.test import LiveServerTestCase, SimpleTestCase, TestCase, TransactionTestCase
from django_rmq import remove_message, send_message
from django_rmq.testing import RMQTestMixin, drain
from shop.listeners import seen
from urllib.request import urlopen


class Sends:
    """Each test sends what all others send, and finds that it is the first."""

    def test_one(self):
        with self.settings(ALLOWED_HOSTS=["*"]):  # other settings do not make another broker
            self.assertEqual(send_message("orders", 1).status, "stored")
        self.assertEqual(send_message("orders", 1).status, "merged")

    def test_two(self):
        self.assertEqual(send_message("orders", 1).status, "stored")
        self.assertEqual(remove_message("orders", 1), "waiting")
        self.assertEqual(drain(), 0)

    test_three = test_one


class Outside(Sends):
    """Where nothing is sent at once."""

    def test_one(self):
        with self.captureOnCommitCallbacks(execute=True):
            first = send_message("orders", 1)
        with self.captureOnCommitCallbacks(execute=True):
            again = send_message("orders", 1)
        self.assertEqual((first.status, again.status), ("stored", "merged"))

    test_two = test_three = test_one


class Simple(Sends, SimpleTestCase):
    pass


class Atomic(Outside, TestCase):
    pass


class Real(Sends, TransactionTestCase):
    def test_a_transaction(self):
        with transaction.atomic():
            result = send_message("orders", 1)
        self.assertEqual(result.status, "stored")


class SimpleWithMixin(RMQTestMixin, Sends, SimpleTestCase):
    pass


class AtomicWithMixin(RMQTestMixin, Outside, TestCase):
    pass


class RealWithMixin(RMQTestMixin, Sends, TransactionTestCase):
    pass


class Coroutines(SimpleTestCase):
    async def test_one(self):
        from django_rmq import asend_message

        self.assertEqual((await asend_message("orders", 1)).status, "stored")
        self.assertEqual((await asend_message("orders", 1)).status, "merged")

    test_two = test_one


class InOtherThreads(LiveServerTestCase):
    def test_one(self):
        answers = [urlopen(self.live_server_url).read() for _ in range(2)]
        self.assertEqual(answers, [b"stored", b"merged"])
        self.assertEqual(send_message("orders", 1).status, "merged")

    test_two = test_one
'''

FUNCTIONS = """
import pytest
from django_rmq import send_message
from django_rmq.testing import assert_message_sent


@pytest.mark.parametrize("n", range(3))
def test_functions(n):
    assert [send_message("orders", 1).status for _ in range(2)] == ["stored", "merged"]


@pytest.mark.parametrize("n", range(2))
def test_functions_with_fixtures(n, rmq, rmq_captured):
    assert [send_message("orders", 1).status for _ in range(2)] == ["stored", "merged"]
    assert_message_sent("orders", count=2)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("n", range(2))
def test_functions_with_a_database(n):
    assert [send_message("orders", 1).status for _ in range(2)] == ["stored", "merged"]


class TestInAClass:
    def test_one(self):
        assert send_message("orders", 1).status == "stored"

    test_two = test_one
"""


@pytest.fixture(params=["BROKER", "TESTING"])
def project(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A project whose settings say TESTING, or BROKER "memory"."""
    switch = '"TESTING": True' if request.param == "TESTING" else '"BROKER": "memory"'
    (tmp_path / "shop").mkdir()
    for name, text in {
        "shop/__init__.py": "",
        "shop/listeners.py": "from django_rmq import listener\nseen = []\n"
        "@listener('orders')\ndef note(message):\n    seen.append(message.body)\n",
        "shop/urls.py": "from django.http import HttpResponse\nfrom django.urls import path\n"
        "from django_rmq import send_message\n"
        "urlpatterns = [path('', lambda request: HttpResponse(send_message('orders', 1).status))]\n",
        "shop/tests.py": TESTS,
        "test_functions.py": FUNCTIONS,
        "shop_settings.py": f"{SETTINGS}ROOT_URLCONF = 'shop.urls'\nRMQ |= {{{switch}}}\n",
        "pytest.ini": "[pytest]\npython_files = tests.py test_*.py\npythonpath = .\n",
    }.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def run(project: Path, *command: str) -> str:
    path = os.pathsep.join([str(project), str(ROOT)])
    environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "shop_settings", "PYTHONPATH": path}
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 300}
    answer = subprocess.run([sys.executable, *command], cwd=project, env=environment, check=False, **options)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout + answer.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("project", "how"), [("BROKER", "--reverse"), ("TESTING", "--parallel=2")], indirect=["project"]
)
def test_under_djangos_runner_each_test_begins_with_nothing(project: Path, how: str) -> None:
    output = run(project, "-m", "django", "test", "shop", how)
    found = re.search(r"Ran (\d+) tests", output)
    assert found is not None and int(found[1]) == 23, output


@pytest.mark.slow
def test_under_pytest_each_test_begins_with_nothing(project: Path) -> None:
    assert "32 passed" in run(project, "-m", "pytest", "-q", "-p", "no:cacheprovider")


TOPICS = {"orders": {"TYPE": "range_merge", "SLOTS": 1, "TIME_RANGE": 60}}


@pytest.mark.parametrize(
    "server", ["redis://127.0.0.1:1/0", "no such alias", {"CLUSTER": "redis://127.0.0.1:1"}]
)
def test_with_testing_no_server_is_reached_whatever_redis_says(server: Any) -> None:
    with override_settings(RMQ={"REDIS": server, "TESTING": True, "TOPICS": TOPICS}):
        assert get_config().redis is None
        assert send_message("orders", 1).status == "stored"
        assert isinstance(connections.get_broker("worker"), InMemoryBroker)
        with isolated():
            assert drain() == 0


def test_with_testing_a_deployment_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    from django.core.management.base import SystemCheckError

    rmq = {"REDIS": "redis://127.0.0.1:1/0", "TESTING": True, "TOPICS": TOPICS}
    with override_settings(RMQ=rmq), pytest.raises(SystemCheckError, match=r"django_rmq\.E013"):
        call_command("check", "--deploy", "--tag", "rmq")


def test_outside_of_test_cases_no_test_case_runs() -> None:
    assert running_test() is None


def test_the_test_case_that_runs_is_known_in_all_threads() -> None:
    from unittest import TestCase

    found: list[object] = []

    class Case(TestCase):
        def runTest(self) -> None:  # noqa: N802 - unittest's name
            found.append(running_test())
            thread = Thread(target=lambda: found.append(running_test()))
            thread.start()
            thread.join()

    case = Case()
    assert case.run() is not None
    assert found[0] is case and found[1] is case
    assert running_test() is None
