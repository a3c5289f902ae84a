"""What the scripts say of themselves is what they do, and they keep to what Redis allows from 6.2 on."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from importlib import import_module
from inspect import isfunction
from pathlib import Path
from typing import Any

import pytest
import redis

from django_rmq.core import lua
from django_rmq.core.commands import insert
from django_rmq.core.commands.script_call import AtSlots, Call
from django_rmq.core.model.keys import SlotKeys, slot_keys, trash_key
from django_rmq.core.model.replies import Area, CopyReply, Failure
from django_rmq.core.model.topic import Topic, TopicType
from example_project.demo.redis_server import redis_server_binaries
from tests.support.brokers import Methods
from tests.support.servers import RedisServer

PARTS = [name for name in lua.sources() if "/" not in name]
"""The scripts of a slot, and all sections."""
SECTIONS = [name for name in PARTS if "." in name]
TOPIC = Topic("topic", TopicType.PRIORITY, slots=1)

READ_ONLY = {name for name in lua.names() if lua.declaration(name).reads}
OF_MANY_SLOTS = {name for name in lua.names() if lua.declaration(name).many_slots}
READS = {"EXISTS", "HEXISTS", "HGET", "HGETALL", "HLEN", "HMGET", "HSCAN", "HVALS", "PUBSUB", "TIME", "TYPE"} | {
    "ZCARD", "ZCOUNT", "ZMSCORE", "ZRANGE", "ZRANGEBYSCORE", "ZRANK", "ZREVRANGE", "ZREVRANGEBYSCORE", "ZREVRANK",
    "ZSCORE",
}  # fmt: skip
WRITES = {"HDEL", "HINCRBY", "HSET", "HSETNX", "PEXPIRE", "PUBLISH", "RENAME", "UNLINK"} | {
    "ZADD", "ZRANGESTORE", "ZREM", "ZREMRANGEBYRANK",
}  # fmt: skip

# What `..` may join: literals, texts of the caller and of Redis, and what makes a text. Never a number: it would lose
# digits. (`ticket` is prepare's receipt, which counts up from 1 and has the 14 digits of `..` to itself.)
TEXTS = {
    "", "receipt", "ticket", "retries", "store", "alone", "mark", "outlived", "receipt_and_score", "score",
    "highest", "lowest", "key", "head", "kind", "topic_type", "said_by", "wanted", "text", "failure",
    "member", "rest",
}  # fmt: skip
TEXTS |= {
    "ARGV[i]", '(kept or "")', "text_of()", "plain_score()", "string.format()", "string.sub()", "joined()",
    "digests", "outcome_of()",
}  # fmt: skip

# Why each of these ends: the binary search halves, the list shrinks, the index rises to the list's length.
LOOPS = {
    "low < high": "middle = math.floor((low + high) / 2)",
    "#rows > 0 and tonumber(rows[#rows]) < tonumber(lowest)": "rows[#rows], rows[#rows - 1] = nil, nil",
    "#rows > 0 and tonumber(rows[#rows]) > tonumber(highest)": "rows[#rows], rows[#rows - 1] = nil, nil",
    "#rows > 0 and tonumber(rows[#rows]) > latest": "rows[#rows], rows[#rows - 1] = nil, nil",
    "above < #free / 2 and free[above * 2 + 2] ~= score": "above = above + 1",
}


class Source:
    """One script or section: its header, its code without comments, and what it includes."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.text = lua.sources()[name].rstrip("\n") + "\n"
        lines = self.text.split("\n")
        end = next(i for i, line in enumerate(lines) if not line.startswith("--"))
        self.header = [line.removeprefix("--").strip() for line in lines[:end]]
        self.includes = re.findall(r"^-- include: ([\w.]+)$", "\n".join(lines[end:]), re.MULTILINE)
        self.second = re.findall(
            r"^-- include: ([\w.]+) where OUTCOME_RETENTION$", "\n".join(lines[end:]), re.MULTILINE
        )
        code = (re.sub(r" +-- .*", "", line) for line in lines[end:])
        self.code = "\n".join(line for line in code if not line.lstrip().startswith("--"))


def without_strings(code: str) -> str:
    return re.sub(r"'[^']*'", "''", code)


def joined(code: str) -> Iterator[str]:
    """Yield what `..` joins: names, `name()` of a call whatever its arguments, and "" for a literal."""
    code = re.sub(r"'[^']*'", '""', code)
    for match in re.finditer(r"(?<!\.)\.\.(?!\.)", code):
        before, after = code[: match.start()].rstrip(), code[match.end() :].lstrip()
        if before.endswith(")"):
            start = len(before) - 1
            while before.count("(", start) < before.count(")", start):
                start -= 1
            called = re.search(r"[\w.]*$", before[:start])
            yield f"{called[0]}()" if called and called[0] else before[start:]
        else:
            yield re.search(r"""[\w.\[\]"]*$""", before)[0].strip('"')  # type: ignore[index]
        called = re.match(r"""([\w.\[\]"]*)(\(?)""", after)
        assert called
        if called[1]:
            yield called[1].strip('"') + ("()" if called[2] else "")
        else:
            yield after[: after.index(")") + 1]


SCRIPTS = {name: Source(name) for name in lua.names()}
each_script = pytest.mark.parametrize("source", SCRIPTS.values(), ids=SCRIPTS.keys())
each_part = pytest.mark.parametrize("name", PARTS)


class Recorder(Methods):
    """Answers with the call that would be made."""

    def run(self, call: Call[Any]) -> Any:
        return call


def calls_of_every_script() -> dict[str, Call]:
    ask: Any = Recorder()
    members = [b"a", b"b"]
    calls: list[Call] = [
        ask.send_merge(TOPIC, 0, 0, members, [b"x", b"y"]),
        ask.scatter(TOPIC, [0], 0, [b"a"]),
        ask.send_replace(TOPIC, 0, [50, 50], members, [b"x", b"y"]),
        ask.send_fifo(TOPIC, 0, 50, members, [b"x", b"y"], ensure=True),
        ask.ensure(TOPIC, 0, [50, 50], members, [b"x", b"y"]),
        insert.end_insertion(TOPIC, 0),
        ask.put_tick(TOPIC, 0, "nightly", 1, 50, b"a", b"x"),
        ask.retract(TOPIC, 0, "nightly", 2, 50, b"a"),
        ask.acquire(TOPIC, 0),
        ask.acquire_slots(TOPIC, [0]),
        ask.list_held(TOPIC, 0, "A"),
        ask.prepare(TOPIC, 0, "A", 1, 10),
        ask.commit(TOPIC, 0, 1, members),
        ask.commit_delivery(TOPIC, 0, 1, 2, members),
        ask.rollback(TOPIC, 0, 1, [Failure(b"a"), Failure(b"b")]),
        ask.release(TOPIC, 0, 1, members),
        ask.extend(TOPIC, 0, 1, members),
        ask.progress(TOPIC, 0, 1, b"a", 500),
        ask.time_out(TOPIC, 0),
        ask.promote(TOPIC, 0),
        ask.claim(TOPIC, 0, "c", 1, 1_000, 10),
        ask.renew_claim(TOPIC, 0, "c", 1, 1_000),
        ask.ack_claim(TOPIC, 0, "c", 1),
        ask.fail_claimed(TOPIC, 0, "c", 1, [Failure(b"a"), Failure(b"b", "rejected")]),
        ask.return_claim(TOPIC, 0, "c", 1),
        ask.read_claim(TOPIC, 0, "c"),
        ask.replay(TOPIC, 0, members),
        ask.bury(TOPIC, 0, members),
        ask.remove(TOPIC, 0, members),
        ask.discard(TOPIC, 0, [50, 50], members),
        ask.reschedule(TOPIC, 0, [50, 50], members),
        ask.purge(TOPIC, 0, "store"),
        ask.pause(TOPIC, 0),
        ask.configure(TOPIC, 0),
        ask.adopt(TOPIC, 0, 1, 0),
        ask.restore(TOPIC, 0, "act"),
        ask.retire(TOPIC, 0),
        ask.find_orphans(TOPIC, 0, "body"),
        ask.list_messages(TOPIC, 0, "store"),
        ask.search_messages(TOPIC, 0, "store", b"a"),
        ask.group_deaths(TOPIC, 0),
        ask.count(TOPIC, 0),
        ask.count_slots([AtSlots(TOPIC, [0])]),
        ask.count_between(TOPIC, 0, "store"),
        ask.describe_messages(TOPIC, 0, members),
        ask.status(TOPIC, 0, b"a"),
        ask.ranks(TOPIC, 0, "store", members),
        ask.find_by_digest(TOPIC, 0, [b"d" * 20], [Area("store", 50.0, 3), Area("dead")]),
        ask.heads(TOPIC, [0]),
        ask.find_occupied([AtSlots(TOPIC, [0])]),
        ask.find_paused([AtSlots(TOPIC, [0])]),
        ask.audit_ledger(TOPIC, 0),
        ask.shut(TOPIC, 0, 1),
        ask.reopen(TOPIC, 0, 1),
        ask.reslot_progress(TOPIC, 0),
        ask.move_out(TOPIC, 0, 1, 0, [("store", b"a")]),
        ask.move_in(TOPIC, 0, 1, 0, 1, [CopyReply("store", b"a", "50")]),
    ]
    return {call.script: call for call in calls}


CALLS = calls_of_every_script()
MODULES = [import_module(f"django_rmq.core.commands.{name}") for name in (
    "ack", "claims", "fetch", "insert", "inspect", "limits", "membership", "operate", "reports", "reslot", "send",
    "stored_actions", "stored_results", "ticks",
)]  # fmt: skip


def test_each_script_of_a_slot_is_run_by_the_command_of_its_name() -> None:
    functions = {
        name
        for module in MODULES
        for name, function in vars(module).items()
        if isfunction(function) and function.__module__ == module.__name__ and not name.startswith("_")
    }
    assert functions >= set(lua.names()) == set(CALLS)


def test_a_script_of_a_slot_is_in_the_file_named_like_the_module_of_its_command() -> None:
    for file, text in lua.texts().items():
        folder, _, subject = file.rpartition("/")
        for name, _ in lua.parts(file, text) if folder else []:
            if "." not in name:
                module = import_module(f"django_rmq.core.commands.{subject}")
                assert getattr(module, name).__module__ == module.__name__


@each_script
def test_a_header_begins_with_one_sentence_and_says_what_is_returned(source: Source) -> None:
    assert re.fullmatch(r"[A-Z].*\.", source.header[0])
    assert source.header[1] in {"", "Changes nothing."}
    assert any(line.startswith("Returns ") for line in source.header)


@each_script
def test_a_call_has_the_arguments_that_the_header_declares(source: Source) -> None:
    declared, arguments = lua.declaration(source.name), CALLS[source.name].arguments("")
    if declared.rest:
        assert len(arguments) > len(declared.arguments)
    else:
        assert len(arguments) == len(declared.arguments)


@each_script
def test_a_call_hands_over_the_very_keys_that_the_header_names(source: Source) -> None:
    act = "act" if source.name == "restore" else ""
    keys = {**slot_keys("", TOPIC.name, 0)._asdict(), "trash": trash_key("", TOPIC.name, 0, act)}
    # list_messages and search_messages look into the state that they are asked for: here store and what belongs to it.
    names = {"set": "store", "records": "failures"}
    wanted = [keys[names.get(key.name, key.name)] for key in lua.declaration(source.name).keys]
    assert list(CALLS[source.name].keys("")) == wanted


@each_script
def test_keys_and_fixed_arguments_are_read_by_their_names_only(source: Source) -> None:
    assert "KEYS" not in source.code
    assert not re.search(r"ARGV\[[\d#]", source.code)


@each_script
def test_every_declared_key_and_argument_is_used(source: Source) -> None:
    declared, text = lua.declaration(source.name), lua.load(source.name).text.decode()
    bindings = declared.bindings()
    code = text.removeprefix("\n".join(bindings))
    names = {word for line in bindings for word in re.findall(r"\w+", line.partition(" = ")[0])} - {"local"}
    assert {name for name in names if not re.search(rf"\b{name}\b", code)} <= {"first", "last", "now"}


@each_part
def test_variable_arguments_are_read_between_first_and_last_only(name: str) -> None:
    code = Source(name).code
    forms = {
        *("#ARGV > first + n", "#ARGV > first + 2 * n", "unpack(ARGV, first, last)"),
        *(
            "ARGV[i]", "ARGV[i + 1]", "ARGV[i + 2]", "ARGV[i + 3]", "ARGV[i + 4]", "ARGV[first + i - 1]",
            "ARGV[envelope + i - 1]", "ARGV[envelope]", "ARGV[first]", "ARGV[first + 1]",
        ),
        *("ARGV[first + 2 * i - 2]", "ARGV[first + 2 * i - 1]"),
    }  # fmt: skip
    rest = code
    for form in sorted(forms, key=len, reverse=True):
        rest = rest.replace(form, "")
    assert "ARGV" not in rest


@each_script
def test_the_types_that_a_header_names_are_looked_at_before_anything_else(source: Source) -> None:
    text = lua.load(source.name).text.decode()
    checked: dict[str, str] = {}
    for wanted, key in re.findall(r"mistyped\('(zset|hash)', ([^)]*)\)", text):
        checked[key] = wanted.upper()
    if source.name == "count_slots":
        # It leaves out a slot with a foreign key, and counts the others.
        assert checked == {key.name: key.type for key in lua.declaration("count_slots").keys}
        return
    if source.name in OF_MANY_SLOTS:
        assert checked == {}
        looking = source.code.partition("if known.err then return '', 'look' end")[0]
        # EXISTS takes keys of any type.
        looking = looking.replace("redis.call('EXISTS'", "")
        assert "redis.call" not in looking, "other slots are answered for whatever a key of one holds"
        return
    if source.name == "insert":
        # What has other types is declined, and sent by a script that names them.
        assert checked == {"store": "ZSET", "retry": "ZSET", "failures": "HASH", "stats": "HASH"}
        assert "if known.err then return false end\n  if mistyped" in source.code
        return
    # A push looks whether these exist, and nothing else of a send touches them.
    untouched = {
        "send_fifo": {"inflight"},
        "send_merge": {"prepare", "inflight"},
        "send_replace": {"prepare", "inflight"},
    }
    left = untouched.get(source.name, set())
    assert checked == {
        key.name: key.type for key in lua.declaration(source.name).keys if key.name not in left
    }
    head, check, _ = source.text.partition("\n-- check: types")
    assert check
    assert "redis.call" not in head


def test_the_short_way_of_a_send_looks_at_every_key_before_it_writes() -> None:
    for name in ("send_fifo", "send_merge", "send_replace"):
        text = lua.load(name).text.decode()
        # It wakes the worker after the write.
        text = re.sub(r"(?ms)^local function wake.*?^end$", "", text)
        pushes = re.search(r"(?ms)^local WARM_US.*?^end$", text)
        assert pushes
        looking, counts, _ = pushes[0].partition("redis.pcall('HINCRBY', stats, 'prepared', '1')")
        assert counts, "HINCRBY itself changes nothing where the ledger is no HASH"
        assert set(re.findall(r"redis\.p?call\('(\w+)'", looking)) <= READS, "it writes where nothing is"
        text = text.replace(pushes[0], "")
        before, short, _ = text.partition("redis.pcall('ZADD', store, 'NX'")
        assert short, "ZADD itself changes nothing where Store is no ZSET or the member waits"
        assert set(re.findall(r"redis\.call\('(\w+)'", before)) <= {"TIME"}
        looks = re.findall(r"redis\.pcall\('(\w+)', (\w+)", before)
        assert {command for command, _ in looks} <= READS
        # EXISTS says nothing of a type: what it finds is looked at by another.
        assert {key for command, key in looks if command != "EXISTS"} == {"control", "retry", "body", "stats"}


def test_each_key_is_declared_once() -> None:
    declared = {file: re.findall(r"^-- KEY (\w+)", text, re.MULTILINE) for file, text in lua.texts().items()}
    assert sorted(declared["slot/_keys"]) == sorted([*SlotKeys._fields, "trash", "set", "records"])
    assert len(lua.key_types()) == sum(map(len, declared.values()))


@each_part
def test_commands_are_named_literally_and_known_to_redis_6_2(name: str) -> None:
    code = Source(name).code
    commands = re.findall(r"redis\.p?call\('([A-Z]+)'", code)
    assert len(commands) == len(re.findall(r"redis\.p?call", code))
    assert set(commands) <= READS | WRITES
    others = set(re.findall(r"redis\.(\w+)", code)) - {"call", "pcall"}
    assert others <= {"error_reply", "sha1hex"}


def test_scripts_that_look_write_nothing_and_the_others_do() -> None:
    writing = set()
    for name in lua.names():
        if set(re.findall(r"redis\.p?call\('([A-Z]+)'", lua.load(name).text.decode())) & WRITES:
            writing.add(name)
    assert writing == set(lua.names()) - READ_ONLY


@each_part
def test_numbers_become_text_without_losing_a_digit(name: str) -> None:
    code = Source(name).code
    assert "tostring" not in code
    assert "cjson" not in code
    assert [operand for operand in joined(code) if operand not in TEXTS] == []


def test_the_search_for_lossy_texts_finds_one() -> None:
    assert list(joined("local a = 'x ' .. number\nlocal b = f(1) .. ''")) == ["", "number", "f()", ""]
    assert not {"number", "f()"} & TEXTS


@each_part
def test_nothing_depends_on_chance_the_machine_or_a_newer_redis(name: str) -> None:
    code = without_strings(Source(name).code)
    assert not re.search(r"math\.random|\bos\.|\bio\.|\bloadstring\b|\brequire\b|redis\.(setresp|log)", code)


@each_part
def test_every_loop_ends(name: str) -> None:
    code = Source(name).code
    assert not re.search(r"\brepeat\b|\bgoto\b", code)
    for header in re.findall(r"^\s*while (.*) do$", code, re.MULTILINE):
        assert LOOPS[header] in code
    assert len(re.findall(r"\bwhile\b", code)) == len(re.findall(r"^\s*while .* do$", code, re.MULTILINE))
    for header in re.findall(r"\bfor (.*) do\b", code):
        assert re.fullmatch(r"\w+ = [^,]+, .+|[\w, ]+ in i?pairs\(.+\)", header), header


@each_part
def test_no_statement_hides_in_a_long_line(name: str) -> None:
    assert max(map(len, lua.sources()[name].split("\n"))) <= 130


def test_sections_exist_are_used_and_include_no_others() -> None:
    used = {name for source in SCRIPTS.values() for name in (*source.includes, *source.second)}
    assert used | {"_basics.mistyped"} == set(SECTIONS)
    for name in SECTIONS:
        assert Source(name).includes == []


def test_a_section_that_defines_one_function_has_its_name() -> None:
    for name in SECTIONS:
        functions = re.findall(r"^local function (\w+)", Source(name).code, re.MULTILINE)
        if len(functions) == 1:
            assert name.partition(".")[2] == functions[0]


@each_script
def test_a_loaded_script_holds_each_section_as_often_as_it_includes_it_and_no_comment(
    source: Source,
) -> None:
    text = lua.load(source.name).text.decode()
    assert "--" not in text
    for name in source.includes:
        code = re.sub(r"\n+", "\n", Source(name).code).strip()
        assert text.count(code) == source.includes.count(name)


def test_the_sha_is_the_one_that_redis_computes(redis_client: redis.Redis) -> None:
    for name in lua.names():
        script = lua.load(name)
        assert redis_client.script_load(script.text).encode() == script.sha


KNOWN_GLOBALS = {"redis", "string", "math", "KEYS", "ARGV", "tonumber", "type", "ipairs", "pairs", "unpack"}
GETGLOBAL, SETGLOBAL = 5, 7


class Bytecode:
    """Reads what `string.dump` of Lua 5.1 writes, as far as it takes to know which globals a chunk uses."""

    def __init__(self, dump: bytes) -> None:
        assert dump[:5] == b"\x1bLua\x51"
        self.dump, self.at = dump, 12
        self.read: set[str] = set()
        self.written: set[str] = set()
        self.function()
        assert self.at == len(dump)

    @classmethod
    def of(cls, code: bytes | str, client: redis.Redis) -> Bytecode:
        """Let Redis compile some code."""
        dump = client.eval("return string.dump(loadstring(ARGV[1]))", 0, code)
        assert isinstance(dump, bytes)
        return cls(dump)

    def take(self, layout: str) -> Any:
        (value,) = struct.unpack_from(f"<{layout}", self.dump, self.at)
        self.at += struct.calcsize(f"<{layout}")
        return value

    def text(self) -> str:
        size = self.take("Q")
        self.at += size
        return self.dump[self.at - size : self.at - 1].decode() if size else ""

    def constant(self) -> object:
        match self.take("b"):
            case 0:
                return None
            case 1:
                return self.take("b")
            case 3:
                return self.take("d")
            case _:
                return self.text()

    def function(self) -> None:
        self.text()
        self.at += 4 + 4 + 4
        code = [self.take("I") for _ in range(self.take("I"))]
        constants = [self.constant() for _ in range(self.take("I"))]
        for instruction in code:
            if instruction & 0x3F in (GETGLOBAL, SETGLOBAL):
                names = self.read if instruction & 0x3F == GETGLOBAL else self.written
                names.add(str(constants[instruction >> 14]))
        for _ in range(self.take("I")):
            self.function()
        lines = self.take("I")
        self.at += 4 * lines
        for _ in range(self.take("I")):
            self.text()
            self.at += 8
        for _ in range(self.take("I")):
            self.text()


@each_script
def test_a_script_reads_no_unknown_global_and_writes_none(source: Source, redis_client: redis.Redis) -> None:
    chunk = Bytecode.of(lua.load(source.name).text, redis_client)
    assert chunk.read <= KNOWN_GLOBALS
    assert chunk.written == set()


@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_reads_what_it_says_that_it_needs_and_nothing_else(
    name: str, redis_client: redis.Redis
) -> None:
    source = Source(name)
    needs = re.findall(r"\w+", " ".join(re.findall(r"^-- needs: (.*)$", source.text, re.MULTILINE)))
    own = re.findall(r"^-- (?:keys|arguments): (.*)$", source.text, re.MULTILINE)
    needs += re.findall(r"[a-z]\w*", " ".join(own))
    assert len(needs) == len(set(needs))
    assert Bytecode.of(source.code, redis_client).read - KNOWN_GLOBALS == set(needs)


SECOND_FORMS = [name for name in lua.all_names() if name.endswith(lua.SECOND)]


@pytest.mark.parametrize("name", SECOND_FORMS)
def test_the_second_form_of_a_script_adds_its_section_and_what_that_declares(
    name: str, redis_client: redis.Redis
) -> None:
    first, second = lua.declaration(name.removesuffix(lua.SECOND)), lua.declaration(name)
    assert [key.name for key in second.keys] == [
        *(key.name for key in first.keys),
        "outcomes",
        "outcome_times",
        "delivery_outcomes",
    ]
    assert [each.name for each in second.arguments] == [
        "outcome_retention_ms",
        *(each.name for each in first.arguments),
    ]
    text = lua.load(name).text.decode()
    assert "mistyped('zset', " in text
    assert "mistyped('zset', outcome_times)" in text
    assert "mistyped('zset', delivery_outcomes)" in text
    chunk = Bytecode.of(text, redis_client)
    assert chunk.read <= KNOWN_GLOBALS
    assert chunk.written == set()


@pytest.mark.parametrize("name", SECOND_FORMS)
def test_the_first_form_of_a_script_touches_no_key_of_the_second(name: str) -> None:
    text = lua.load(name.removesuffix(lua.SECOND)).text.decode()
    assert not re.search(r"\b(outcomes|outcome_times|delivery_outcomes|outcome_retention_ms|sha1hex)\b", text)


def test_a_topic_without_outcome_retention_uses_the_first_forms() -> None:
    assert not any(call.script.endswith(lua.SECOND) for call in CALLS.values())


def test_a_misspelt_name_shows_as_a_global(redis_client: redis.Redis) -> None:
    chunk = Bytecode.of("local a = 1\nfunction f() b = aa end", redis_client)
    assert (chunk.read, chunk.written) == ({"aa"}, {"b", "f"})


@pytest.mark.parametrize("binary", redis_server_binaries(), ids=str)
def test_every_server_of_this_machine_loads_every_script(binary: Path) -> None:
    with RedisServer(binary=binary) as server, redis.Redis(port=server.port) as client:
        for name in lua.names():
            script = lua.load(name)
            assert client.script_load(script.text).encode() == script.sha
