"""What each script does to one message, written once more, as small as it can be."""

from typing import Any

from tests.proof.slot_model.rules import Budget, Rules
from tests.proof.slot_model.states import BURIED, FRESH, OUTLIVED, REMOVED, Member, Record


class Transitions:
    """What each script does to one member. A method answers the member after, the counters raised, what it broke."""

    def __init__(self, rules: Rules, budget: Budget) -> None:
        self.rules = rules
        self.budget = budget
        self.range_merge = budget.topic_type == "range_merge"

    def send(self, m: Member, due: int) -> Any:
        """send_replace, or send_merge on a range_merge topic."""
        counters = ["sent"]
        store, retry, early = FRESH + due, m.retry, due
        if m.store >= FRESH:
            counters.append("merged" if self.range_merge else "replaced")
            if self.range_merge:
                store, early = m.store, m.early
        elif m.store and not self.rules.supersede:
            store = m.store
            counters.append("merged")
        else:
            counters.append("stored")
            if m.store and self.rules.drop_is_counted:
                counters.append("dropped")
            if retry and self.rules.supersede:
                retry = None
                counters.append("dropped")
        return sent(m._replace(store=store, retry=retry, early=early)), counters, None

    def plain_zadd(self, m: Member, due: int) -> Any:
        """A producer of the article: a bare ZADD that knows nothing of Retry."""
        counters = [] if m.store else ["foreign"]
        return sent(m._replace(store=FRESH + due, early=due)), counters, None

    def prepare(self, m: Member, _: int) -> Any:
        """Phase one for this member: None where it is not due, or in flight."""
        if not m.store or m.store > FRESH or (m.record and self.rules.skip_in_flight):
            return None
        broken = None
        if m.early:
            broken = "EARLY"
        elif m.unwanted:
            broken = "RESURRECT"
        elif m.taken > self.budget.max_retries:
            broken = "BUDGET"
        left = self.budget.max_retries if m.store == FRESH else m.store - 1
        counters, retry = ["prepared"], m.retry
        if retry and self.rules.prepare_drops_retry:
            retry = None
            counters.append("dropped")
        taken = m._replace(
            store=0, retry=retry, record=Record(left, 0, 0, True, False), early=0, taken=m.taken + 1
        )
        return taken, counters, broken

    def commit(self, m: Member, _: int) -> Any:
        if m.record is None:
            return None
        if m.record.mark:
            return end_marked(m, m.record)
        m, counters = m._replace(record=None), ["committed"]
        if not self.rules.dead_apart and not (m.store or m.retry):
            m = m._replace(dead=False)
        return m, counters, None

    def rollback(self, m: Member, backoff: int) -> Any:
        return m.record and self._back(m, m.record, backoff, "failed")

    def reject(self, m: Member, _: int) -> Any:
        if m.record is None:
            return None
        if m.record.mark:
            return end_marked(m, m.record)
        m, counters = die(m, covers=m.record.covers)
        return m._replace(record=None), ["rejected", *counters], None

    def time_out(self, m: Member, backoff: int) -> Any:
        if m.record is None or (self.rules.time_out_waits and m.record.age <= self.budget.timeout):
            return None
        return self._back(m, m.record, backoff, "expired")

    def release(self, m: Member, _: int) -> Any:
        record = m.record
        if record is None:
            return None
        if record.mark:
            return end_marked(m, record)
        taken = m.taken - 1 if record.covers else m.taken
        if not self.rules.release_refunds:
            return self._back(m._replace(taken=taken), record, 0, "released")
        fresh = record.left == self.budget.max_retries or not self.rules.release_original
        original = FRESH if fresh else record.left + 1
        counters = ["released"]
        early, store = m.early, m.store
        if store or m.retry:
            counters.append("dropped")
            if self.range_merge and store >= FRESH and (fresh or not self.rules.fresh_before_retry):
                # Merged with what was taken before it: the first time counts, and it was due already.
                store = min(store, original) if self.rules.release_earlier else store
                early = 0 if fresh else early
        else:
            store = original
        return m._replace(store=store, record=None, early=early, taken=taken), counters, None

    def extend(self, m: Member, _: int) -> Any:
        return m.record and (m._replace(record=m.record._replace(age=0, jumped=False)), [], None)

    def promote(self, m: Member, _: int) -> Any:
        if m.retry is None or m.retry[1]:
            return None
        if m.store:
            store = m.store if self.rules.promote_drops else m.retry[0]
            return m._replace(store=store, retry=None), ["dropped"], None
        return m._replace(store=m.retry[0], retry=None), [], None

    def replay(self, m: Member, _: int) -> Any:
        if not m.dead:
            return None
        m = m._replace(dead=False, mourned=False)
        if m.store or m.retry:
            return m, ["replay_merged"], None
        return sent(m._replace(store=FRESH, early=0)), ["revived"], None

    def bury(self, m: Member, _: int) -> Any:
        """By a person: what waits goes to Dead, what is in flight is marked."""
        if not (m.store or m.retry or m.record):
            return None
        outlived = m.store or m.retry or (m.record and m.record.mark == OUTLIVED)
        m, counters = mark_end(self.rules, m._replace(unwanted=True), OUTLIVED if outlived else BURIED)
        if m.store or m.retry:
            second = ["dropped"] if m.store and m.retry else []
            m, more = die(m, covers=True)
            m = m._replace(store=0, retry=None, early=0)
            counters += more + second
        return m, counters, None

    def remove(self, m: Member, _: int) -> Any:
        """By a person: what waits is gone, what is in flight is marked."""
        if not (m.store or m.retry or m.record):
            return None
        waiting = bool(m.store) + bool(m.retry)
        m, counters = mark_end(self.rules, m._replace(unwanted=True, needed=False), REMOVED)
        return m._replace(store=0, retry=None, early=0), counters + ["removed"] * waiting, None

    def remove_dead(self, m: Member, _: int) -> Any:
        return (m._replace(dead=False, mourned=False), ["removed_dead"], None) if m.dead else None

    def reschedule(self, m: Member, due: int) -> Any:
        if m.store >= FRESH:
            return m._replace(store=FRESH + due, early=due), [], None
        if m.store:
            return m._replace(store=0, retry=(m.store, due)), ["dropped"] if m.retry else [], None
        return (m._replace(retry=(m.retry[0], due)), [], None) if m.retry else None

    def succeed(self, m: Member, covers: int) -> Any:
        """A listener returned well: not a script, only what the properties have to know."""
        return (m._replace(needed=False) if covers else m), [], None

    def tick(self, m: Member, by: int) -> Any:
        return later(m, by, self.budget.timeout), [], None

    def jump(self, m: Member, by: int) -> Any:
        m = later(m, by, self.budget.timeout)
        if self.budget.jump_excuses and by > self.budget.timeout // 2 and m.record:
            m = m._replace(record=m.record._replace(jumped=True))
        return m, [], None

    def _back(self, m: Member, record: Record, backoff: int, ended: str) -> Any:
        """A delivery failed: a retry of what is left, or Dead, or nothing where something newer waits."""
        if record.mark:
            return end_marked(m, record)
        m = m._replace(record=None)
        if (m.store or m.retry) and self.rules.keep_newer:
            return m, [ended, "dropped"], None
        if not record.left:
            broken = "BUDGET" if record.covers and m.taken != 1 + self.budget.max_retries else None
            m, counters = die(m, covers=record.covers)
            return m, [ended, *counters], broken
        if backoff:
            return m._replace(retry=(record.left, backoff)), [ended, *["dropped"] * bool(m.retry)], None
        return m._replace(store=record.left), [ended, *["dropped"] * bool(m.store)], None


def sent(m: Member) -> Member:
    record = m.record and m.record._replace(covers=False)
    return m._replace(record=record, needed=True, unwanted=False, taken=0)


def later(m: Member, by: int, timeout: int) -> Member:
    record = m.record and m.record._replace(age=min(m.record.age + by, timeout + 1))
    store = max(FRESH, m.store - by) if m.store >= FRESH else m.store
    retry = m.retry and (m.retry[0], max(0, m.retry[1] - by))
    return m._replace(store=store, retry=retry, record=record, early=max(0, m.early - by))


def die(m: Member, *, covers: bool) -> tuple[Member, list[str]]:
    counters = ["died", "dead_merged"] if m.dead else ["died"]
    return m._replace(dead=True, mourned=True, needed=m.needed and not covers), counters


def end_marked(m: Member, record: Record) -> Any:
    m = m._replace(record=None)
    if record.mark == REMOVED:
        return m, ["ended_marked", "removed"], None
    if record.mark == OUTLIVED and m.dead:
        # The newer copy, which was buried with it, is the one that stays.
        return m, ["ended_marked", "dropped"], None
    m, counters = die(m, covers=record.covers)
    return m, ["ended_marked", *counters], None


def mark_end(rules: Rules, m: Member, mark: int) -> tuple[Member, list[str]]:
    if m.record is None:
        return m, []
    if not rules.leave_prepare:
        return end_marked(m, m.record._replace(mark=mark))[:2]
    return (m._replace(record=m.record._replace(mark=mark)) if rules.marks else m), []
