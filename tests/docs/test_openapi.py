"""The OpenAPI description that the package ships is what the code generates."""

from __future__ import annotations

import re
import sys
from importlib.resources import files

import pytest
import yaml

from django_rmq.api import urls
from tests.support.commands import ROOT, output_of


@pytest.mark.slow
def test_the_shipped_description_is_what_the_code_generates() -> None:
    made = output_of([sys.executable, "docs/site/openapi.py", "--print"])
    assert made == (ROOT / "django_rmq/api/openapi.yaml").read_text(), "run: make openapi"


def test_the_shipped_description_has_every_route_of_version_1() -> None:
    shipped = yaml.safe_load((files("django_rmq.api") / "openapi.yaml").read_text())
    routes = {"/v1/" + re.sub(r"<str:(\w+)>", r"{\1}", route) for route, _ in urls.ROUTES.values()}
    assert set(shipped["paths"]) == routes
    for path in shipped["paths"].values():
        for operation in path.values():
            assert operation["operationId"].startswith("rmq_")
            assert len(operation["summary"]) > 10
