"""The assignment: every slot once, balanced, nothing moved without need, the same whoever computes it."""

from __future__ import annotations

import random
import time
from collections import Counter
from fractions import Fraction
from itertools import pairwise, product
from math import ceil, floor

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from django_rmq.core.coordination import Worker, less
from django_rmq.core.coordination.assignment import Assignment, SlotRun, TopicSlots, WorkerCapacity, assign
from django_rmq.core.coordination.stored_plan import MAX_SPANS, AssignmentPlan, Span

NAMES = ["a", "b", "c", "d"]
WORKERS = ["u", "v", "w", "x", "y", "z"]


def topics(max_size: int = 4, max_slots: int = 40) -> st.SearchStrategy[list[TopicSlots]]:
    one = st.builds(TopicSlots, st.sampled_from(NAMES), st.integers(1, max_slots), st.just(True))
    return st.lists(one, max_size=max_size, unique_by=lambda topic: topic.name)


def crews(max_size: int = 6) -> st.SearchStrategy[list[WorkerCapacity]]:
    served = st.frozensets(st.sampled_from(NAMES))
    full = st.frozensets(st.sampled_from(NAMES), max_size=2)
    one = st.builds(WorkerCapacity, st.sampled_from(WORKERS), st.integers(1, 5), served, full)
    return st.lists(one, max_size=max_size, unique_by=lambda worker: worker.worker)


def anything(max_slots: int = 50) -> st.SearchStrategy[dict[str, list[SlotRun]]]:
    """Runs as nobody would have written them: over each other, beyond the end, of workers that never were."""
    bound = st.integers(-2, max_slots)
    run = st.builds(SlotRun, bound, bound, st.sampled_from([*WORKERS, "gone"]))
    return st.dictionaries(st.sampled_from([*NAMES, "dropped"]), st.lists(run, max_size=8))


def owners(runs: tuple[SlotRun, ...] | list[SlotRun]) -> list[str]:
    return [run.worker for run in runs for _ in range(run.start, run.stop)]


def serving(topic: str, crew: list[WorkerCapacity]) -> list[WorkerCapacity]:
    """Return those that should own slots of a topic: the ones with room for it, unless there are none."""
    found = [worker for worker in crew if topic in worker.topics]
    return [worker for worker in found if topic not in worker.full] or found


def quotas(wanted: list[TopicSlots], crew: list[WorkerCapacity]) -> dict[tuple[str, str], Fraction]:
    quotas = {}
    for topic in wanted:
        found = serving(topic.name, crew)
        threads = sum(worker.threads for worker in found)
        for worker in found:
            quotas[topic.name, worker.worker] = Fraction(topic.slots * worker.threads, threads)
    return quotas


def counts(assignment: Assignment) -> Counter[tuple[str, str]]:
    return Counter((name, owner) for name, runs in assignment.items() for owner in owners(runs))


def held(
    wanted: list[TopicSlots], crew: list[WorkerCapacity], previous: Assignment
) -> Counter[tuple[str, str]]:
    """Return how many slots each worker may keep of a previous assignment without overlaps."""
    slots = {topic.name: topic.slots for topic in wanted}
    may = {(name, worker.worker) for name in slots for worker in serving(name, crew)}
    return Counter(
        (name, owner)
        for name, runs in previous.items()
        if name in slots
        for owner in owners(runs)[: slots[name]]
        if (name, owner) in may
    )


def movement(wanted: list[TopicSlots], previous: Assignment, now: Assignment) -> int:
    slots = {topic.name: topic.slots for topic in wanted}
    total = 0
    for name, runs in now.items():
        before = owners(previous.get(name, ()))[: slots[name]]
        after = owners(runs)
        total += sum(owner != old for owner, old in zip(after, before + [""] * len(after), strict=False))
    return total


def assert_valid(wanted: list[TopicSlots], crew: list[WorkerCapacity], assignment: Assignment) -> None:
    served = {topic.name for topic in wanted if any(topic.name in worker.topics for worker in crew)}
    assert set(assignment) == served
    for topic in wanted:
        if topic.name in served:
            runs = assignment[topic.name]
            assert runs[0].start == 0
            assert runs[-1].stop == topic.slots
            for run, following in pairwise(runs):
                assert run.stop == following.start
                assert run.worker != following.worker
            assert all(run.start < run.stop for run in runs)
            assert {run.worker for run in runs} <= {one.worker for one in serving(topic.name, crew)}


def assert_balanced(wanted: list[TopicSlots], crew: list[WorkerCapacity], assignment: Assignment) -> None:
    quota, count = quotas(wanted, crew), counts(assignment)
    for key, exact in quota.items():
        assert floor(exact) <= count[key] <= ceil(exact)
    for worker in crew:
        mine = [key for key in quota if key[1] == worker.worker]
        total = sum((quota[key] for key in mine), Fraction(0))
        assert floor(total) <= sum(count[key] for key in mine) <= ceil(total)


@given(topics(), crews(), anything())
def test_every_slot_is_owned_once_by_a_worker_that_serves_it_and_all_is_balanced(
    wanted: list[TopicSlots], crew: list[WorkerCapacity], previous: dict[str, list[SlotRun]]
) -> None:
    assignment = assign(wanted, crew, previous)
    assert_valid(wanted, crew, assignment)
    assert_balanced(wanted, crew, assignment)


@given(topics(), crews(), anything())
def test_a_balanced_assignment_stays_as_it_is(
    wanted: list[TopicSlots], crew: list[WorkerCapacity], previous: dict[str, list[SlotRun]]
) -> None:
    assignment = assign(wanted, crew, previous)
    assert assign(wanted, crew, assignment) == assignment


@given(topics(), crews(), anything(), st.randoms())
def test_the_order_of_what_is_given_changes_nothing(
    wanted: list[TopicSlots],
    crew: list[WorkerCapacity],
    previous: dict[str, list[SlotRun]],
    chance: random.Random,
) -> None:
    assignment = assign(wanted, crew, previous)
    topics_, crew_ = chance.sample(wanted, len(wanted)), chance.sample(crew, len(crew))
    names = chance.sample(sorted(previous), len(previous))
    runs = {name: chance.sample(previous[name], len(previous[name])) for name in names}
    assert assign(topics_, crew_, runs) == assignment


def cheapest(wanted: list[TopicSlots], crew: list[WorkerCapacity], had: Counter[tuple[str, str]]) -> int:
    """Return, by trying all of them, the fewest moves to any balanced assignment."""
    quota = quotas(wanted, crew)
    keys = sorted(quota)
    served = {name for name, _ in keys}
    totals = {
        worker.worker: sum((quota[key] for key in keys if key[1] == worker.worker), Fraction(0))
        for worker in crew
    }
    best = sum(topic.slots for topic in wanted) + 1
    for choice in product(*({floor(quota[key]), ceil(quota[key])} for key in keys)):
        count = dict(zip(keys, choice, strict=True))
        of_topic, of_worker = Counter[str](), Counter[str]()
        for (name, worker), number in count.items():
            of_topic[name] += number
            of_worker[worker] += number
        if all(of_topic[topic.name] == topic.slots for topic in wanted if topic.name in served) and all(
            floor(total) <= of_worker[worker] <= ceil(total) for worker, total in totals.items()
        ):
            best = min(best, sum(max(0, number - had[key]) for key, number in count.items()))
    return best if served else 0


def any_owners() -> st.SearchStrategy[Assignment]:
    """Every slot owned by anybody: as unfair as it gets."""
    whose = st.lists(st.sampled_from([*WORKERS[:4], "gone"]), max_size=9)
    return st.dictionaries(st.sampled_from(NAMES[:3]), whose.map(runs_of))


def runs_of(whose: list[str]) -> tuple[SlotRun, ...]:
    return tuple(SlotRun(slot, slot + 1, owner) for slot, owner in enumerate(whose))


def three_for_one(threads: int) -> tuple[list[TopicSlots], list[WorkerCapacity], Assignment]:
    """One worker has the only slot of three topics: by each alone it might keep it."""
    wanted = [TopicSlots(name, 1) for name in "abc"]
    crew = [WorkerCapacity(worker, threads, frozenset("abc")) for worker in "uvw"]
    return wanted, crew, dict.fromkeys("abc", (SlotRun(0, 1, "u"),))


@settings(max_examples=400)
@given(topics(3, 9), crews(4), any_owners())
@example(*three_for_one(1))
@example(  # the way round over who may keep its own is the cheaper one
    [TopicSlots("a", 3), TopicSlots("b", 1)],
    [
        WorkerCapacity("u", 1, frozenset("a")),
        WorkerCapacity("v", 1, frozenset("ab")),
        WorkerCapacity("w", 2, frozenset("ab")),
    ],
    {"a": runs_of(["gone", "gone", "u"]), "b": runs_of(["w"])},
)
@example(  # one who has no more than its share must give way, for another lacks its own
    [TopicSlots("a", 1), TopicSlots("b", 1)],
    [WorkerCapacity(worker, threads, frozenset("ab")) for worker, threads in (("u", 1), ("v", 2), ("w", 1))],
    {"a": runs_of(["u"]), "b": runs_of(["w"])},
)
def test_no_balanced_assignment_moves_fewer_slots(
    wanted: list[TopicSlots], crew: list[WorkerCapacity], previous: Assignment
) -> None:
    now = assign(wanted, crew, previous)
    assert_valid(wanted, crew, now)
    assert_balanced(wanted, crew, now)
    assert movement(wanted, previous, now) == cheapest(wanted, crew, held(wanted, crew, previous))


@given(topics(3, 9), crews(4), topics(3, 9), crews(4))
def test_a_change_of_anything_moves_no_more_than_it_must(
    wanted: list[TopicSlots],
    crew: list[WorkerCapacity],
    wanted_before: list[TopicSlots],
    crew_before: list[WorkerCapacity],
) -> None:
    """Whatever came, went or changed: workers, threads, what they serve, the slots of a topic."""
    previous = assign(wanted_before, crew_before, {})
    now = assign(wanted, crew, previous)
    assert movement(wanted, previous, now) == cheapest(wanted, crew, held(wanted, crew, previous))


@given(st.integers(1, 200), st.integers(2, 12), st.integers(0, 11))
def test_with_one_topic_and_equal_threads_only_the_slots_of_who_leaves_or_joins_move(
    slots: int, count: int, which: int
) -> None:
    wanted = [TopicSlots("a", slots)]
    crew = [WorkerCapacity(f"w{i}", 4, frozenset("a")) for i in range(count)]
    less_one = [worker for i, worker in enumerate(crew) if i != which % count]
    whole = assign(wanted, crew, {})
    without = assign(wanted, less_one, whole)
    gone = crew[which % count].worker
    assert movement(wanted, whole, without) == owners(whole["a"]).count(gone)
    back = assign(wanted, crew, without)
    assert movement(wanted, without, back) == owners(back["a"]).count(gone)


@given(st.integers(1, 200), st.integers(2, 8), st.integers(1, 9))
def test_a_worker_with_more_threads_only_gains(slots: int, count: int, threads: int) -> None:
    wanted = [TopicSlots("a", slots)]
    crew = [WorkerCapacity(f"w{i}", 4, frozenset("a")) for i in range(count)]
    before = assign(wanted, crew, {})
    now = assign(wanted, [crew[0]._replace(threads=4 + threads), *crew[1:]], before)
    gained = owners(now["a"]).count("w0") - owners(before["a"]).count("w0")
    assert gained >= 0
    for old, new in zip(owners(before["a"]), owners(now["a"]), strict=True):
        assert new == old or old != "w0"


def test_a_topic_goes_to_those_that_are_not_full_for_it_unless_all_are() -> None:
    wanted = [TopicSlots("a", 8), TopicSlots("b", 8)]
    free = WorkerCapacity("u", 1, frozenset("ab"))
    full = WorkerCapacity("v", 3, frozenset("ab"), frozenset("a"))
    found = assign(wanted, [free, full], {})
    assert counts(found) == {("a", "u"): 8, ("b", "u"): 2, ("b", "v"): 6}
    all_full = [free._replace(full=frozenset("a")), full]
    assert counts(assign(wanted, all_full, found)) == {
        ("a", "u"): 2,
        ("a", "v"): 6,
        ("b", "u"): 2,
        ("b", "v"): 6,
    }


def test_topics_of_one_slot_are_spread_over_all_workers() -> None:
    """Each by itself could go to the same worker: the sum of its quotas forbids it."""
    wanted = [TopicSlots(f"t{i}", 1) for i in range(100)]
    crew = [WorkerCapacity(f"w{i:02}", 2, frozenset(topic.name for topic in wanted)) for i in range(50)]
    load = Counter(owner for runs in assign(wanted, crew, {}).values() for owner in owners(runs))
    assert set(load.values()) == {2}
    assert len(load) == 50


def test_topics_that_are_shared_or_served_by_nobody_are_left_out() -> None:
    wanted = [TopicSlots("a", 4, serial=False), TopicSlots("b", 4), TopicSlots("c", 4)]
    crew = [WorkerCapacity("w", 1, frozenset("ac"))]
    assert assign(wanted, crew, {}) == {"c": (SlotRun(0, 4, "w"),)}
    assert assign(wanted, [], {"c": [SlotRun(0, 4, "w")]}) == {}


@pytest.mark.parametrize(
    ("wanted", "crew"),
    [
        ([TopicSlots("a", 1), TopicSlots("a", 2)], []),
        ([TopicSlots("a", 0)], []),
        ([], [WorkerCapacity("w", 1, frozenset()), WorkerCapacity("w", 2, frozenset())]),
        ([], [WorkerCapacity("w", 0, frozenset())]),
    ],
)
def test_what_makes_no_sense_is_refused(wanted: list[TopicSlots], crew: list[WorkerCapacity]) -> None:
    with pytest.raises(ValueError, match=r"is listed 2 times|has 0"):
        assign(wanted, crew, {})


@pytest.mark.parametrize("slots", [1_024, pytest.param(1 << 20, marks=pytest.mark.slow)])
def test_many_slots_are_assigned_in_no_time_and_little_space(slots: int) -> None:
    """The goal is a second for 2**20 slots and 50 workers, after hundreds of them came and went."""
    chance = random.Random(7)
    wanted = [TopicSlots("a", slots)]
    crew = [WorkerCapacity(f"{i:032x}", 1 + i % 4, frozenset("a")) for i in range(50)]
    started = time.thread_time()
    assignment = assign(wanted, crew, {})
    fresh = time.thread_time() - started
    plan = AssignmentPlan({}).renewed(assignment, 1_800_000_000)
    fresh_bytes = len(plan.encode())
    slowest = longest = 0.0
    for number in range(50, 150):
        if len(crew) > 40 and chance.random() < 0.5:
            crew.pop(chance.randrange(len(crew)))
        else:
            crew.append(WorkerCapacity(f"{number:032x}", 1 + number % 4, frozenset("a")))
        started = time.thread_time()
        assignment = assign(wanted, crew, assignment)
        slowest = max(slowest, time.thread_time() - started)
        plan = plan.renewed(assignment, 1_800_000_000 + number)
        longest = max(longest, len(plan.encode()))
    assert_valid(wanted, crew, assignment)
    assert_balanced(wanted, crew, assignment)
    print(
        f"{slots} slots, 50 workers: fresh {fresh * 1000:.2f} ms, {fresh_bytes} B; "
        f"in 100 changes at most {slowest * 1000:.0f} ms, {longest / 1000:.0f} kB, {len(assignment['a'])} runs"
    )
    assert max(fresh, slowest) < 5
    assert longest < 500_000


SPANS = st.lists(
    st.tuples(st.integers(1, 9), st.sampled_from(WORKERS), st.integers(0, 5)), min_size=1, max_size=12
)


def laid_out(rows: list[tuple[int, str, int]]) -> tuple[Span, ...]:
    spans, at = [], 0
    for length, worker, since in rows:
        spans.append(Span(at, at + length, worker, since))
        at += length
    return tuple(spans)


@given(st.dictionaries(st.sampled_from(NAMES), SPANS.map(laid_out)))
def test_what_is_stored_is_read_again(found: dict[str, tuple[Span, ...]]) -> None:
    plan = AssignmentPlan(found)
    assert AssignmentPlan.decode(plan.encode().encode()) == plan


@given(SPANS.map(laid_out), topics(1), crews(), st.integers(6, 9))
def test_an_owner_that_stays_keeps_the_time_since_when(
    before: tuple[Span, ...], wanted: list[TopicSlots], crew: list[WorkerCapacity], now: int
) -> None:
    old = AssignmentPlan({"a": before})
    wanted = [topic for topic in wanted if topic.name == "a"]
    plan = old.renewed(assign(wanted, crew, old.runs()), now)
    assert plan.runs() == assign(wanted, crew, old.runs())
    was = [(span.worker, span.since) for span in before for _ in range(span.start, span.stop)]
    for span in plan.topics.get("a", ()):
        for slot in range(span.start, span.stop):
            kept = slot < len(was) and was[slot][0] == span.worker
            assert span.since == (was[slot][1] if kept else now)


def test_a_plan_that_crumbles_forgets_times_before_it_grows_without_end() -> None:
    spans = laid_out([(1, "w", i % 2) for i in range(MAX_SPANS + 2)])
    kept = AssignmentPlan({"a": spans}).renewed({"a": (SlotRun(0, MAX_SPANS + 2, "w"),)}, 9)
    assert kept.topics["a"] == (Span(0, MAX_SPANS + 2, "w", 1),)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xff",
        b"null",
        b"[]",
        b"{}",
        b'{"workers":[],"times":[],"topics":[]}',
        b'{"workers":["w"],"times":[0],"topics":{"a":[4,0]}}',
        b'{"workers":["w"],"times":[0],"topics":{"a":[4,1,0]}}',
        b'{"workers":["w"],"times":[0],"topics":{"a":[0,0,0]}}',
        b'{"workers":["w"],"times":[0],"topics":{"a":[4,-1,0]}}',
        b'{"workers":["w"],"times":[0],"topics":{"a":[4.5,0,0]}}',
        b'{"workers":["w"],"times":["now"],"topics":{"a":[4,0,0]}}',
        b'{"workers":["w"],"times":[1e999],"topics":{"a":[4,0,0]}}',
    ],
)
def test_what_is_no_plan_is_a_value_error(raw: bytes) -> None:
    with pytest.raises(ValueError):
        AssignmentPlan.decode(raw)


def test_a_plan_names_its_flaw() -> None:
    worker = Worker("w", "host", 1, 0.0, 1, (TopicSlots("a", 4), TopicSlots("b", 2, serial=False)))
    crew = {"w": worker}
    assert AssignmentPlan({"a": laid_out([(4, "w", 0)])}).flaw(crew) == ""
    assert "topic a is not assigned" in AssignmentPlan({}).flaw(crew)
    assert "gone, which does not serve it" in AssignmentPlan(
        {"a": laid_out([(3, "w", 0), (1, "gone", 0)])}
    ).flaw(crew)
    assert "up to slot 3 only" in AssignmentPlan({"a": laid_out([(3, "w", 0)])}).flaw(crew)
    assert "which does not serve it" in AssignmentPlan({"a": laid_out([(4, "w", 0)])}).flaw({})


@given(st.sets(st.integers(0, 30)), st.sets(st.integers(0, 30)))
def test_what_is_lost_and_gained_is_the_difference_of_ranges(these: set[int], those: set[int]) -> None:
    def ranges(slots: set[int]) -> tuple[range, ...]:
        parts: list[range] = []
        for slot in sorted(slots):
            if parts and parts[-1].stop == slot:
                parts[-1] = range(parts[-1].start, slot + 1)
            else:
                parts.append(range(slot, slot + 1))
        return tuple(parts)

    rest = less({"a": ranges(these)}, {"a": ranges(those)})
    assert {slot for part in rest.get("a", ()) for slot in part} == these - those
    assert "a" in rest or not these - those
