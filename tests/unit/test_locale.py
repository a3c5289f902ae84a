"""The texts of the admin in English and Chinese: all there, none too many, and compiled from what is read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from babel.messages.catalog import Catalog
from babel.messages.extract import extract_python
from babel.messages.mofile import read_mo
from babel.messages.pofile import read_po
from django.utils.translation.template import templatize

import django_rmq

PACKAGE = Path(django_rmq.__file__).parent
LANGUAGES = ("en", "zh_Hans")
KEYWORDS: dict[str, Any] = {
    "_": None, "gettext": None, "gettext_lazy": None, "gettext_noop": None, "ngettext": (1, 2),
    "ngettext_lazy": (1, 2), "pgettext": ((1, "c"), 2), "pgettext_lazy": ((1, "c"), 2),
}  # fmt: skip

Text = tuple[str | None, str]
"""Context and (singular) text."""


def catalog(language: str, kind: str) -> Catalog:
    path = PACKAGE / "locale" / language / "LC_MESSAGES" / f"django.{kind}"
    with path.open("rb") as file:
        return read_po(file, locale=language) if kind == "po" else read_mo(file)


def texts_of(source: Path) -> Iterator[Text]:
    text = source.read_text()
    if source.suffix == ".html":
        text = templatize(text, origin=str(source))
    found: Any = extract_python(BytesIO(text.encode()), KEYWORDS, (), {})
    for _, function, message, _ in found:
        parts = [message] if isinstance(message, str) else message
        if function in ("pgettext", "pgettext_lazy"):
            yield str(parts[0]), str(parts[1])
        elif function in KEYWORDS:
            yield None, str(parts[0])


def translations(found: Catalog) -> dict[Text, list[str]]:
    """Return each text with its translation, or one for each plural form."""
    return {(context(one), listed(one.id)[0]): listed(one.string) for one in found if one.id}


def context(message: Any) -> str | None:
    # Read from a compiled catalogue it is bytes.
    return message.context.decode() if isinstance(message.context, bytes) else message.context


def listed(text: Any) -> list[str]:
    return [text] if isinstance(text, str) else list(text or [""])


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_text_is_in_the_catalogue_and_no_other(language: str) -> None:
    sources = [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.html")]
    wanted = {text for source in sources for text in texts_of(source)}
    assert len(wanted) > 200
    assert wanted == set(translations(catalog(language, "po")))


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_text_is_translated_with_its_placeholders(language: str) -> None:
    found = catalog(language, "po")
    assert not [message.id for message in found if message.id and message.fuzzy]
    for (_, text), forms in translations(found).items():
        for form in forms:
            assert form, text
            names = [sorted(set(re.findall(r"%\(\w+\)[sd]", each))) for each in (text, form)]
            assert names[0] == names[1], text


@pytest.mark.parametrize("language", LANGUAGES)
def test_what_is_compiled_is_what_is_written(language: str) -> None:
    assert translations(catalog(language, "mo")) == translations(catalog(language, "po"))
