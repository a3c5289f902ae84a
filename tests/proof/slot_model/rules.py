"""
Every state that one slot, its two workers and their network can reach, walked breadth first.

This is the protocol itself (states, rules, ledger), not the Lua that carries it out: scripts are atomic steps here,
and what they do to one message is written once more, as small as it can be. `check` walks all interleavings of
producers, workers, time, faults and persons within a `Budget` of those events that could go on for ever, and reports
the shortest trace to each broken property. A `Rules` with one rule switched off must be found by some property: a
check that cannot fail proves nothing.

How it stays small enough to be walked whole:

- Nothing counts upward. A receipt is only ever compared with the one in Prepare, so a delivery remembers whether its
  receipt is still the one there; an epoch is only ever compared with the highest; times are kept as "due in" and
  "taken ago". Therefore the clock may tick without a budget.
- What happens to one message, and what one worker holds, are numbered when first met and remembered, so that a step
  of the whole slot is a few look-ups. States that differ only in which worker or which message is called what are one.

Limits: two members and two workers at most, one clock that may jump forward, no Spark claims (`claim_model`), no keyed bodies, no
priorities, no re-slotting, no loss of data by Redis. Which of several due members `prepare` takes is left open, which
allows more than the real order does. Starting a listener and looking at the clock just before are one step.
"""

from dataclasses import dataclass, replace

PROPERTIES = ("LOSS", "GRAVE", "EARLY", "LATE", "OVERLAP", "BUDGET", "RESURRECT", "ORPHAN", "LEDGER", "STUCK")
"""
LOSS       a send that no successful run taken after it covers, and its member is in none of Store, Retry, Prepare;
           a send that died, and its member is not in Dead
GRAVE      a member left Dead although no person took it out
EARLY      taken before the due time of its last stored send (range_merge: of the first one merged)
LATE       a fresh copy waits beyond that time
OVERLAP    two listeners of a serial slot, or of one member elsewhere, though neither delivery outlived its time-out
BUDGET     more than 1 + MAX_RETRIES deliveries of one send, or death by failures after fewer
RESURRECT  a message that a person removed or buried is taken again without a new send
ORPHAN     Prepare holds a delivery in the name of a living worker that does not know of it and will not ask
LEDGER     one transition whose counters do not balance what it moved
STUCK      a state with work left that no sequence of fault-free steps can finish
"""


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of the protocol, each of which can be switched off to see what it is for."""

    receipts: bool = True  # off: phase two compares the member only, as in the article
    keep_newer: bool = True  # off: rollback and time_out overwrite the copy that waits
    gate: bool = True  # off: whoever asks may take while another owner's deliveries are open
    fence: bool = True  # off: a prepare with an old epoch is served
    held: bool = True  # off: after a lost reply the worker simply prepares again
    held_is_extended: bool = True  # off: the answer of `list_held` counts as a fresh confirmation
    skip_in_flight: bool = True  # off: prepare takes a member that Prepare holds already
    supersede: bool = True  # off: a send that meets a waiting retry merges into it
    marks: bool = True  # off: a person's remove or bury leaves no mark on what is in flight
    leave_prepare: bool = True  # off: a person takes the record straight out of Prepare
    release_refunds: bool = True  # off: a release spends a retry, as a rollback does
    release_original: bool = True  # off: a release puts back a fresh copy, whatever was taken
    release_earlier: bool = True  # off: range_merge, the released copy gives up its earlier time
    fresh_before_retry: bool = True  # off: range_merge, "the earlier score" may be a retry score
    release_is_final: bool = True  # off: a worker forgets what it released before the answer came
    time_out_waits: bool = True  # off: time_out does not look at the time-out
    promote_drops: bool = True  # off: promote overwrites a waiting copy
    prepare_drops_retry: bool = True  # off: a copy in Retry stays while the fresh one is taken
    start_in_time: bool = True  # off: a listener starts however old its delivery is
    one_thread: bool = True  # off: a worker starts a listener of the slot while an earlier one still runs
    owners_are_new: bool = True  # off: both workers use one owner id, as after a careless restart
    dead_apart: bool = True  # off: the end of a live copy tidies up what lies in Dead
    fenced_asks_again: bool = True  # off: acquire once per assignment, even where `fenced` came in between
    push_keeps_age: bool = True  # off: what was pushed counts as confirmed when the worker reads it
    push_to_holder: bool = True  # off: a push goes to any worker, and counts as the holder's
    push_alone: bool = True  # off: a message is pushed beside what is in flight
    push_is_missed: bool = True  # off: a worker whose subscription broke asks only for what waits
    drop_is_counted: bool = True  # off: a superseding send forgets to count the copy it gives up

    def without(self, rule: str) -> "Rules":
        return replace(self, **{rule: False})


@dataclass(frozen=True, slots=True)
class Budget:
    """How often each event may happen that could otherwise happen for ever, and the size of the slot."""

    members: int = 1
    topic_type: str = "fixed_time"  # or "range_merge"
    serial: bool = True
    max_retries: int = 2
    timeout: int = 1  # ticks
    backoffs: tuple[int, ...] = (0, 1)  # ticks: 0 goes straight back to Store
    sends: int = 2
    foreign: int = 0  # plain ZADDs by an article's producer
    lost: int = 0  # replies that never came, and requests that arrive late
    pushes: int = 0  # sends that deliver their message to the worker themselves
    crashes: int = 0
    handovers: int = 0
    persons: int = 0  # remove, bury, replay, reschedule
    rejects: int = 0
    releases: int | None = None  # None: as often as anybody likes
    jumps: int = 0  # steps of the Redis clock, which the workers' clocks do not make
    jump: int = 1  # ticks
    jump_excuses: bool = (
        True  # a delivery across a jump beyond half its time-out counts as having outlived it
    )
    max_states: int = 3_000_000
