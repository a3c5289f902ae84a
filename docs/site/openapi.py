"""The OpenAPI description of the REST API, from the code: django_rmq/api/openapi.yaml.

    python docs/site/openapi.py           writes it (`make openapi`)
    python docs/site/openapi.py --print   prints it

It is that of a project with token authentication and nothing else. A test says if the file is not what this
writes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import django
from django.conf import settings

FILE = Path(__file__).parents[2] / "django_rmq/api/openapi.yaml"
HEAD = "# Written by `make openapi` from the code of django_rmq.api. Do not edit it by hand.\n"
ABOUT = """\
Topics, messages and two-phase consumption of django-redis-rmq, a message queue for Django in Redis.

The paths are below the one at which the project's urls.py includes `django_rmq.api.urls`, such as
`https://shop.example.com/api/rmq`. The project decides how clients authenticate. This document shows the tokens of
Django REST framework: `Authorization: Token ...`.

Version 1 may get more routes, optional parameters, fields of answers and error codes. Clients must ignore fields
that they do not know.
"""


def generated() -> str:
    """Return the description as YAML. Raises if it is no OpenAPI, or if something in it had to be guessed."""
    settings.configure(
        INSTALLED_APPS=["django.contrib.auth", "django.contrib.contenttypes", "rest_framework", "django_rmq"],
        ROOT_URLCONF="django_rmq.api.urls",
        USE_I18N=False,
        REST_FRAMEWORK={
            "DEFAULT_AUTHENTICATION_CLASSES": ["rest_framework.authentication.TokenAuthentication"],
            "DEFAULT_SCHEMA_CLASS": "drf_spectacular.openapi.AutoSchema",
        },
        RMQ={"BROKER": "memory"},
        SPECTACULAR_SETTINGS={
            "TITLE": "django-redis-rmq",
            "DESCRIPTION": ABOUT,
            "VERSION": "1",
            "ENUM_GENERATE_CHOICE_DESCRIPTION": False,
            "LICENSE": {"name": "MIT"},
            "SERVERS": [{"url": "/api/rmq", "description": "Where urls.py includes django_rmq.api.urls"}],
        },
    )
    django.setup()
    from drf_spectacular.drainage import GENERATOR_STATS
    from drf_spectacular.generators import SchemaGenerator
    from drf_spectacular.renderers import OpenApiYamlRenderer
    from drf_spectacular.validation import validate_schema

    schema = SchemaGenerator().get_schema(public=True)
    validate_schema(schema)
    if GENERATOR_STATS:
        GENERATOR_STATS.emit_summary()
        raise SystemExit("The description of the API has gaps.")
    return HEAD + OpenApiYamlRenderer().render(schema).decode()


if __name__ == "__main__":
    if "--print" in sys.argv:
        sys.stdout.write(generated())
    else:
        FILE.write_text(generated())
