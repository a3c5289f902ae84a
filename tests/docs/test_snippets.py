"""Every fenced block of the README and of docs/ is run, or parsed, in a project that is prepared as its reader's would be.

Each page has a project of its own (``stage``), a Redis of its own prefix, and its blocks are run in their order:

- ``python``: what follows a line ``# settings.py`` (``urls.py``, ``listeners.py``, ...) goes into that file, and the project is
  checked; anything else is run as a script. Test cases in it are run as well.
- ``sh`` and the lines of ``console`` that begin with ``$``: run by a shell. Commands that never end are ended;
  ``pip`` and ``make`` are asked whether they know what is named; Spark's pipelines have their arguments parsed.
- ``json``, ``yaml``, ``toml``, ``ini``: parsed. ``json`` after a curl is compared with what was answered (``Answers``).
- ``text`` is a picture. A block must say what it is, and one that holds commands is no picture.

The README and a tutorial begin in an empty folder and make their projects by themselves.
"""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import redis
import yaml

from django_rmq.api import urls
from django_rmq.core.commands.reports import delete_reports, write_stacks
from django_rmq.core.commands.schedules import change_schedule
from django_rmq.core.coordination import Worker
from django_rmq.core.coordination.assignment import TopicSlots
from django_rmq.core.coordination.redis_coordinator import RedisCoordinator
from django_rmq.core.model.schedule import Schedule
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.core.model.worker_report import RunningCall, Stack
from django_rmq.core.redis.broker import RedisBroker
from django_rmq.core.schedules.stepper import Stepper
from tests.docs import stage
from tests.support import preloaded
from tests.support.commands import ROOT, completed
from tests.support.embedded_server import free_port
from tests.support.reports import report
from tests.support.servers import RedisServer
from tests.support.workers import eventually

CHANGING = re.compile(
    r".*_ms|receipt|delivery|cursor|next|worker|host|pid|text|version|python|load|memory_mib|action_id|undo|selection"
)
"""Fields whose value is another one each time. The others are as shown."""


class Answers:
    """The answers of a page. What its ``json`` shows after a request by curl is what a server answers."""

    def __init__(self) -> None:
        self._receipts: dict[str, str] = {}

    def filled(self, request: str) -> str:
        """Return a request with the receipts and ids of actions that were given in the place of those that are shown."""
        for shown, given in self._receipts.items():
            request = request.replace(f'"{shown}"', f'"{given}"').replace(f"/{shown}/", f"/{given}/")
        return request

    def difference(self, shown: Any, given: Any, name: str = "") -> str:
        """Return how an answer differs from what is shown. Empty: it does not.

        A list may have more items than are shown.
        """
        if isinstance(shown, dict) and isinstance(given, dict):
            if shown.keys() != given.keys():
                return f"{name or 'the answer'} has the fields {sorted(given)}, not {sorted(shown)}"
            found = (self.difference(value, given[field], field) for field, value in shown.items())
            return next(filter(None, found), "")
        if name == "report" and given is None:
            return ""  # a worker has not reported before it has run for some seconds
        if isinstance(shown, list) and isinstance(given, list):
            return self._of_lists(shown, given, name)
        if name in ("receipt", "action_id", "undo"):
            self._receipts[shown] = given
        if CHANGING.fullmatch(name) and type(shown) is type(given):
            return ""
        return "" if shown == given and type(shown) is type(given) else f"{name} is {given!r}, not {shown!r}"

    def _of_lists(self, shown: list[Any], given: list[Any], name: str) -> str:
        if bool(shown) != bool(given):
            return f"{name} is {given}, not {shown}"
        left, why = iter(given), ""
        for one in shown:
            for other in left:
                why = self.difference(one, other, name)
                if not why:
                    break
            else:
                return why or f"{name} has no {one}"
        return ""


PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
GENERATORS = "generators have an environment of their own; tests/clients runs them"
CLUSTER = "it needs a cluster; tests/spark/test_clusters.py runs a job so"
PLATFORM = "it needs a platform, on which it was not tried: the page says so"
NOT_RUN: dict[str, str] = {
    "PYSPARK_PYTHON=/opt/venv/bin/python spark-submit --master spark://master:7077 job.py": CLUSTER,
    "pip download --no-deps --dest wheels pyspark-rmq redis": CLUSTER,
    "python -m venv environment": CLUSTER,
    "databricks secrets create-scope rmq": PLATFORM,
    "aws emr-serverless start-job-run --application-id APPLICATION --execution-role-arn ROLE \\": PLATFORM,
    "gcloud dataproc jobs submit pyspark gs://bucket/job.py --cluster=CLUSTER --region=REGION \\": PLATFORM,
    "docker build --build-arg SPARK_IMAGE=registry.example/spark:4.2.1 --build-arg VERSION=0.1.0 \\": PLATFORM,
    "make demo         # a small shop: Redis, consumers, web server, traffic, and a line about it every two seconds": (
        "it installs an environment; tests/e2e/test_demo.py runs it"
    ),
    "manage.py rmqtopics exports --retire --wait 1h                              # waits until workers have emptied it": (
        "the topic has to be taken out of the settings before; tests/integration/test_retiring.py runs them"
    ),
    "openapi-python-client generate --path openapi.yaml --meta none --output-path rmq_client": GENERATORS,
    "npx openapi-typescript openapi.yaml --default-non-nullable false --output schema.d.ts": GENERATORS,
}
"""First line of a block → why nobody can run it here."""
FROM_NOTHING = {ROOT / "README.md", *(ROOT / "docs/tutorial").glob("*.md")}
"""Pages whose reader has no project yet."""
PREPARED = {ROOT / "docs/reference/rest.md": ROOT / "docs/how-to/rest.md"}
"""Page → the guide whose reader has the project that the page needs."""
PICTURES = ("text",)
PARSED: dict[str, Callable[[str], Any]] = {
    "json": json.loads,
    "yaml": lambda text: list(yaml.safe_load_all(text)),
    "toml": tomllib.loads,
    "ini": lambda text: configparser.ConfigParser().read_string(text),
}
COMMANDS = re.compile(r"^\s*(\$ |python |manage\.py |pip |curl |make )", re.MULTILINE)
FILE = re.compile(r"^# ([\w/]+\.py)\b.*$", re.MULTILINE)
FENCE = re.compile(r"^( *)```(\S*)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
ENDLESS = ("runserver", "runrmqconsumers")


class Snippet(NamedTuple):
    """One fenced block."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        """Where it is, for people."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def first_line(self) -> str:
        """What it is called by in ``NOT_RUN``."""
        return self.text.strip().partition("\n")[0]


def snippets(page: Path) -> list[Snippet]:
    text = page.read_text()
    return [
        Snippet(
            page, text.count("\n", 0, found.start()) + 1, found[2], re.sub(rf"(?m)^{found[1]}", "", found[3])
        )
        for found in FENCE.finditer(text)
    ]


MANAGE = """#!/bin/sh
# manage.py as the documents call it. 1 is how commands for probes and operators say that something is amiss.
cd "{folder}"
case "$1" in
  rmqpurge|rmqreplay) set -- "$@" --no-input ;;
  runrmqpipeline) [ $# -eq 1 ] || set -- parsed "$@" ;;
esac
case " {endless} :$* " in
  *" $1 "*|*" --watch "*|*" --events "*) timeout 8 {python} manage.py "$@" </dev/null ;;
  *) timeout 60 {python} manage.py "$@" ;;
esac 2>"$0.stderr"
code=$?
cat "$0.stderr" >&2
if grep -q Traceback "$0.stderr"; then exit 99; fi
case "$code $1" in "1 rmq"*|124\\ *) exit 0 ;; esac
exit $code
"""
PARSED_COMMAND = '''
"""manage.py parsed COMMAND ...: reads the arguments, and does nothing."""
from importlib import import_module
from django.core.management.base import BaseCommand


class Command(BaseCommand):
    def run_from_argv(self, argv):
        module = import_module(f"django_rmq.management.commands.{argv[2]}")
        module.Command().create_parser(argv[0], argv[2]).parse_args(argv[3:])
'''
JVM_FRAME = re.compile(r"\s+at [a-z]|\s+\.\.\. \d+ more")
PIP = """#!/bin/sh
exec "{python}" - "$@" <<'END'
import re, sys, tomllib
project = tomllib.load(open("{root}/pyproject.toml", "rb"))["project"]
named = [one for one in sys.argv[2:] if not one.startswith("-")]
assert sys.argv[1] == "install" and named, sys.argv
for one in named:
    extras = re.search(r"\\[(.*?)\\]", one)
    for extra in extras[1].split(",") if extras else ():
        assert extra in project["optional-dependencies"], f"there is no extra {{extra}}"
END
"""
STACK = '  File "/srv/shop/listeners.py", line 12, in render\n    image.resize(size)\n'
"""What a worker answers that is asked where a listener is."""


class Project:
    """What one page is read with."""

    def __init__(self, folder: Path, page: Path, redis_url: str) -> None:
        self.folder, self.redis_url = folder, redis_url
        self.is_tutorial = page in FROM_NOTHING
        self.scripts: list[str] = []
        self.answers = Answers()
        self.said = ""
        self.settings = [stage.PLAIN_SETTINGS, stage.WITH_RMQ]
        self.epilogue = stage.OURS.format(topics=stage.TOPICS)
        self.port = free_port()
        self.server: subprocess.Popen[bytes] | None = None
        self.environment = {
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "settings",
            "PATH": f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT}:{folder}",
            "DJANGO_SUPERUSER_PASSWORD": "program",
            "RMQ_METRICS_TOKEN": "a-token-of-sixteen-characters",
            "ZOOKEEPER_LOGIN": "rmq:secret",
            "PYSPARK_SUBMIT_ARGS": "--master local[1] --conf spark.ui.enabled=false pyspark-shell",
        }
        self.write_commands()
        if self.is_tutorial:
            del self.environment["DJANGO_SETTINGS_MODULE"]
        else:
            self.write_project()

    def write_commands(self) -> None:
        """Put what readers type into the PATH."""
        forked = shlex.join(preloaded.python())
        values = {"folder": self.folder, "python": forked, "endless": " ".join(ENDLESS)}
        self.script("manage.py", MANAGE.format(**values))
        # `python manage.py` is the same thing.
        passed_on = (
            f'#!/bin/sh\n[ "$1" != manage.py ] || {{ shift; exec manage.py "$@"; }}\nexec {forked} "$@"\n'
        )
        self.script("python", passed_on)
        self.script("pip", PIP.format(python=sys.executable, root=ROOT))
        self.script("make", f'#!/bin/sh\nexec /usr/bin/make -n -C "{ROOT}" "$@"\n')

    def write_project(self) -> None:
        """Make the project that readers of a guide have already."""
        self.write("urls.py", stage.URLS)
        self.write(
            "manage.py", (ROOT / "manage.py").read_text().replace("example_project.settings", "settings")
        )
        self.write("shop/__init__.py", "")
        self.write("shop/management/__init__.py", "")
        self.write("shop/management/commands/__init__.py", "")
        self.write("shop/management/commands/parsed.py", PARSED_COMMAND)
        self.write("shop/redaction.py", "def hide_cards(topic, body):\n    return body\n")
        self.write("bodies.jsonl", '{"sku": 1, "shop": 7}\n{"sku": 2, "shop": 7}\n')
        self.save()

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def script(self, name: str, text: str) -> None:
        self.write(f"bin/{name}", text)
        (self.folder / "bin" / name).chmod(0o755)

    def save(self) -> None:
        self.write("settings.py", self.here("\n".join([*self.settings, self.epilogue])))

    def here(self, text: str) -> str:
        """Return a snippet with the addresses of this project in the place of those that readers have."""
        text = re.sub(r"redis://(localhost|127\.0\.0\.1):6379/\d", self.redis_url, text)
        return text.replace("http://127.0.0.1:8000", f"http://127.0.0.1:{self.port}")

    def call(self, *command: str, stdin: str = "") -> str:
        """Run a command in the project; return what went wrong with it, if anything."""
        ran = completed(command, seconds=540, cwd=self.folder, env=self.environment, input=stdin)
        self.said = ran.stdout
        if ran.returncode == 0:
            return ""
        # What Python says stands before the frames of the JVM, of which there are any number.
        said = "\n".join(line for line in ran.stderr.splitlines() if not JVM_FRAME.match(line))
        return f"exit code {ran.returncode}\n{ran.stdout[-1500:]}\n{said[-6000:]}"

    def manage(self, *command: str) -> str:
        """Run a command of the project, which has to succeed; return what it says."""
        wrong = self.call(*preloaded.python(), "manage.py", *command)
        assert not wrong, wrong
        return self.said

    # --- blocks

    def run(self, snippet: Snippet) -> str:
        """Run or parse a block; return what is wrong with it, if anything."""
        language, text = snippet.language, snippet.text
        if language not in PARSED and language != "python":
            before = self.run_scripts()
            if before:
                return before
        if language in PICTURES:
            return "it holds commands: say sh or console" if COMMANDS.search(text) else ""
        if language in PARSED:
            try:
                PARSED[language](text)
            except Exception as error:  # noqa: BLE001 - each parser has errors of its own
                return f"it is no {language}: {error}"
            return ""
        if language == "python":
            return self.python(snippet)
        if language == "console":
            text = "\n".join(line[2:] for line in text.splitlines() if line.startswith("$ "))
        if language in ("sh", "console") and text.strip():
            return self.shell(text)
        return f"nobody knows how to run {language!r}: say python, sh, console, json, yaml, toml, ini or text"

    def python(self, snippet: Snippet) -> str:
        parts = FILE.split(snippet.text)
        if parts[1:] and (before := self.run_scripts()):
            return before
        for name, part in zip(parts[1::2], parts[2::2], strict=True):
            self.stop_server()
            if self.is_tutorial:
                path = self.folder / name
                before_it = path.read_text() if path.name in ("settings.py", "urls.py") else ""
                self.write(name, self.here(before_it + part))
            elif name == "settings.py":
                self.settings.append(part)
                self.save()
            elif name == "urls.py":
                with (self.folder / name).open("a") as urls:
                    urls.write(part)
            else:
                self.write(f"shop/{Path(name).name}", part)
        wrong = self.call(*preloaded.python(), "manage.py", "check") if parts[1:] else ""
        if wrong or not parts[0].strip():
            return wrong
        # A line for each line before it, so that a traceback says the line of the page.
        name = f"{snippet.page.stem}-{snippet.line}.py"
        self.write(name, "\n" * snippet.line + self.here(parts[0]))
        self.scripts.append(name)
        return ""

    def run_scripts(self) -> str:
        """Run the scripts since the last time, in one process: what one defines the next ones have."""
        scripts, self.scripts = self.scripts, []
        return self.call(*preloaded.python(), str(ROOT / "tests/docs/stage.py"), *scripts) if scripts else ""

    def shell(self, text: str) -> str:
        if "http://127.0.0.1:8000" in text:
            self.start_server()
        return self.call("sh", "-eu", stdin=self.here(self.answers.filled(text)))

    def compare(self, request: Snippet, shown: Snippet) -> str:
        """Return how the last answer differs from what the page shows; empty if it shows none."""
        if shown.language != "json" or "curl " not in request.text:
            return ""
        try:
            return self.answers.difference(json.loads(shown.text), json.loads(self.said))
        except ValueError:
            return f"the answer is not JSON: {self.said[:500]}"

    @contextmanager
    def workers(self, snippet: Snippet) -> Iterator[None]:
        """Have a worker for requests that list them, and what it declares for those that are about schedules."""
        if "/schedules/" in snippet.text or "rmqschedules" in snippet.text:
            declared = Schedule(
                "daily-report", "reports", {"kind": "sales"}, cron="0 3 * * *", timezone="Europe/Berlin"
            )
            broker = RedisBroker(redis.Redis.from_url(self.redis_url), "")
            broker.run(change_schedule("daily-report", "spec", declared.text))
            Stepper(broker, {"reports": Topic("reports", TopicType.FIXED_TIME, 4, identity="key")}).settle()
            broker.close()
        if "/workers/" not in snippet.text and "/stack/" not in snippet.text:
            yield
            return
        worker = Worker(
            "shop-1:4711", "shop-1", 4711, time.time(), 8, (TopicSlots("price-changes", 64, True),)
        )
        client = redis.Redis.from_url(self.redis_url)
        found = RedisCoordinator(RedisBroker(client, ""), worker, lambda slots: None, lambda slots: None)
        found.start()
        try:
            assert found.wait_settled(30)
            broker = RedisBroker(client, "")
            at_ms, calls = broker.now_ms(), tuple[RunningCall, ...]()
            if "/stack/" in snippet.text:
                sealed = self.sealed("image-renders", 2, b'{"sku":2}')
                calls = (RunningCall("image-renders", sealed, at_ms, 1, "rmq-executor-0"),)
                if "POST" not in snippet.text:
                    broker.run(write_stacks(worker.id, [Stack(sealed, at_ms, at_ms, STACK)]))
            idle: dict[str, Any] = {**dict.fromkeys(("taken", "messages", "running"), 0), "state": "working"}
            whose: dict[str, Any] = {"host": worker.host, "pid": worker.pid, "code": "", "threads": 8}
            report(broker, worker.id, calls=calls, **whose, **idle)
            yield
        finally:
            RedisBroker(client, "").run(delete_reports(worker.id))
            found.stop()
            client.close()

    def sealed(self, topic: str, slot: int, member: bytes) -> str:
        """Return the id by which a worker of the project names a message."""
        script = (
            f"from django_rmq.message_ids import sealed_id\nprint(sealed_id({topic!r}, {slot}, {member!r}))"
        )
        return self.manage("shell", "--command", script).split()[-1]

    def start_server(self) -> None:
        """Let the project answer, as its settings are by now."""
        if self.server is not None:
            return
        self.manage("migrate", "--verbosity", "0")
        self.environment["TOKEN"] = self.manage("drf_create_token", "program").split()[2]
        self.server = subprocess.Popen(
            [*preloaded.python(), "-m", "tests.support.prefork", str(self.port), "1", "4"],
            cwd=self.folder,
            env=self.environment,
        )
        live = ["curl", "--silent", "--fail", f"http://127.0.0.1:{self.port}/api/rmq/health/live"]
        eventually(lambda: subprocess.call(live, stdout=subprocess.DEVNULL) == 0, "the web server", 60)

    def stop_server(self) -> None:
        if self.server is not None:
            self.server.terminate()
            self.server.wait(30)
            self.server = None


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    """A Redis with a database for each page."""
    with RedisServer(databases=100) as found:
        yield found


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory, server: RedisServer) -> Path:
    """A migrated database with a superuser, which each project gets a copy of."""
    folder = tmp_path_factory.mktemp("template")
    made = Project(folder, ROOT / "docs/any.md", server.url)
    made.manage("migrate", "--verbosity", "0")
    made.manage("createsuperuser", "--noinput", "--username", "program", "--email", "p@example.com")
    return folder / "db.sqlite3"


@pytest.fixture(scope="module")
def begin(
    tmp_path_factory: pytest.TempPathFactory, server: RedisServer, database: Path
) -> Iterator[Callable[[Path], Project]]:
    """Begin a project for a page."""
    begun: list[Project] = []

    def begin_one(page: Path) -> Project:
        folder = tmp_path_factory.mktemp("project")
        if page not in FROM_NOTHING:
            shutil.copy(database, folder)
        begun.append(Project(folder, page, f"{server.url.rpartition('/')[0]}/{len(begun) + 1}"))
        return begun[-1]

    yield begin_one
    for project in begun:
        project.stop_server()


@pytest.fixture(scope="module")
def anywhere(begin: Callable[[Path], Project]) -> Project:
    """A project for blocks that are of no page."""
    return begin(ROOT / "docs/any.md")


LONG = {"rest", "spark"}
"""Pages whose blocks take half a minute and more."""
RECIPES = ROOT / "docs/how-to/recipes.md"
"""Each recipe has a project of its own, in ``test_recipes.py``."""
HOME = ROOT / "docs/index.md"
"""Its blocks are those of the README, as ``test_first_steps.py`` checks."""
WITH_SNIPPETS = [page for page in PAGES if snippets(page) and page not in (RECIPES, HOME)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=str(page.relative_to(ROOT)), marks=[pytest.mark.slow] * (page.stem in LONG))
        for page in WITH_SNIPPETS
    ],
)
def test_every_block_of_a_page_works_as_it_stands_there(
    begin: Callable[[Path], Project], page: Path, request: pytest.FixtureRequest
) -> None:
    if "spark" in page.stem:
        request.getfixturevalue("java")
    project, wrong = begin(page), {}
    if page in PREPARED:
        for snippet in snippets(PREPARED[page]):
            if snippet.language == "python":
                wrong[snippet.place] = project.run(snippet)
    following = [*snippets(page)[1:], Snippet(page, 0, "", "")]
    for snippet, after in zip(snippets(page), following, strict=True):
        if snippet.first_line not in NOT_RUN:
            with project.workers(snippet):
                wrong[snippet.place] = project.run(snippet) or project.compare(snippet, after)
    wrong["at the end of the page"] = project.run_scripts()
    project.stop_server()
    wrong = {place: found for place, found in wrong.items() if found}
    assert not wrong, "\n\n".join(f"{place}: {found}" for place, found in wrong.items())


def requests(page: Path) -> set[tuple[str, str]]:
    """Return the method and the path of each request of a page, without its query."""
    found = set()
    for snippet in snippets(page):
        if snippet.language == "sh" and "curl " in snippet.text:
            method = re.search(r"--request (\w+)", snippet.text)
            address = re.search(r"http://127\.0\.0\.1:8000/api/rmq/v1/([^\s\"?]*)", snippet.text)
            assert address and "--header" in snippet.text, snippet.place
            found.add((method[1] if method else "POST" if "--data" in snippet.text else "GET", address[1]))
    return found


def test_the_reference_shows_a_request_of_every_route_and_method() -> None:
    shown = requests(ROOT / "docs/reference/rest.md")
    for route, view in urls.ROUTES.values():
        pattern = re.compile(re.sub(r"<str:\w+>", "[^/]+", route))
        methods = {method for method, path in shown if pattern.fullmatch(path)} - {"OPTIONS"}
        assert methods == {name for name in ("GET", "POST", "DELETE") if hasattr(view, name.lower())}, route
    assert ("GET", "metrics/") in shown


def test_every_answer_is_compared() -> None:
    for page in (ROOT / "docs/reference/rest.md", ROOT / "docs/how-to/rest.md"):
        found = snippets(page)
        for before, snippet in pairwise(found):
            if snippet.language == "json":
                assert "curl " in before.text, snippet.place


@pytest.mark.parametrize(
    ("shown", "given"),
    [
        ({"a": 1}, {"a": 2}),
        ({"a": 1}, {"a": True}),
        ({"a": 1}, {"a": 1, "b": 1}),
        ({"a": 1, "b": 1}, {"a": 1}),
        ({"due_ms": None}, {"due_ms": 1}),
        ({"results": [1]}, {"results": []}),
        ({"results": []}, {"results": [1]}),
        ({"results": [2, 1]}, {"results": [1, 2]}),
        ({"results": [{"a": 1}]}, {"results": [{"a": 2}]}),
    ],
)
def test_an_answer_that_is_not_as_shown_is_found(shown: Any, given: Any) -> None:
    answers = Answers()
    assert answers.difference(shown, given)
    assert not answers.difference(shown, shown) and not answers.difference(given, given)


def test_blocks_are_found_wherever_they_stand() -> None:
    assert len(WITH_SNIPPETS) >= 8
    fences = {page: page.read_text().count("```") for page in PAGES}
    assert fences == {page: 2 * len(snippets(page)) for page in PAGES}


def test_what_is_not_run_is_still_there_and_says_why() -> None:
    first_lines = {snippet.first_line for page in PAGES for snippet in snippets(page)}
    assert NOT_RUN.keys() <= first_lines
    assert all(NOT_RUN.values())


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("python", "import nothing_of_this_name"),
        ("python", "# settings.py\nRMQ['TYPO'] = 1"),
        ("python", "# urls.py\nurlpatterns += [path('', no_view)]"),
        (
            "python",
            "from django.test import SimpleTestCase\nclass T(SimpleTestCase):\n    def test(self): assert 0",
        ),
        ("sh", "manage.py rmqstats --no-such-flag"),
        ("sh", "manage.py runrmqpipeline ingest --no-such-flag"),
        ("sh", "false"),
        ("sh", 'pip install "x[no_such_extra]"'),
        ("sh", "make no-such-target"),
        ("console", "$ false"),
        ("console", "says nothing"),
        ("json", "{"),
        ("yaml", "a: ["),
        ("toml", "="),
        ("ini", "no section"),
        ("text", "$ manage.py rmqstats"),
        ("", "anything"),
        ("cobol", "anything"),
    ],
)  # fmt: skip
def test_a_block_that_is_wrong_is_found(anywhere: Project, language: str, text: str) -> None:
    before = list(anywhere.settings), (anywhere.folder / "urls.py").read_text()
    try:
        assert anywhere.run(Snippet(ROOT / "docs/any.md", 1, language, text)) or anywhere.run_scripts()
    finally:
        anywhere.settings = before[0]
        anywhere.save()
        anywhere.write("urls.py", before[1])
