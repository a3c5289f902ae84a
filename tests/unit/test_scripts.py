"""What the loader makes of headers, fragments and comments."""

from __future__ import annotations

import hashlib
import re

import pytest

from django_rmq.core import lua
from django_rmq.core.commands.script_call import signature
from django_rmq.core.lua import Argument, HeaderError, Key
from django_rmq.core.lua.header import parse
from tests.oracle.slot import GATE
from tests.oracle.upkeep import CLAIM_LARGE, CLAIM_LARGE_STEP_BYTES, CLAIM_STEP_BYTES

HEADER = ["KEYS store", "ARGV[1] now"]
TYPES = {"store": "ZSET", "retry": "ZSET", "body": "HASH", "control": "HASH"}


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The texts of the Lua files, by name."""
    keys = "".join(f"-- KEY {name} {kind}\n" for name, kind in TYPES.items())
    found: dict[str, str] = {
        "slot/_keys": keys,
        "_basics": "-- section: mistyped\n-- Types.\nlocal function mistyped() end\n",
    }
    monkeypatch.setattr(lua, "texts", lambda: found)
    for name in ("sources", "key_types", "load", "declaration"):
        monkeypatch.setattr(lua, name, getattr(lua, name).__wrapped__)
    return found


def script(name: str, *code: str) -> str:
    return "\n".join([f"-- script: {name}", "-- Do it.", *(f"-- {line}" for line in HEADER), "", *code, "\n"])


def test_a_header_tells_keys_and_arguments() -> None:
    declared = lua.declaration("rollback")
    assert declared.script == "rollback"
    assert declared.keys[:3] == (Key("store", "ZSET"), Key("prepare", "ZSET"), Key("inflight", "HASH"))
    assert declared.arguments[:3] == (
        Argument("channel"),
        Argument("slot_capacity", "NUMBER"),
        Argument("topic_type"),
    )
    assert (declared.rest, declared.many_slots) == ("failures", False)


def test_a_header_tells_keys_of_many_slots() -> None:
    heads = lua.declaration("heads")
    assert heads.many_slots
    assert [key.name for key in heads.keys] == ["store", "retry", "prepare", "control", "claimants"]
    assert {key.name for key in heads.keys if key.type == "HASH"} == {"control"}


def test_the_oracle_has_the_bounds_of_the_scripts() -> None:
    claims = lua.sources()["claims.leases"]
    assert (
        f"STEP_BYTES, LARGE, LARGE_STEP_BYTES = {CLAIM_STEP_BYTES}, {CLAIM_LARGE}, {CLAIM_LARGE_STEP_BYTES}\n"
        in claims
    )
    for text in re.findall(r"\bGATE = .*|\bNEVER, GATE = .*", lua.texts()["slot/_sleep"]):
        assert text.endswith((f" {GATE}", f" '{GATE}'"))


def test_every_script_has_a_declaration() -> None:
    for name in lua.all_names():
        assert lua.declaration(name).keys and signature(name).keys


def test_keys_and_arguments_become_locals() -> None:
    arguments = ["ARGV[1] limit NUMBER", "ARGV[2] apply FLAG", "ARGV[3...] members", "ARGV[#ARGV] now"]
    assert parse("x", ["KEYS store", "body", "", *arguments], TYPES).bindings() == [
        "local store, body = unpack(KEYS)",
        "local limit, apply = unpack(ARGV, 1, 2)",
        "limit, apply = tonumber(limit), apply == '1'",
        "local first, last, now = 3, #ARGV - 1, ARGV[#ARGV]",
    ]
    assert parse("x", ["KEYS store control of each slot", "ARGV[1] now"], TYPES).bindings() == [
        "local slots_keys = KEYS",
        "local now = unpack(ARGV)",
    ]


@pytest.mark.parametrize(
    "lines",
    [
        ["KEYS stores", "ARGV[1] now"],
        ["KEYS store of slots", "ARGV[1] now"],
        ["KEYS store", "ARGV[2] now"],
        ["KEYS store", "ARGV[1] kind"],
        ["KEYS store", "ARGV[1] now", "ARGV[2] kind"],
        ["KEYS store", "ARGV[1...] members", "ARGV[2] kind"],
        ["KEYS store store", "ARGV[1] now"],
        ["ARGV[1] now"],
        ["KEYS store", "ARGV[1] now", "check: types"],
    ],
)
def test_a_wrong_header_is_refused_with_the_name_of_its_script(lines: list[str]) -> None:
    with pytest.raises(HeaderError, match=r"workers/x: "):
        parse("workers/x", lines, TYPES)


def test_a_script_has_its_file_before_its_name_only_where_it_belongs_to_no_slot(
    files: dict[str, str],
) -> None:
    files["slot/send"] = "-- Sends.\n\n" + script("one", "return 1") + script("two", "return 2")
    files["workers"] = script("one", "return 3")
    assert [lua.load(name).text[-1:] for name in ("one", "two", "workers/one")] == [b"1", b"2", b"3"]


def test_a_section_is_refused_where_what_it_needs_is_not_bound_before(files: dict[str, str]) -> None:
    files["slot/send"] = (
        script("early", "-- include: send.write", "local clock = 1")
        + script("right", "local clock = 1", "-- include: send.write")
        + "-- section: write\n-- needs: store clock\nlocal function write() return store, clock end\n"
    )
    with pytest.raises(HeaderError, match=r"early: send\.write needs clock, bound before it is included"):
        lua.load("early")
    assert b"function write()" in lua.load("right").text


def test_what_a_section_may_do_without_is_nil(files: dict[str, str]) -> None:
    files["slot/send"] = (
        script("without", "-- include: send.write")
        + script("with", "local claim = 1", "-- include: send.write")
        + "-- section: write\n-- needs: store [claim]\nlocal function write() return store, claim end\n"
    )
    assert b"\nlocal claim\nlocal function write()" in lua.load("without").text
    assert b"\nlocal claim\n" not in lua.load("with").text


def test_a_script_includes_the_sections_that_it_names_and_no_others(files: dict[str, str]) -> None:
    files["slot/_write"] = (
        "-- Writes.\n\n-- section: first\n-- Once.\n--\n-- needs: store\n\nlocal a = store\n\n"
        "-- section: second\n-- Twice.\n--\n-- needs: a\n\nlocal b = a\n"
    )
    files["slot/send"] = (
        script("one", "-- include: _write.first")
        + script("both", "-- include: _write.first", "local c = 1", "-- include: _write.second")
        + script("early", "-- include: _write.second")
    )
    assert lua.load("one").text.endswith(b"\nlocal a = store")
    assert lua.load("both").text.endswith(b"\nlocal a = store\nlocal c = 1\nlocal b = a")
    with pytest.raises(HeaderError, match=r"early: _write\.second needs a, bound before"):
        lua.load("early")


def test_an_include_that_names_no_section_is_refused(files: dict[str, str]) -> None:
    files["slot/send"] = script("x", "-- include: send.third")
    with pytest.raises(HeaderError, match=r"no 'send\.third' among the scripts and sections"):
        lua.load("x")


def test_redis_gets_no_comments(files: dict[str, str]) -> None:
    files["slot/x"] = script("x", "", "-- Why.", "return store -- rule: which", "  -- Because.")
    loaded = lua.load("x")
    assert loaded.text == b"local store = unpack(KEYS)\nlocal now = unpack(ARGV)\nreturn store"
    assert loaded.sha == hashlib.sha1(loaded.text).hexdigest().encode()


def test_types_are_looked_at_but_of_those_that_are_left_out(files: dict[str, str]) -> None:
    header = "-- Do it.\n-- KEYS store body\n-- ARGV[1] now\n\n"
    files["slot/x"] = (
        f"-- script: all\n{header}-- check: types\n\n-- script: but\n{header}-- check: types but body\n"
    )
    every, but = lua.load("all").text, lua.load("but").text
    assert b"local wrong = mistyped('zset', store)\n" in every
    assert b"local wrong = mistyped('zset', store)\n" in but and b"body)" not in but


def test_types_of_keys_that_most_slots_do_not_have_are_looked_at_where_one_exists(
    files: dict[str, str],
) -> None:
    files["slot/x"] = "-- script: x\n-- Do it.\n-- KEYS store body retry\n-- ARGV[1] now\n\n-- check: types\n"
    assert (
        b"local unusual = redis.call('EXISTS', body, retry) > 0\n"
        b"if unusual and not wrong then wrong = mistyped('hash', body) or mistyped('zset', retry) end\n"
    ) in lua.load("x").text
