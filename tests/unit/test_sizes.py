from __future__ import annotations

from tests.sizes import Size, complaints

ROOM = Size("room.py", "lines", 301)
KEY = "room.py, lines"


def test_what_is_too_large_is_named_with_its_limit() -> None:
    assert list(complaints([ROOM], {})) == ["room.py: 301 lines, at most 300"]
    assert list(complaints([ROOM._replace(size=300)], {})) == []


def test_an_exception_holds_for_its_size_alone() -> None:
    assert list(complaints([ROOM], {KEY: {"size": 301}})) == []
    (grown,) = complaints([ROOM._replace(size=302)], {KEY: {"size": 301}})
    assert grown == "room.py: 302 lines, and its exception says 301"
    (needless,) = complaints([ROOM._replace(size=300)], {KEY: {"size": 301}})
    assert needless == "room.py, lines: an exception that is not needed any more"
