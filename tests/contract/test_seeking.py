"""Digests, ranks, searches by class and groups by error: a message is found by what an id may say of it, and by nothing else."""

from __future__ import annotations

import math
import random
from hashlib import sha1
from typing import Any

import pytest

from django_rmq.core.model.replies import Area, DeadGroup
from django_rmq.core.model.topic import TopicType
from django_rmq.exceptions import ServerRefused
from tests.contract.slots import CONSTANT, Make, Slot


def look(slot: Slot, member: bytes, *areas: Area, **bounds: int) -> Any:
    """Look for one member by its digest alone."""
    return slot.find_by_digest([digest(member)], list(areas), **bounds)


def digest(member: bytes) -> bytes:
    return sha1(member, usedforsecurity=False).digest()


def test_ranks_are_those_among_equal_scores(make_slot: Make) -> None:
    slot = make_slot()
    slot.fill({b"a": 50, b"b": 50, b"c": 50, b"d": 60, b"e": 20.5, b"\xff": 60, b"": math.inf})
    asked = [b"c", b"a", b"d", b"e", b"\xff", b"", b"nobody"]
    assert slot.ranks("store", asked) == [2, 0, 0, 0, 1, 0, None]
    assert slot.ranks("dead", [b"a"]) == [None] and slot.ranks("store", []) == []
    with pytest.raises(ServerRefused):
        slot.ranks("store", [b"m"] * 1_001)


def test_a_member_is_found_at_its_place_by_its_digest_alone(make_slot: Make) -> None:
    slot = make_slot()
    members = [b"%03d" % n for n in range(300)]
    slot.fill(dict.fromkeys(members, 50.0) | {b"other": 40.0})
    before = slot.snapshot()
    for rank in (0, 1, 150, 298, 299):
        sought = look(slot, members[rank], Area("store", 50, rank), scan=1)
        assert sought.members == [members[rank]]
    assert look(slot, b"other", Area("store", 50, 0)).members == [None]
    assert look(slot, b"other", Area("store", 40, 7)).members == [b"other"]
    assert look(slot, b"nobody").members == [None]
    assert slot.snapshot() == before


def test_a_member_that_has_drifted_from_its_place_is_found_in_both_directions(make_slot: Make) -> None:
    slot = make_slot()
    members = [b"%04d" % n for n in range(1_000)]
    slot.fill(dict.fromkeys(members, 50.0))
    chance = random.Random(11)
    for _ in range(40):
        rank = chance.randrange(1_000)
        place = max(0, rank + chance.randrange(-300, 300))
        assert look(slot, members[rank], Area("store", 50, place)).members == [members[rank]]


def test_a_look_is_bounded_and_says_where_to_go_on(make_slot: Make) -> None:
    slot = make_slot()
    members = [b"%04d" % n for n in range(500)]
    slot.fill(dict.fromkeys(members, 50.0))
    area: Area | None = Area("store", 50, 250)
    for _ in range(40):
        assert area is not None
        sought = slot.find_by_digest([digest(members[3])], [area], scan=20)
        [area] = sought.left
        if sought.members != [None]:
            break
        assert area is not None
        assert area.looked > 0
    else:
        raise AssertionError("it never got there")
    assert sought.members == [members[3]]
    # Nobody is there: the area ends, and says so.
    [left] = look(slot, b"nobody", Area("store", 50, 250)).left
    assert left is None
    assert look(slot, b"nobody", Area("dead")).left == [None]


def test_a_look_reads_about_as_many_bytes_as_it_may(make_slot: Make) -> None:
    slot = make_slot()
    members = [b"%02d" % n + b"x" * 1_000 for n in range(60)]
    slot.fill(dict.fromkeys(members, 50.0))
    [left] = look(slot, b"nobody", Area("store", 50, 30), max_bytes=10_000).left
    assert left is not None
    assert 4 <= left.looked <= 10
    assert look(slot, members[30], Area("store", 50, 30), max_bytes=1).members == [members[30]]


def test_many_are_found_in_one_look_and_one_that_is_gone_takes_nothing_from_the_others(
    make_slot: Make,
) -> None:
    slot = make_slot()
    members = [b"%04d" % n for n in range(2_500)]
    slot.fill(dict.fromkeys(members, 50.0))
    asked = [0, 17, 900, 901, 902, 2_000, 2_499]
    digests = [digest(b"gone"), *(digest(members[rank]) for rank in asked)]
    areas = [Area("store", 50, 1_200), *(Area("store", 50, rank + 5) for rank in asked)]
    sought = slot.find_by_digest(digests, areas, scan=300)
    assert sought.members == [None, *(members[rank] for rank in asked)]


def test_whole_states_are_looked_through_from_their_last_entry(make_slot: Make) -> None:
    slot = make_slot(TopicType.FIXED_TIME, backoff=CONSTANT)
    slot.bring_one_into_each()
    for member, state in ((b"dead", "dead"), (b"rests", "retry"), (b"runs", "prepare"), (b"waits", "store")):
        assert look(slot, member, Area(state)).members == [member]
        others = [Area(other) for other in ("store", "prepare", "retry", "dead", "claim") if other != state]
        assert look(slot, member, *others).members == [None]
    slot.fill({b"%04d" % n: 2_000.0 + n for n in range(100)})
    newest = max(slot.zset("store"), key=lambda member: slot.zset("store")[member])
    assert look(slot, newest, Area("store"), scan=1).members == [newest]


def test_a_look_takes_a_hundred_areas(make_slot: Make) -> None:
    slot = make_slot()
    assert len(look(slot, b"a", *(Area("store", 50, n) for n in range(100))).left) == 100
    with pytest.raises(ServerRefused):
        look(slot, b"a", *(Area("store", 50, n) for n in range(101)))


# --- searches by class


def failed_with(slot: Slot, member: bytes, error: str, *, dead: bool) -> None:
    slot.send(member, body=b"Boom: in the body")
    receipt, delivery = slot.take_one()
    assert delivery.member == member
    slot.fail(receipt, member, kind="rejected" if dead else "failed", error=error)


@pytest.mark.parametrize("dead", [True, False])
@pytest.mark.parametrize(
    ("error", "is_found"),
    [
        ("Boom: it broke", True),
        ("shop.errors.Boom: it broke", True),
        ("Boom", False),  # a single word is what somebody said, not a class
        ("Boom\nTraceback", False),
        ("Boom\n: it broke", False),
        (f"{'x' * 195}.Boom: it broke", True),
        (f"{'x' * 196}.Boom: it broke", False),
        (" shop.Boom : x", True),
        ("Boomer: it broke", False),
        ("shop.Boomer: Boom: x", False),
        ("KaBoom: it broke", False),
        ("it broke: Boom: x", False),
        ("Other\nBoom: x", False),
        ("a card.Boom: x", False),
        ("", False),
    ],
)
def test_a_class_is_compared_whole_or_by_its_last_part(
    make_slot: Make, error: str, is_found: bool, dead: bool
) -> None:
    slot = make_slot(identity="key", backoff=CONSTANT)
    failed_with(slot, b"Boom", error, dead=dead)
    found = slot.search_messages("dead" if dead else "retry", b"Boom", where="error").entries
    assert [entry.member for entry in found] == ([b"Boom"] if is_found else [])


@pytest.mark.parametrize("identity", ["key", "body"])
def test_a_search_by_class_goes_as_far_whatever_members_and_bodies_hold(
    make_slot: Make, identity: str
) -> None:
    slot = make_slot(identity=identity, backoff=CONSTANT)
    for n in range(30):
        member = b"secret.Boom %02d" % n
        failed_with(slot, member, "ValueError: Boom secret", dead=True)
    for needle in (b"Boom", b"secret", b"ValueError: Boom", b"in the body", b"absent"):
        page = slot.search_messages("dead", needle, where="error", limit=2, scan=1_000)
        assert page.entries == [] and page.cursor is None
    page = slot.search_messages("dead", b"ValueError", where="error", limit=2)
    assert len(page.entries) == 2 and page.cursor is not None


@pytest.mark.parametrize("record", [b"", b"\n", b"no record", b"failed 1 2 3 4", b"a b c d e f g\nBoom: x"])
def test_a_search_by_class_passes_over_records_that_strangers_wrote(make_slot: Make, record: bytes) -> None:
    slot = make_slot()
    slot.send(b"a")
    slot.keyspace.hset(slot.keys.failures, b"a", record)
    assert slot.search_messages("store", b"Boom", where="error").entries == []


def grouped(slot: Slot, **options: Any) -> list[DeadGroup]:
    """Return all groups of dead messages, page by page."""
    found: list[DeadGroup] = []
    page = slot.group_deaths(**options)
    while True:
        found += page.groups
        if not page.skip:
            return found
        page = slot.group_deaths(skip=page.skip, **options)


def test_deaths_are_grouped_by_the_first_line_of_their_error(make_slot: Make) -> None:
    slot = make_slot(identity="key")
    errors = [
        "shop.Boom2: order 17 failed at 3.25\nTraceback: 4",
        "shop.Boom2: order 1899 failed at 4.1\n",
        "shop.Boom3: order 17 failed at 3.25",
        "a remark about 17",
        "",
        ": 5",
        "Long: " + "7" * 1_000,
    ]
    for n, error in enumerate(errors):
        failed_with(slot, b"%d" % n, error, dead=True)
    assert {(one.line, one.deaths) for one in grouped(slot)} == {
        (b"shop.Boom2: order 0 failed at 0.0", 2),
        (b"shop.Boom3: order 0 failed at 0.0", 1),
        (b"a remark about 0", 1),
        (b"", 1),
        (b": 0", 1),
        (b"Long: " + b"7" * 1_000, 1),
    }


def test_groups_of_deaths_have_their_hours_and_name_their_last_ones(make_slot: Make) -> None:
    slot = make_slot()
    failed_with(slot, b"x", "Boom: 1", dead=True)
    slot.clock.advance(3_600)
    for n in range(5):
        slot.clock.advance(0.001)
        failed_with(slot, b"%d" % n, "Boom: 22", dead=True)
    at = slot.zset("dead")
    assert int(at[b"0"]) // 3_600_000 > int(at[b"x"]) // 3_600_000
    hour = int(at[b"x"]) // 3_600_000
    (both,) = slot.group_deaths(samples=2).groups
    assert both == DeadGroup(
        b"Boom: 0", 6, at[b"x"], [(hour + 1, 5), (hour, 1)], [(b"4", at[b"4"]), (b"3", at[b"3"])]
    )
    assert slot.group_deaths(samples=0).groups[0].samples == []
    assert [one.deaths for one in grouped(slot, scan=4)] == [4, 2]
    assert [one.deaths for one in grouped(slot, max_bytes=1)] == [1] * 6
    assert [one.deaths for one in grouped(slot, min_score=at[b"1"], max_score=at[b"3"])] == [3]
    assert slot.group_deaths(scan=6).skip == 0
    spread = slot.group_deaths(skip=1, stride=3, run=2)
    assert ([one.deaths for one in spread.groups], spread.skip) == ([4], 0)
    assert spread.groups[0].samples == [(b"3", at[b"3"]), (b"2", at[b"2"]), (b"0", at[b"0"])]
    assert slot.group_deaths(skip=6).groups == []


@pytest.mark.parametrize(
    "record", [b"", b"\n", b"no record", b"failed 1 2 3 4", b"failed 1 2 3 4 9\nBoom: x"]
)
def test_deaths_that_strangers_wrote_have_no_line(make_slot: Make, record: bytes) -> None:
    slot = make_slot()
    for score in (-math.inf, 5.5, math.inf):
        member = b"%f" % score
        failed_with(slot, member, "Boom: x", dead=True)
        slot.keyspace.zadd(slot.keys.dead, member, score)
        slot.keyspace.hset(slot.keys.deaths, member, record)
    assert [(one.line, one.deaths) for one in grouped(slot)] == [(b"", 3)]
    assert grouped(slot)[0].hours == [(0, 1)]


def test_the_body_of_a_dead_message_is_no_part_of_its_group(make_slot: Make) -> None:
    slot = make_slot(identity="key")
    failed_with(slot, b"a", "Boom: no end", dead=True)
    (only,) = slot.group_deaths().groups
    assert only.line == b"Boom: no end"


def test_the_body_of_a_dead_message_completes_no_class(make_slot: Make) -> None:
    slot = make_slot(identity="key")
    slot.send(b"a")
    slot.keyspace.hset(slot.keys.body, b"a", b": a stranger's body")
    slot.fail_one(b"a", kind="rejected", error="Boom")
    assert slot.search_messages("dead", b"Boom", where="error").entries == []
