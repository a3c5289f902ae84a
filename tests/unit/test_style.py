"""The words that texts avoid are found where people read them, and wrapping changes no text."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import style


@pytest.mark.parametrize(
    "line",
    [
        "A duty failed and is begun anew.",
        "Redis is away.",
        "- Was Redis away, it is sent again.",
        "Wait. Is a slot full, the send is refused.",
        "It holds so many messages.",
        "Whoever asks is answered.",
        "| it tells the time | 1 |",
        "> nobody may do this",
    ],
)
def test_a_word_that_texts_avoid_is_found(line: str) -> None:
    (found,) = style.findings(f"# Title\n\n{line}\n", wrapped=True)
    assert found[0] == 3


@pytest.mark.parametrize(
    "text",
    [
        "`anew` is a name",
        "```text\nRedis is away\n```",
        "two things that one can tell apart",
        "[a page](anew.md)",
        "If a slot is full, the send is refused.",
        "Is it well? See below.",
    ],
)
def test_code_addresses_and_plain_words_are_left_alone(text: str) -> None:
    assert list(style.findings(text, wrapped=True)) == []


def test_a_long_line_is_found_where_lines_are_wrapped() -> None:
    line = "word " * 30
    assert [number for number, _ in style.findings(line, wrapped=True)] == [1]
    assert list(style.findings(line, wrapped=False)) == []
    assert list(style.findings(f"| {line} |", wrapped=True)) == []


def test_wrapping_changes_nothing_but_the_ends_of_lines() -> None:
    table = f"<!-- table -->\nmachine: {'word ' * 30}\n<!-- end -->"
    text = (
        f"# Title\n\n{'word ' * 30}\nand `code that has blanks` more\n\n- item {'word ' * 30}\n  goes on\n- second\n\n"
        f"```sh\n{'code ' * 30}\n```\n\n| {'cell ' * 30} |\n\n{table}\n\n{'after ' * 30}\n"
    )
    wrapped = style.rewrapped(text)
    assert wrapped.split() == text.split()
    assert style.rewrapped(wrapped) == wrapped
    assert list(style.findings(wrapped, wrapped=True)) == []
    assert f"```sh\n{'code ' * 30}\n```" in wrapped


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("a.py", 'def f(x):\n    raise ValueError(f"{x} is no number")', 2),
        ("a.py", 'logger.warning("Redis is away (%s)", error)', 1),
        ("a.py", 'help = (\n    "Send messages, "\n    "whoever has sent them before"\n)', 2),
        ("a.py", 'parser.add_argument("--topic", help="at most so many messages")', 1),
        ("a.py", 'DETAIL = {"gone": _("not there any more")}', 1),
        ("a.py", 'def f():\n    """Begin anew."""', 2),
        ("a.html", '<p>\n{% translate "Nobody is here." %}</p>', 2),
        ("a.html", '<p\n class="x" aria-label="{% translate "Nobody" %}"></p>', 2),
        ("a.html", "{% if a %}\n<b>{{ count }}</b> by now{% endif %}", 2),
        ("a.lua", "-- Answers.\nlocal a = 1 -- whoever asks", 2),
    ],
)
def test_a_word_is_found_in_what_a_program_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, line: int
) -> None:
    monkeypatch.setattr(style, "ROOT", tmp_path)
    (tmp_path / "django_rmq").mkdir()
    (tmp_path / "django_rmq" / name).write_text(text)
    (found,) = [
        (path.name, start + number - 1)
        for path, start, said, avoided in style.texts()
        for number, _ in style.findings(said, avoided=avoided)
    ]
    assert found == (name, line)


def test_code_and_names_of_a_program_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(style, "ROOT", tmp_path)
    (tmp_path / "django_rmq").mkdir()
    (tmp_path / "django_rmq/a.py").write_text('told = {"told": 1}\nraise ValueError(f"{told} is missing")\n')
    (tmp_path / "django_rmq/a.html").write_text('<p class="nobody {{ told }}">{% if told %}ok{% endif %}</p>')
    (tmp_path / "django_rmq/a.lua").write_text("local whoever = 1 -- The caller.\n")
    assert not [
        found for *_, said, avoided in style.texts() for found in style.findings(said, avoided=avoided)
    ]
