"""The scripts with one rule switched off each, and a way to run tests against them.

    python -m tests.proof.mutants FILE...

serves runs of the tests of these files (see `serve`). Nothing of this is in the package: the texts that
`django_rmq.core.lua` reads are changed on their way in.
"""

from __future__ import annotations

import gc
import json
import os
import re
import sys
from collections.abc import Callable
from typing import IO, NamedTuple

import pytest

GONE = "gone"
"""The marked lines go."""


class If(str):
    """The condition of the marked line reads so."""

    __slots__ = ()


class As(str):
    """The marked line reads so."""

    __slots__ = ()


_CONDITION = re.compile(r"((?:if|elseif|while) )(.*?)( (?:then|do)\b)")


class Mutant(NamedTuple):
    """A rule switched off, at the lines of the scripts that are marked for it: `` -- rule: name``.

    The mark is at the end of its line, or on a line of its own before it.
    """

    switch: str
    """`GONE`, `If` or `As`."""
    rule: str
    """The rule that dies, in a sentence."""
    caught_by: str
    """Who notices: a case, or some case of a test or of a file."""
    mark: str = ""
    """Its mark, where that is not its own name: several rules share a line."""


def marks(text: str) -> dict[str, list[int]]:
    """Return where the marks of a file are: the indexes of the marked lines."""
    found: dict[str, list[int]] = {}
    for index, line in enumerate(text.split("\n")):
        if mark := re.search(r"-- rule: (\w+)$", line):
            alone = line.lstrip().startswith("--")
            found.setdefault(mark[1], []).append(index + 1 if alone else index)
    return found


def switched_off(name: str, text: str) -> str:
    """Return a file's text with the rule of the mutant ``name`` switched off, if it is marked there."""
    mutant, lines = MUTANTS[name], text.split("\n")
    for index in marks(text).get(mutant.mark or name, []):
        line = lines[index]
        blank = line[: len(line) - len(line.lstrip())]
        if isinstance(mutant.switch, If):
            lines[index] = _CONDITION.sub(lambda found: found[1] + mutant.switch + found[3], line, count=1)
            if not _CONDITION.search(line):
                raise ValueError(f"{name}: the marked line has no condition: {line}")
        else:
            lines[index] = "" if mutant.switch == GONE else blank + mutant.switch
    return "\n".join(lines)


MUTANTS: dict[str, Mutant] = {
    # --- the usual delivery
    "usual_beside_others": Mutant(
        As("if is_open"),
        "Only a slot that has nothing else is delivered without the rest of the rules.",
        "tests/contract/test_gate.py::test_while_one_owner_holds_anything_no_other_gets_anything[redis-range_merge]",
    ),
    "usual_beyond_the_limit": Mutant(
        As("local is_usual = not rows.err"),
        "The usual delivery keeps to the limit, to the room of the slot and to the order of priorities.",
        "tests/contract/test_usual_delivery.py::test_the_highest_priority_comes_first[redis]",
    ),
    "usual_before_its_time": Mutant(
        GONE,
        "The usual delivery hands out nothing before its time.",
        "tests/contract/test_usual_delivery.py::test_nothing_comes_before_its_time[redis-fifo]",
    ),
    "usual_retries": Mutant(
        GONE,
        "The usual delivery leaves what carries its retries in its score to the rest of the script.",
        "tests/contract/test_usual_delivery.py::test_a_retry_in_store_has_the_deliveries_that_its_score_tells[redis-range_merge]",
    ),
    "usual_bytes": Mutant(
        GONE,
        "The usual delivery hands out a bounded number of bytes.",
        "tests/contract/test_usual_delivery.py::test_it_takes_no_more_messages_and_bytes_than_it_may[redis-range_merge]",
    ),
    "usual_never_drained": Mutant(
        If("false"),
        "A slot that the usual delivery has emptied starts again.",
        "tests/contract/test_usual_delivery.py::test_a_slot_of_priorities_that_is_emptied_waits_no_longer[redis]",
    ),
    "usual_idle_unnoticed": Mutant(
        GONE,
        "Who finds nothing by the usual delivery is woken by the next message.",
        "tests/contract/test_usual_delivery.py::test_an_empty_slot_sleeps_until_it_is_woken[redis-range_merge]",
    ),
    "usual_sleeps_unnoticed": Mutant(
        As("redis.call('HSET', control, 'owner', owner, 'deliveries', receipt)"),
        "Who takes everything by the usual delivery is woken by the next message.",
        "tests/contract/test_usual_delivery.py::test_it_notes_its_owner_its_receipt_and_that_it_sleeps[redis-range_merge]",
        "usual_owner_unknown",
    ),
    "usual_owner_unknown": Mutant(
        As("redis.call('HSET', control, 'deliveries', receipt, 'sleeping_until', NEVER)"),
        "The usual delivery sets the owner.",
        "tests/contract/test_usual_delivery.py::test_it_notes_its_owner_its_receipt_and_that_it_sleeps[redis-range_merge]",
    ),
    "usual_retries_of_the_topic": Mutant(
        If("false"),
        "The usual delivery tells the retries of the slot where they differ from the caller's.",
        "tests/contract/test_usual_delivery.py::test_the_retries_of_the_slot_are_told_where_the_caller_has_others[redis]",
    ),
    # --- inserting
    "keeps_what_nobody_began": Mutant(
        GONE,
        "What a ZADD without a begun transaction has written is deleted.",
        "tests/integration/test_inserting.py::test_without_begin_or_the_zadd_the_end_leaves_everything_as_it_was[begin-empty-range_merge]",
    ),
    "overwrites_what_came_meanwhile": Mutant(
        As("local came = redis.call('ZADD', store, unpack(flat))"),
        "What was sent while Store had another name keeps its score.",
        "tests/integration/test_inserting.py::test_what_an_end_that_failed_has_left_is_put_right_by_the_next_one",
    ),
    "counts_what_came_meanwhile_twice": Mutant(
        GONE,
        "A message that waits under both names of Store is one message.",
        "tests/integration/test_inserting.py::test_what_an_end_that_failed_has_left_is_put_right_by_the_next_one",
    ),
    "books_what_failed": Mutant(
        As("return held - (tonumber(noted) or held)"),
        "What was not written is not booked.",
        "tests/integration/test_inserting.py::test_without_begin_or_the_zadd_the_end_leaves_everything_as_it_was",
    ),
    "insert_notes_no_slots": Mutant(
        GONE,
        "An insertion settles the slot count.",
        "tests/contract/test_inserting.py::test_it_leaves_what_a_send_leaves",
    ),
    "insert_wakes_nobody": Mutant(
        GONE,
        "An insertion wakes who sleeps longer.",
        "tests/contract/test_inserting.py::test_it_wakes_who_sleeps_longer",
    ),
    "insert_notes_nothing": Mutant(
        GONE,
        "An insertion of priorities notes since when Store is not empty.",
        "tests/contract/test_inserting.py::test_it_leaves_what_a_send_leaves",
    ),
    "leaves_what_was_left": Mutant(
        GONE,
        "A transaction puts right what one before it has left.",
        "tests/integration/test_inserting.py::test_what_an_end_that_failed_has_left_is_put_right_by_the_next_one",
    ),
    "prepare_sees_no_store": Mutant(
        GONE,
        "A delivery puts right what an insertion has left.",
        "tests/integration/test_inserting.py::test_what_an_end_that_failed_has_left_is_put_right_by_the_next_one",
    ),
    "claim_sees_no_store": Mutant(
        GONE,
        "A claim puts right what an insertion has left.",
        "tests/integration/test_inserting.py::test_what_an_end_that_failed_has_left_is_put_right_by_the_next_one",
    ),
    "shuts_what_it_does_not_see": Mutant(
        GONE,
        "A re-slotting moves what an insertion has left.",
        "tests/integration/test_inserting.py::test_what_an_end_that_failed_has_left_is_put_right_by_the_next_one",
    ),
    "insert_of_foreign_types": Mutant(
        If("false"),
        "Where a key has a foreign type nothing is inserted.",
        "tests/contract/test_inserting.py::test_keys_of_foreign_types_are_left_alone",
    ),
    "inserts_into_a_moved_slot": Mutant(
        If("false"),
        "A client with another slot count inserts nothing.",
        "tests/contract/test_inserting.py::test_a_client_with_another_slot_count_inserts_nothing",
    ),
    "inserts_any_score": Mutant(
        If("false"),
        "No score that could be a retry is inserted.",
        "tests/contract/test_inserting.py::test_scores_that_no_sender_may_use",
    ),
    "insert_ignores_retries_of_priorities": Mutant(
        If("false"),
        "While something has failed each priority is looked at.",
        "tests/contract/test_inserting.py::test_priorities_are_looked_at_while_something_has_failed",
    ),
    "inserts_debounced": Mutant(
        If("false"),
        "A debounced message is looked at.",
        "tests/contract/test_inserting.py::test_a_debounced_message_is_looked_at",
    ),
    "inserts_at_any_time": Mutant(
        If("false"),
        "The time that a sender has read may be a second off.",
        "tests/contract/test_inserting.py::test_the_time_that_a_sender_has_read_may_be_a_second_off",
    ),
    "insert_ignores_retries_that_wait": Mutant(
        If("false"),
        "Where a retry waits each message is looked at.",
        "tests/contract/test_inserting.py::test_a_retry_that_waits_is_looked_at",
    ),
    "insert_ignores_what_rests": Mutant(
        If("false"),
        "Where a retry rests each message is looked at.",
        "tests/contract/test_inserting.py::test_a_retry_that_rests_is_looked_at",
    ),
    "inserts_beyond_the_backlog": Mutant(
        If("false"),
        "Nothing is inserted that would not all fit.",
        "tests/contract/test_inserting.py::test_what_would_not_all_fit_is_looked_at",
    ),
    "takes_an_empty_message_for_the_sentinel": Mutant(
        As("return true"),
        "An empty message of another program is no receipt.",
        "tests/contract/test_inserting.py::test_an_empty_message_of_somebody_else_is_no_receipt",
    ),
    "renames_before_it_is_noted": Mutant(
        GONE,
        "Store gets its other name only after that is noted.",
        "tests/contract/test_inserting.py::test_it_leaves_what_a_send_leaves",
    ),
    "notes_what_was_not_renamed": Mutant(
        GONE,
        "Where Store could not be renamed nothing is noted.",
        "tests/integration/test_inserting.py::test_a_user_who_lacks_a_right_inserts_nothing",
    ),
    # --- fifo
    "fifo_waits_for_the_clock": Mutant(
        GONE,
        "A clock that was set back delays nothing in an empty fifo slot.",
        "tests/contract/test_fifo.py::test_a_clock_that_is_set_back_delays_nothing_in_an_empty_slot[redis]",
    ),
    "fifo_follows_the_clock_back": Mutant(
        As("last_place = now_ms"),
        "No two places of a fifo slot are equal, and they rise with every send.",
        "tests/contract/test_fifo.py::test_no_two_messages_have_the_same_place_also_within_one_millisecond[redis]",
    ),
    "fifo_gives_a_place_twice": Mutant(
        As("if top + STEP < at + 1 then return top end"),
        "Delayed messages that are due in one millisecond have places of their own.",
        "tests/contract/test_fifo.py::test_delayed_messages_of_one_millisecond_keep_their_order_and_places[redis]",
    ),
    "own_retries_above_the_topic": Mutant(
        As("return tonumber(retries) or max_retries, tonumber(seconds)"),
        "A message has at most as many retries as its topic.",
        "tests/contract/test_own_limits.py::test_a_number_above_that_of_the_topic_counts_as_that_of_the_topic[fifo-original-redis]",
    ),
    "limits_of_the_topic": Mutant(
        If("false"),
        "A message has its own number of retries and its own time-out.",
        "tests/contract/test_own_limits.py::test_other_messages_have_the_retries_of_the_topic[fifo-original-redis]",
    ),
    "claimed_with_all_retries": Mutant(
        As("local left = budget(tonumber(score), member, max_retries)"),
        "A lost claim counts against the message's own number of retries.",
        "tests/contract/test_own_limits.py::test_a_lost_claim_counts_against_the_retries_of_the_message[fifo-original-redis]",
    ),
    "later_steps": Mutant(
        As("delay = delay or backoff(max_retries - left, index)"),
        "The back-off of a message with few retries begins with the first step.",
        "tests/contract/test_own_limits.py::test_the_rests_between_few_retries_begin_with_the_shortest[fifo-original-redis]",
    ),
    "time_out_of_the_topic": Mutant(
        If("false"),
        "A delivery times out by its message's own time-out.",
        "tests/contract/test_own_limits.py::test_a_delivery_times_out_by_the_time_out_of_its_message[fifo-original-redis]",
    ),
    "extended_to_the_topic": Mutant(
        If("false"),
        "An extended delivery times out by its message's own time-out.",
        "tests/contract/test_own_limits.py::test_extending_restarts_the_time_out_of_the_message[fifo-original-redis-30]",
    ),
    "own_time_out_shifts": Mutant(
        If("false"),
        "A delivery's own time-out stays what it is when that of its topic changes.",
        "tests/contract/test_own_limits.py::test_a_time_out_of_a_message_stays_what_it_is_when_that_of_the_topic_changes[fifo-original-redis-30-60]",
    ),
    "fifo_forgets_its_place": Mutant(
        GONE,
        "A fifo slot remembers the last place that it gave out.",
        "tests/contract/test_fifo.py::test_no_two_messages_have_the_same_place_also_within_one_millisecond[redis]",
    ),
    "fifo_keeps_the_body": Mutant(
        As("local met = 'present'"),
        "ON_DUPLICATE replace replaces the body of what waits.",
        "tests/contract/test_fifo.py::test_replace_changes_the_body_and_keeps_the_place[redis]",
    ),
    "fifo_moves_what_rests": Mutant(
        As("word, set = met, true"),
        "A send that meets a resting fifo message leaves it at rest.",
        "tests/contract/test_fifo.py::test_a_message_that_rests_after_a_failure_waits_too[redis-replace-replaced-second]",
    ),
    "fifo_without_a_budget": Mutant(
        As("return max_retries"),
        "A fifo message has one retry less after each failure.",
        "tests/contract/test_fifo.py::test_a_failure_counts_against_the_retries_of_its_message_alone[redis]",
    ),
    "fifo_loses_its_place": Mutant(
        GONE,
        "A fifo message comes back to its place after a failure.",
        "tests/contract/test_fifo.py::test_messages_that_failed_together_come_back_in_their_order[redis-backoff0]",
    ),
    "fifo_inherits_failures": Mutant(
        GONE,
        "A newer send of a key does not inherit the failures of the older one.",
        "tests/contract/test_fifo.py::test_a_failed_message_gives_way_to_a_newer_send_of_its_key_and_leaves_it_no_failures[redis]",
    ),
    "fifo_before_its_time": Mutant(
        As("return '+inf'"),
        "Nothing of a fifo slot is handed out before its time.",
        "tests/contract/test_fifo.py::test_a_place_is_due_from_its_millisecond_on[redis]",
    ),
    "fifo_replays_at_once": Mutant(
        As("local again = now_ms"),
        "A replayed fifo message is the last in line.",
        "tests/contract/test_fifo.py::test_a_replayed_message_is_the_last_in_line[redis]",
    ),
    "strict_overtakes": Mutant(
        GONE,
        "A strict slot hands out nothing while something of it is in flight or rests.",
        "tests/contract/test_fifo.py::test_a_strict_slot_holds_behind_a_message_that_failed_until_it_succeeds[redis]",
    ),
    "strict_charges_all": Mutant(
        If("false"),
        "A time-out charges only the first in line of a strict slot.",
        "tests/contract/test_fifo.py::test_of_messages_that_timed_out_together_only_the_first_in_line_is_charged[redis]",
    ),
    "strict_claim_overtakes": Mutant(
        GONE,
        "A strict slot is not claimed while something of it rests.",
        "tests/contract/test_fifo.py::test_a_claim_waits_behind_a_message_that_failed[redis]",
    ),
    "moved_behind_its_place": Mutant(
        If("false"),
        "What arrives from another slot keeps its place before what was sent there since.",
        "tests/contract/test_fifo.py::test_what_arrives_from_another_slot_stands_before_what_was_sent_here_since[redis-store]",
    ),
    # --- re-slotting
    "a_slot_is_shut_again": Mutant(
        GONE,
        "A slot that its re-slotting has opened stays open.",
        "tests/contract/test_moving.py::test_a_slot_is_shut_once_by_each_re_slotting[redis]",
    ),
    "a_later_re_slotting_is_overruled": Mutant(
        GONE,
        "Who is late with an older re-slotting changes nothing.",
        "tests/contract/test_moving.py::test_a_slot_is_shut_once_by_each_re_slotting[redis]",
    ),
    "shut_though_it_holds_something": Mutant(
        GONE,
        "Where nobody can tell new slots, a slot is shut only when it is empty.",
        "tests/contract/test_moving.py::test_a_slot_that_has_to_be_empty_is_shut_only_when_it_is[redis]",
    ),
    "shut_slots_hand_out": Mutant(
        If("shut"),
        "A slot whose messages move hands out nothing.",
        "tests/contract/test_moving.py::test_a_shut_slot_hands_out_nothing_until_it_is_opened[redis-range_merge]",
    ),
    "receipts_fall": Mutant(
        If("false"),
        "Receipts rise across a re-slotting.",
        "tests/contract/test_moving.py::test_receipts_go_on_above_those_of_the_slots_that_messages_came_from[redis]",
    ),
    "pauses_end": Mutant(
        GONE,
        "What was paused stays paused.",
        "tests/contract/test_moving.py::test_what_was_paused_stays_paused[redis]",
    ),
    "progress_overlooks_replays": Mutant(
        As("local counted = redis.call('HMGET', stats, 'rescheduled', 'rescheduled')"),
        "What a person sends back to an earlier state is noticed.",
        "tests/contract/test_moving.py::test_the_progress_of_a_re_slotting_says_how_far_a_slot_is[redis]",
    ),
    "moved_while_in_flight": Mutant(
        GONE,
        "Nothing leaves a slot in which something is in flight.",
        "tests/contract/test_moving.py::test_nothing_leaves_while_something_is_in_flight[redis]",
    ),
    "what_left_is_forgotten": Mutant(
        If("false"),
        "What has left is kept until it is known to have arrived.",
        "tests/contract/test_moving.py::test_a_hand_over_that_is_repeated_arrives_once[redis]",
    ),
    "moved_out_of_an_open_slot": Mutant(
        GONE,
        "Only the re-slotting that shut a slot moves its messages.",
        "tests/contract/test_moving.py::test_nothing_leaves_or_arrives_where_the_slot_is_open_or_another_was_here[redis]",
    ),
    "moved_in_twice": Mutant(
        GONE,
        "A hand-over that is repeated arrives once.",
        "tests/contract/test_moving.py::test_a_hand_over_that_is_repeated_arrives_once[redis]",
    ),
    "moved_into_an_open_slot": Mutant(
        GONE,
        "Nothing arrives in a slot that is open again.",
        "tests/contract/test_moving.py::test_nothing_leaves_or_arrives_where_the_slot_is_open_or_another_was_here[redis]",
    ),
    "moved_over_a_later_send": Mutant(
        If("false"),
        "A copy that was sent meanwhile is the later one.",
        "tests/contract/test_moving.py::test_a_fresh_message_merges_with_the_later_send[redis-range_merge]",
    ),
    "moved_without_its_body": Mutant(
        GONE,
        "A fresh message that moves in over a resting one has its own body.",
        "tests/contract/test_bodies.py::test_a_fresh_message_that_moves_in_over_a_resting_one_has_its_own_body[redis-range_merge]",
    ),
    "moved_over_a_later_death": Mutant(
        If("true"),
        "Of two deaths the later one stays.",
        "tests/contract/test_moving.py::test_of_two_deaths_the_later_one_stays[redis-target]",
    ),
    # --- fragments
    "lossy_text": Mutant(
        As("return tostring(number)"),
        "Scores keep every digit on their way to Redis, so that the budget in a resting score survives.",
        "tests/contract/test_gate.py::test_while_one_owner_holds_anything_no_other_gets_anything[redis-range_merge]",
    ),
    "one_delivery_more": Mutant(
        As("return bounded(math.floor(q), 0, most)"),
        "Each failure spends one retry: 1 + MAX_RETRIES deliveries, exactly.",
        "tests/contract/test_duplicates.py::test_a_delivery_failed_twice_in_one_call_fails_once[redis-range_merge]",
    ),
    "joined_with_former_retries": Mutant(
        As("return bounded(math.floor(q) - 1, 0, max_retries)"),
        "A message that has joined a later send is tried at most as often as that one says.",
        "tests/contract/test_accumulate.py::test_what_has_joined_a_later_send_has_its_limits[redis-fail-0]",
        mark="one_delivery_more",
    ),
    "budget_ignores_settings": Mutant(
        As("if not is_retry(score) then return 16 end"),
        "A fresh message has the slot's own number of retries.",
        "tests/contract/test_priorities.py::test_a_delivery_of_fresh_messages_and_retries_knows_the_retries_of_each[redis-original]",
    ),
    "retries_sink": Mutant(
        If("false"),
        "A retry keeps its message's own priority.",
        "tests/contract/test_layout.py::test_the_keys_and_values_of_a_whole_life[redis-body-priority]",
    ),
    "priority_floor": Mutant(
        As("return 16"),
        "With more than 16 retries, scores up to MAX_RETRIES are retries too.",
        "tests/contract/test_retries.py::test_max_retries_is_exact_whatever_it_is[redis-17-lowest]",
    ),
    "budget_at_the_largest_priority": Mutant(
        As("local LARGEST_WITH_RETRIES = 8796093022208"),
        "At the largest priority there is room for an odd number of retries below the point.",
        "tests/contract/test_retries.py::test_the_largest_priorities_carry_an_exact_budget_too[redis-8796093022208]",
    ),
    "time_out_a_second_early": Mutant(
        As(
            "local late = redis.call('ZRANGEBYSCORE', prepare, '-inf', '(' .. text_of((now_s - timeout + 1) * 1000),"
        ),
        "A delivery has timed out when more whole seconds than TIMEOUT have passed.",
        "tests/contract/test_time.py::test_a_delivery_times_out_when_more_than_the_time_out_has_passed_in_whole_seconds[redis-0-0-1-range_merge]",
    ),
    "future_stamps_stay": Mutant(
        As("for i = 1, 0, 2 do"),
        "A record dated more than a time-out ahead is dated now.",
        "tests/contract/test_time.py::test_a_delivery_dated_more_than_a_time_out_ahead_is_dated_now[redis-range_merge]",
    ),
    "promote_overwrites": Mutant(
        As("if alive then count('dropped') end\nif false then"),
        "A rest that ends gives way to the copy that waits.",
        "tests/contract/test_strangers.py::test_a_resting_retry_that_finds_a_strangers_send_is_dropped[redis-range_merge]",
    ),
    "promote_early": Mutant(
        As(
            "local rested = redis.call('ZRANGEBYSCORE', retry, '-inf', '(' .. text_of(now_ms + 1001), 'WITHSCORES',"
        ),
        "A rest lasts as long as was said.",
        "tests/contract/test_paging.py::test_every_state_shows_what_belongs_to_it[redis-range_merge]",
    ),
    "promote_gives_a_retry": Mutant(
        As("local q = bounded(math.floor(tonumber(rested[i + 1]) % 1 * 1024 + 1.5), 1, 999)"),
        "The budget of a resting message is what it was when it began to rest.",
        "tests/contract/test_layout.py::test_the_keys_and_values_of_a_whole_life[redis-body-range_merge]",
    ),
    "rollback_overwrites": Mutant(
        If("false"),
        "A failed delivery gives way to the newer send that waits.",
        "tests/contract/test_states.py::test_rollback_with_retries_left[range_merge-body-serial-redis-0-w-FW]",
    ),
    "dead_one_failure_early": Mutant(
        If("left <= 1"),
        "A message dies when it fails with no retries left, not before.",
        "tests/contract/test_layout.py::test_the_keys_and_values_of_a_whole_life[redis-body-range_merge]",
        mark="deliveries_left",
    ),
    "never_dies": Mutant(
        If("left < 0"),
        "A message that fails with no retries left dies.",
        "tests/contract/test_layout.py::test_the_keys_and_values_of_a_whole_life[redis-body-range_merge]",
        mark="deliveries_left",
    ),
    "removed_returns": Mutant(
        If("mark == 'gone'"),
        "A delivery that a person removed ends for good.",
        "tests/contract/test_duplicates.py::test_a_marked_delivery_that_is_ended_twice_in_one_call_is_counted_once[redis-commit-remove]",
    ),
    "buried_returns": Mutant(
        If("mark == 'grave'"),
        "A delivery that a person buried ends in Dead.",
        "tests/contract/test_duplicates.py::test_a_marked_delivery_that_is_ended_twice_in_one_call_is_counted_once[redis-commit-bury]",
    ),
    "reject_is_a_failure": Mutant(
        If("what == 'refused'"),
        "A rejected message is dead at once.",
        "tests/contract/test_paging.py::test_every_state_shows_what_belongs_to_it[redis-range_merge]",
    ),
    "body_outlives": Mutant(
        GONE,
        "The last live copy takes its body along.",
        "tests/contract/test_gate.py::test_after_a_lost_reply_of_prepare_the_owner_is_told_what_it_holds[redis-key-range_merge]",
    ),
    "body_torn_from_the_living": Mutant(
        GONE,
        "A copy that still waits keeps its body.",
        "tests/contract/test_states.py::test_reject[range_merge-key-serial-redis-FW]",
    ),
    "body_lands_on_a_newer_one": Mutant(
        As("redis.call('HSET', body, member, delivered)"),
        "A delivery that ends leaves the newer body to the copy that waits.",
        "tests/contract/test_bodies.py::test_what_is_rejected_dies_with_the_body_it_was_handed_out_with[range_merge-redis]",
        mark="body_comes_back",
    ),
    "body_does_not_come_back": Mutant(
        GONE,
        "What comes back has the body that it was handed out with.",
        "tests/contract/test_bodies.py::test_what_runs_out_of_retries_dies_with_its_body_once_nothing_newer_waits[range_merge-redis-rollback]",
        mark="body_comes_back",
    ),
    "delivered_body_outlives": Mutant(
        GONE,
        "What is in flight no more has no body there.",
        "tests/contract/test_bodies.py::test_what_is_rejected_dies_with_the_body_it_was_handed_out_with[range_merge-redis]",
    ),
    "dead_with_the_newer_body": Mutant(
        As("die(member, 'rejected', text, origin, failure, 1, redis.call('HGET', body, member))"),
        "What is rejected dies with the body that it was handed out with.",
        "tests/contract/test_bodies.py::test_what_is_rejected_dies_with_the_body_it_was_handed_out_with[range_merge-redis]",
    ),
    "buried_with_the_newer_body": Mutant(
        As("die(member, 'buried', text, origin, failure, 1, redis.call('HGET', body, member))"),
        "What was marked as buried dies with the body that it was handed out with.",
        "tests/contract/test_bodies.py::test_what_a_person_buries_in_flight_dies_with_its_body_and_the_newer_one_waits[range_merge-redis-commit]",
    ),
    "exhausted_without_its_body": Mutant(
        As("die(member, what, text, origin, failure, 1, nil)"),
        "What runs out of retries dies with its body.",
        "tests/contract/test_bodies.py::test_what_runs_out_of_retries_dies_with_its_body_once_nothing_newer_waits[range_merge-redis-rollback]",
    ),
    "older_death_overwrites": Mutant(
        If("false"),
        "Of two copies that a person buries the newer one stays in Dead.",
        "tests/contract/test_bodies.py::test_of_two_copies_that_are_buried_the_newer_body_stays[range_merge-redis-marked_again0-commit]",
        mark="older_death",
    ),
    "outlived_without_a_grave": Mutant(
        If("outlived ~= ''"),
        "What was buried dies where its newer copy is in Dead no more.",
        "tests/contract/test_bodies.py::test_what_was_buried_with_a_newer_copy_dies_where_that_one_is_gone[range_merge-redis]",
        mark="older_death",
    ),
    "expired_without_its_body": Mutant(
        As("die(member, 'lapsed', '', score, failure, 0, nil)"),
        "What expires dies with its body.",
        "tests/contract/test_bodies.py::test_what_expires_dies_with_its_body[redis-prepare]",
    ),
    "nobody_notes_since_when": Mutant(
        If("false"),
        "It is known since when something of priority waits.",
        "tests/contract/test_undrained.py::test_sends_do_not_move_it_until_all_that_waited_is_taken[redis]",
        mark="noted_once",
    ),
    "noted_anew": Mutant(
        If("waits"),
        "What is sent later does not make younger what waits.",
        "tests/contract/test_undrained.py::test_sends_do_not_move_it_until_all_that_waited_is_taken[redis]",
        mark="noted_once",
    ),
    "never_drained": Mutant(
        If("false"),
        "A slot that was emptied starts again.",
        "tests/contract/test_undrained.py::test_sends_do_not_move_it_until_all_that_waited_is_taken[redis]",
    ),
    "times_are_noted_too": Mutant(
        GONE,
        "Where scores are times nothing is noted.",
        "tests/contract/test_undrained.py::test_topics_of_time_note_nothing[redis-range_merge]",
    ),
    "send_notes_nothing": Mutant(
        GONE,
        "The first priority that waits is noted.",
        "tests/contract/test_undrained.py::test_sends_do_not_move_it_until_all_that_waited_is_taken[redis]",
    ),
    "alone_notes_nothing": Mutant(
        GONE,
        "The first priority that waits is noted, also where it is sent alone.",
        "tests/contract/test_undrained.py::test_sends_do_not_move_it_until_all_that_waited_is_taken[redis]",
    ),
    "alone_is_noted_again": Mutant(
        If("topic_type == 'priority'"),
        "What is sent later, also alone, does not make younger what waits.",
        "tests/contract/test_undrained.py::test_sends_do_not_move_it_until_all_that_waited_is_taken[redis]",
    ),
    "alone_settles_no_retries": Mutant(
        As("local is_plain = n == 1"),
        "The first priority that waits settles which scores are retries, also where it is sent alone.",
        "tests/contract/test_configuring.py::test_the_retries_of_a_priority_topic_change_only_where_no_live_score_would_read_otherwise[redis-False-16-20]",
    ),
    "record_outlives": Mutant(
        GONE,
        "inflight holds exactly the members of Prepare.",
        "tests/contract/test_duplicates.py::test_a_marked_delivery_that_is_ended_twice_in_one_call_is_counted_once[redis-commit-bury]",
    ),
    "no_rest": Mutant(
        If("false"),
        "A message that has failed rests before its next delivery.",
        "tests/contract/test_time.py::test_time_out_and_promote_take_a_limited_number[redis-range_merge]",
    ),
    "marked_stays": Mutant(
        As("local origin, failure, kept"),
        "A mark ends a delivery that succeeded.",
        "tests/contract/test_duplicates.py::test_a_marked_delivery_that_is_ended_twice_in_one_call_is_counted_once[redis-commit-remove]",
    ),
    "death_miscounted": Mutant(
        As("if redis.call('ZADD', dead, text_of(now_ms), member) == 0 then count('died') end"),
        "A member that dies again replaces its earlier death in the ledger.",
        "tests/contract/test_persons.py::test_who_dies_again_is_overwritten[redis-range_merge]",
    ),
    "no_jitter": Mutant(
        If("false"),
        "Messages that fail together come back spread out.",
        "tests/contract/test_time.py::test_the_back_off_doubles_to_its_cap_with_up_to_half_less[redis-range_merge]",
    ),
    "no_doubling": Mutant(
        As("local delay = math.min(backoff_cap, backoff_base)"),
        "The rest doubles with each failure.",
        "tests/contract/test_time.py::test_the_back_off_doubles_to_its_cap_with_up_to_half_less[redis-range_merge]",
    ),
    "merge_keeps_the_retry": Mutant(
        As("local retried = false"),
        "A send that meets a waiting retry supersedes it.",
        "tests/contract/test_states.py::test_send[range_merge-body-serial-redis-w]",
    ),
    "resting_retry_stays": Mutant(
        GONE,
        "A send that meets a resting retry supersedes it.",
        "tests/contract/test_sending.py::test_what_rests_counts_as_backlog_and_what_runs_does_not[redis-range_merge]",
    ),
    "backlog_unlimited": Mutant(
        As("local room = math.huge"),
        "A slot refuses what exceeds its part of MAX_BACKLOG.",
        "tests/contract/test_sending.py::test_a_full_slot_refuses_what_is_new_and_takes_what_merges[redis-range_merge]",
    ),
    "retries_unsettled": Mutant(
        GONE,
        "The first priority that waits settles which scores are retries.",
        "tests/contract/test_configuring.py::test_the_retries_of_a_priority_topic_change_only_where_no_live_score_would_read_otherwise[redis-False-16-20]",
    ),
    "send_wakes_nobody": Mutant(
        GONE,
        "A send wakes who sleeps past its due time.",
        "tests/contract/test_waking.py::test_a_send_wakes_who_sleeps_without_end_exactly_once[redis-range_merge]",
    ),
    "refusal_after_a_write": Mutant(
        As(
            "local n = #members\nredis.call('HDEL', control, '')\nredis.pcall('HSET', control, 'slots', slots)"
        ),
        "A full server refuses a send, and nothing has been written.",
        "tests/integration/test_faults.py::test_a_full_server_refuses_sends_and_nothing_is_written[body-range_merge]",
    ),
    "types_unchecked": Mutant(
        If("false"),
        "Every key's type is looked at before the first write.",
        "tests/integration/test_faults.py::test_a_key_of_a_foreign_type_is_named_and_nothing_changes[ack_claim]",
    ),
    "wakes_without_end": Mutant(
        GONE,
        "Who sleeps is woken once.",
        "tests/contract/test_waking.py::test_a_send_wakes_who_sleeps_without_end_exactly_once[redis-range_merge]",
    ),
    "wakes_too_many": Mutant(
        If("sleeper"),
        "What comes later than the sleeper asks anyway wakes nobody.",
        "tests/contract/test_waking.py::test_a_rollback_wakes_who_sleeps_longer_than_the_back_off[redis-range_merge]",
    ),
    "half_the_ledger": Mutant(
        As("counts[name] = (counts[name] or 0) + 1"),
        "The ledger counts messages, not calls.",
        "tests/contract/test_configuring.py::test_a_paused_slot_hands_out_nothing_and_takes_everything_else[redis-range_merge]",
    ),
    "cursor_by_member_alone": Mutant(
        As("if x ~= y then return x > y end"),
        "A page goes on behind the cursor, also where its entry is gone.",
        "tests/contract/test_paging.py::test_entries_that_stay_are_shown_once_while_others_come_and_go[redis-False]",
    ),
    "page_repeats": Mutant(
        As("if descending then return redis.call('ZREVRANK', key, member) end"),
        "No entry is on two pages.",
        "tests/contract/test_paging.py::test_pages_show_every_entry_once_in_order[redis-1-True]",
    ),
    "page_skips": Mutant(
        As("return redis.call('ZRANK', key, member) + 2"),
        "No entry is between two pages.",
        "tests/contract/test_paging.py::test_pages_show_every_entry_once_in_order[redis-1-False]",
    ),
    "rows_beyond_the_bound": Mutant(
        If("false"),
        "A listing keeps to its highest score.",
        "tests/contract/test_paging.py::test_pages_keep_to_their_scores[redis-False]",
    ),
    "time_of_the_caller": Mutant(
        As("local now_s = math.floor(now_us / 1000000) + 1"),
        "Prepare holds the second in which a message was handed out.",
        "tests/contract/test_layout.py::test_the_keys_and_values_of_a_whole_life[redis-body-range_merge]",
    ),
    # --- consuming
    "epoch_off": Mutant(
        If("false"),
        "An owner of an earlier epoch is fenced.",
        "tests/contract/test_gate.py::test_epochs_rise_and_an_old_one_is_fenced[redis]",
    ),
    "fenced_uncounted": Mutant(
        GONE,
        "Whoever is fenced is counted.",
        "tests/contract/test_gate.py::test_epochs_rise_and_an_old_one_is_fenced[redis]",
    ),
    "gate_off": Mutant(
        As("if serial then shut = false end"),
        "While one owner's deliveries are open, nobody else takes from the slot.",
        "tests/contract/test_configuring.py::test_a_paused_slot_hands_out_nothing_and_takes_everything_else[redis-range_merge]",
        mark="gate",
    ),
    "gate_ignores_claims": Mutant(
        As("if serial then shut = holder ~= owner and (in_flight > 0) end"),
        "An open claim keeps the gate shut.",
        "tests/contract/test_gate.py::test_an_open_claim_shuts_the_gate_for_all_but_the_slots_owner[redis-range_merge]",
        mark="gate",
    ),
    "room_off": Mutant(
        As("local shut = false"),
        "A slot that is not serial has at most MAX_PREPARED in flight.",
        "tests/contract/test_gate.py::test_a_topic_without_a_gate_gives_to_everybody_up_to_max_prepared[redis-range_merge]",
    ),
    "debounces_for_ever": Mutant(
        As("local due = now_ms + range_ms"),
        "No debounced message waits longer than MAX_WAIT after its first send.",
        "tests/contract/test_debounce.py::test_no_message_waits_longer_than_max_wait[redis-1500]",
    ),
    "forgets_the_first_send": Mutant(
        As("local units = last_units()"),
        "The wait of a debounced message is counted from its first send.",
        "tests/contract/test_debounce.py::test_no_message_waits_longer_than_max_wait[redis-1500]",
    ),
    "keeps_the_first_wait": Mutant(
        As("  again = function(score) if true then return score end"),
        "Each send of a debounced message starts its wait again.",
        "tests/contract/test_debounce.py::test_each_send_starts_the_wait_again[redis]",
    ),
    "collects_the_last": Mutant(
        GONE,
        "A topic with ACCUMULATE keeps the bodies of all merged sends.",
        "tests/contract/test_accumulate.py::test_bodies_are_kept_in_the_order_of_sending[redis]",
    ),
    "collects_without_end": Mutant(
        GONE,
        "A message collects up to ACCUMULATE bodies, and up to MAX_BODY bytes.",
        "tests/contract/test_accumulate.py::test_a_full_message_is_due_at_once_and_refuses_until_it_is_taken[redis]",
    ),
    "full_but_not_due": Mutant(
        GONE,
        "A full message is due at once.",
        "tests/contract/test_accumulate.py::test_a_full_message_is_due_at_once_and_refuses_until_it_is_taken[redis]",
    ),
    "refused_and_counted": Mutant(
        GONE,
        "A send that does not fit is refused.",
        "tests/contract/test_accumulate.py::test_within_one_call_what_does_not_fit_is_refused[redis]",
    ),
    "collecting_never_dies": Mutant(
        If("false"),
        "A collecting message that fails keeps the retries it has left.",
        "tests/contract/test_accumulate.py::test_a_message_that_always_fails_dies_though_sends_go_on[redis]",
    ),
    "collected_bodies_dropped": Mutant(
        GONE,
        "A copy that gives way to a newer one leaves it its collected bodies.",
        "tests/contract/test_accumulate.py::test_a_delivery_that_does_not_succeed_joins_what_was_sent_meanwhile[redis-fail]",
    ),
    "failed_bodies_dropped": Mutant(
        GONE,
        "A failed delivery leaves its bodies to the copy that waits.",
        "tests/contract/test_accumulate.py::test_a_delivery_that_does_not_succeed_joins_what_was_sent_meanwhile[redis-time_out]",
    ),
    "released_bodies_dropped": Mutant(
        GONE,
        "A delivery that is given back leaves its bodies to the copy that waits.",
        "tests/contract/test_accumulate.py::test_a_delivery_that_does_not_succeed_joins_what_was_sent_meanwhile[redis-release]",
    ),
    "claimed_bodies_dropped": Mutant(
        GONE,
        "A claim that is returned leaves its bodies to the copy that waits.",
        "tests/contract/test_accumulate.py::test_a_claim_that_is_returned_joins_what_was_sent_meanwhile[redis]",
    ),
    "replayed_bodies_dropped": Mutant(
        GONE,
        "A replay leaves its bodies to the copy that waits.",
        "tests/contract/test_accumulate.py::test_a_replay_comes_before_what_waits[redis]",
    ),
    "earlier_death_dropped": Mutant(
        GONE,
        "A key that dies again keeps the bodies of its earlier death.",
        "tests/contract/test_accumulate.py::test_a_key_that_dies_twice_keeps_all_its_bodies[redis]",
    ),
    "moved_bodies_dropped": Mutant(
        As("    if rest ~= '' and redis.call('HSETNX', body, member, rest) == 2 and collects(rest) then"),
        "A message that moves to another slot leaves its bodies to the copy that was sent there.",
        "tests/contract/test_accumulate.py::test_what_moves_to_another_slot_joins_what_was_sent_there[redis-store]",
    ),
    "paceless": Mutant(
        GONE,
        "A slot delivers nothing beyond its rate.",
        "tests/contract/test_pace.py::test_a_slot_delivers_no_more_than_its_rate[redis-range_merge]",
    ),
    "pace_without_spending": Mutant(
        As("spent_us = string.format('%.0f', emptied_at())"),
        "Each delivery is spent from the slot's rate.",
        "tests/contract/test_pace.py::test_a_slot_delivers_no_more_than_its_rate[redis-range_merge]",
    ),
    "paced_out_by_a_clock": Mutant(
        GONE,
        "A clock that was set back does not stop a slot with a rate.",
        "tests/contract/test_pace.py::test_a_clock_that_was_set_back_does_not_stop_a_paced_slot[redis-range_merge]",
    ),
    "paused_hands_out": Mutant(
        GONE,
        "A paused slot hands out nothing.",
        "tests/contract/test_configuring.py::test_a_paused_slot_hands_out_nothing_and_takes_everything_else[redis-range_merge]",
    ),
    "moved_hands_out": Mutant(
        GONE,
        "A caller with another slot count is told, and nothing changes.",
        "tests/contract/test_sending.py::test_a_client_with_another_slot_count_is_told_and_nothing_changes[redis-range_merge]",
    ),
    "receipts_repeat": Mutant(
        As("local receipt = last_receipt"),
        "A receipt is never used twice.",
        "tests/contract/test_gate.py::test_receipts_rise_with_every_prepare_and_not_with_anything_else[redis-range_merge]",
    ),
    "receipts_come_again": Mutant(
        As("local ahead = 0"),
        "No receipt is used again after a fail-over that lost deliveries.",
        "tests/contract/test_gate.py::test_receipts_go_on_above_those_that_a_fail_over_has_lost[redis-None-range_merge]",
    ),
    "receipts_take_no_turns": Mutant(
        As("receipt = receipt + ahead"),
        "With a limit of one, retries take turns with fresh messages, however the clock goes.",
        "tests/contract/test_time.py::"
        "test_one_at_a_time_retries_and_fresh_messages_take_turns_however_the_clock_goes[redis-2-range_merge]",
    ),
    "receipts_lose_digits": Mutant(
        As("local ticket = receipt .. ' '"),
        "A delivery in flight is known by its whole receipt.",
        "tests/contract/test_gate.py::test_receipts_rise_with_every_prepare_and_not_with_anything_else[redis-range_merge]",
    ),
    "in_flight_twice": Mutant(
        If("true"),
        "The newer copy of what runs waits for its end.",
        "tests/contract/test_priorities.py::test_a_group_of_equals_is_drained_without_a_gap_while_copies_of_it_run[redis]",
    ),
    "suspect_in_company": Mutant(
        As("local alone = false"),
        "A member whose last end was a time-out is handed out alone.",
        "tests/contract/test_time.py::test_a_message_that_timed_out_is_handed_out_alone[redis-True-range_merge]",
    ),
    "suspect_untold": Mutant(
        As("more = more or i < total"),
        "Who is handed a message that timed out is told so.",
        "tests/contract/test_time.py::test_a_message_that_timed_out_is_handed_out_alone[redis-True-range_merge]",
    ),
    "company_for_a_suspect": Mutant(
        If("false and suspicious(redis.call('ZRANGE', prepare, 0, 0)[1])"),
        "Nobody joins a suspicious member while it runs.",
        "tests/contract/test_time.py::test_a_message_that_timed_out_is_handed_out_alone[redis-True-range_merge]",
    ),
    "all_retries": Mutant(
        As("share = math.min(#rested / 2, limit)"),
        "At most half of a prepare is retries while fresh messages are due.",
        "tests/contract/test_time.py::test_at_most_half_of_a_prepare_is_retries_while_fresh_messages_are_due[redis-range_merge]",
    ),
    "odd_one_never_a_retry": Mutant(
        As("local share = math.floor(limit / 2)"),
        "With a limit of one, retries take turns with fresh messages.",
        "tests/contract/test_time.py::"
        "test_one_at_a_time_retries_and_fresh_messages_take_turns_however_the_clock_goes[redis-0-range_merge]",
    ),
    "before_their_time": Mutant(
        As("return redis.call('ZRANGEBYSCORE', store, '(999', '+inf', 'WITHSCORES', 'LIMIT', 0, scan),"),
        "Nothing is handed out before it is due.",
        "tests/contract/test_strangers.py::test_any_score_is_served_or_waits_and_never_costs_more_than_a_full_budget[redis-inf-range_merge]",
    ),
    "expires_at_once": Mutant(
        As("return expires and expires < now_ms"),
        "A message without a time to live never expires.",
        "tests/contract/test_accumulate.py::test_bodies_are_kept_in_the_order_of_sending[redis]",
    ),
    "expired_stays": Mutant(
        GONE,
        "What has expired leaves Store.",
        "tests/contract/test_persons.py::test_a_keyed_message_is_not_delivered_after_its_expiry[redis-range_merge]",
    ),
    "expired_leaves_its_retry": Mutant(
        As("count('dropped', 0)"),
        "A resting retry of what has expired is given up.",
        "tests/contract/test_strangers.py::test_an_expired_message_sent_by_a_stranger_while_it_rests_dies_once[redis]",
    ),
    "expired_is_delivered": Mutant(
        If("false"),
        "What has expired is not delivered.",
        "tests/contract/test_persons.py::test_a_keyed_message_is_not_delivered_after_its_expiry[redis-range_merge]",
    ),
    "bytes_unbounded": Mutant(
        If("refused or (taken > 0 and alone)"),
        "One prepare hands out a bounded number of bytes.",
        "tests/contract/test_priorities.py::test_a_prepare_takes_at_most_so_many_bytes_but_at_least_one_message[redis-True-range_merge]",
    ),
    "plain_bytes_unbounded": Mutant(
        If("false"),
        "Also of messages that have neither failed nor bodies one prepare hands out a bounded number of bytes.",
        "tests/contract/test_priorities.py::test_a_prepare_takes_at_most_so_many_bytes_but_at_least_one_message[redis-False-range_merge]",
    ),
    "retries_as_fresh": Mutant(
        If("false"),
        "A retry among fresh priorities has the deliveries that are left of it.",
        "tests/contract/test_priorities.py::test_a_delivery_of_fresh_messages_and_retries_knows_the_retries_of_each[redis-original]",
    ),
    "stranger_leaves_a_retry": Mutant(
        As("if redis.call('ZCARD', retry) > 0 then count('dropped', 0) end"),
        "A resting retry is superseded when the copy a stranger sent is taken.",
        "tests/contract/test_strangers.py::test_a_strangers_send_supersedes_the_resting_retry_when_it_is_taken[redis-body-range_merge]",
    ),
    "owner_unknown": Mutant(
        As("local fields = { 'deliveries', text_of(receipt) }"),
        "Taking sets the owner.",
        "tests/contract/test_configuring.py::test_a_paused_slot_hands_out_nothing_and_takes_everything_else[redis-range_merge]",
    ),
    "sleeps_unnoticed": Mutant(
        GONE,
        "Who is left idle is noted, so that it can be woken.",
        "tests/contract/test_gate.py::test_while_one_owner_holds_anything_no_other_gets_anything[redis-range_merge]",
    ),
    "takes_the_last_and_sleeps_unnoticed": Mutant(
        GONE,
        "Who takes the last message that is due is woken by the next one.",
        "tests/contract/test_waking.py",
    ),
    "sleeps_beside_what_can_be_taken": Mutant(
        As("local sleeps = saw_all and not (more or behind or claimed or suspect)"),
        "Who takes beside a delivery asks again when that ends: a copy of its message may wait.",
        "tests/contract/test_waking.py::test_who_takes_beside_a_delivery_does_not_sleep_because_its_copy_may_wait[redis-range_merge]",
    ),
    "sleeps_behind_a_cursor": Mutant(
        As("local saw_all = true"),
        "Who continues behind an entry asks again: what lies before it may be free by now.",
        "tests/contract/test_waking.py::test_who_continues_behind_an_entry_does_not_sleep_because_others_may_wait_before_it[redis-range_merge]",
    ),
    "next_due_beyond_all_instants": Mutant(
        As("due = math.min(due, math.ceil(tonumber(head[2])))"),
        "A foreign lease is read as an instant that everybody can read.",
        "tests/contract/test_strangers.py::test_a_foreign_lease_without_an_end_is_read_as_late_as_an_instant_can_be[redis-1e+20-range_merge]",
    ),
    "next_due_forgets_retries": Mutant(
        GONE,
        "The next due time is the earliest of Store, Retry and time-outs.",
        "tests/contract/test_waking.py::test_a_rollback_wakes_who_sleeps_longer_than_the_back_off[redis-range_merge]",
    ),
    "no_upkeep": Mutant(
        As("local timed_out = 0"),
        "A prepare first ends what has timed out.",
        "tests/contract/test_gate.py::test_after_a_time_out_the_old_receipt_is_stale_although_the_message_runs_again[redis]",
    ),
    "no_random_start": Mutant(
        As("local start = 0"),
        "Of equal priorities each is first as often as any other.",
        "tests/contract/test_priorities.py::test_among_equals_each_comes_first_about_equally_often[redis]",
    ),
    "prepare_needs_memory": Mutant(
        GONE,
        "A full server lets the queue drain: prepare.",
        "tests/integration/test_faults.py::test_a_full_server_drains_whether_listeners_succeed_or_fail[range_merge]",
    ),
    "commit_anyone": Mutant(
        If("record"),
        "Only the holder of its receipt commits a delivery.",
        "tests/contract/test_gate.py::test_a_receipt_other_than_the_deliverys_changes_nothing[redis--1-commit-range_merge]",
    ),
    "commit_ignores_marks": Mutant(
        If("false"),
        "A delivery that a person marked ends as removed or died, also when it succeeds.",
        "tests/contract/test_duplicates.py::test_a_marked_delivery_that_is_ended_twice_in_one_call_is_counted_once[redis-commit-remove]",
    ),
    "commit_takes_the_body": Mutant(
        If("false"),
        "What a stranger sends while it runs has its body when the one that ran is committed.",
        "tests/contract/test_bodies.py::test_what_a_stranger_sends_meanwhile_has_the_body_of_what_ran[range_merge-redis-commit]",
    ),
    "commit_takes_the_diagnosis": Mutant(
        If("true"),
        "The copy that waits keeps its diagnosis when the one that ran is committed.",
        "tests/contract/test_persons.py::test_a_failure_record_stays_while_the_member_lives_and_tells_the_last_failure[redis-range_merge]",
    ),
    "commit_leaves_the_body": Mutant(
        GONE,
        "What is done takes its body along.",
        "tests/contract/test_bodies.py::test_bodies_by_the_hundred_are_handed_out_and_end[range_merge-redis]",
    ),
    "commit_opens_silently": Mutant(
        GONE,
        "Whoever opens the gate wakes who waits for it.",
        "tests/contract/test_waking.py::test_who_met_a_shut_gate_is_woken_when_it_opens_and_not_before[redis-commit-range_merge]",
    ),
    "commit_miscounts": Mutant(
        As("redis.call('ZREM', prepare, unpack(done))\ncount('committed')"),
        "Each commit is counted once for each message.",
        "tests/contract/test_gate.py::test_receipts_rise_with_every_prepare_and_not_with_anything_else[redis-range_merge]",
    ),
    "commit_delivery_of_a_later_delivery": Mutant(
        If("false"),
        "What was handed out later is not committed with what was handed out before.",
        "tests/contract/test_fifo.py::test_what_was_handed_out_since_is_not_committed_with_what_was_before[redis]",
    ),
    "alone_beside_others": Mutant(
        As("local alone = true"),
        "A delivery is said to be alone only if nothing else is in flight.",
        "tests/contract/test_gate.py::test_what_is_delivered_beside_another_delivery_is_not_alone[redis-40-range_merge]",
    ),
    "alone_beside_failures": Mutant(
        GONE,
        "Where failures have to be deleted by name, no whole commit is tried.",
        "tests/contract/test_gate.py::test_what_is_delivered_from_a_slot_with_failures_is_not_alone[redis-range_merge]",
    ),
    "commit_delivery_ignores_marks": Mutant(
        If("false"),
        "What a person has marked is not committed unseen.",
        "tests/contract/test_fifo.py::test_what_is_marked_is_committed_by_name_only",
    ),
    "mark_unnoted": Mutant(
        GONE,
        "A mark is noted where commit_delivery sees it.",
        "tests/contract/test_fifo.py::test_what_is_marked_is_committed_by_name_only",
    ),
    "commit_delivery_counts_what_has_ended": Mutant(
        If("false"),
        "What has ended otherwise is not counted as committed.",
        "tests/contract/test_fifo.py::test_what_has_ended_otherwise_is_not_committed_with_the_others",
    ),
    "commit_delivery_leaves_records": Mutant(
        If("false"),
        "What is committed leaves neither body nor failure behind.",
        "tests/contract/test_fifo.py::test_what_has_a_body_or_a_failure_is_committed_by_name_only",
    ),
    "commit_delivery_opens_silently": Mutant(
        GONE,
        "A commit that opens the gate wakes the worker that waits for it, also if it names no messages.",
        "tests/contract/test_fifo.py::test_everything_in_flight_is_committed_without_naming_it[redis-1]",
    ),
    "rollback_anyone": Mutant(
        If("record and score"),
        "Only the holder of its receipt rolls a delivery back.",
        "tests/contract/test_gate.py::test_a_receipt_other_than_the_deliverys_changes_nothing[redis--1-fail-range_merge]",
    ),
    "rollback_delay_unbounded": Mutant(
        GONE,
        "A rest is never so long that its score has no room for the budget.",
        "tests/contract/test_retries.py::test_the_longest_delay_does_not_cost_or_give_a_retry[redis-range_merge]",
    ),
    "rollback_opens_silently": Mutant(
        GONE,
        "Whoever opens the gate wakes who waits for it.",
        "tests/contract/test_waking.py::test_who_met_a_shut_gate_is_woken_when_it_opens_and_not_before[redis-reject-range_merge]",
    ),
    "release_anyone": Mutant(
        If("not (record and redis.call('ZSCORE', prepare, member))"),
        "Only the holder of its receipt releases a delivery.",
        "tests/contract/test_gate.py::test_a_receipt_other_than_the_deliverys_changes_nothing[redis--1-release-range_merge]",
    ),
    "release_of_a_retry_wins": Mutant(
        If("not (waiting or resting) or (waiting and topic_type == 'range_merge' and number < waiting)"),
        "A released retry gives way to the fresh copy that waits.",
        "tests/contract/test_releasing.py::test_a_released_retry_gives_way_to_the_fresh_copy_that_waits[redis-range_merge]",
        mark="earlier_time",
    ),
    "release_keeps_the_later_time": Mutant(
        If("not (waiting or resting)"),
        "Of two fresh copies of a range_merge topic the earlier time counts.",
        "tests/contract/test_states.py::test_release[range_merge-body-serial-redis-FW]",
        mark="earlier_time",
    ),
    "release_ignores_marks": Mutant(
        If("false"),
        "A marked delivery does not return by a release.",
        "tests/contract/test_duplicates.py::test_a_marked_delivery_that_is_ended_twice_in_one_call_is_counted_once[redis-release-remove]",
    ),
    "success_leaves_no_outcome": Mutant(
        GONE,
        "A commit notes what became of the message.",
        "tests/contract/test_outcomes.py::test_success_is_kept_with_when_how_often_and_by_whom[fixed_time-redis-named]",
    ),
    "whole_success_leaves_no_outcome": Mutant(
        GONE,
        "A commit without names notes what became of each message.",
        "tests/contract/test_outcomes.py::test_success_is_kept_with_when_how_often_and_by_whom[fixed_time-redis-unnamed]",
    ),
    "death_leaves_no_outcome": Mutant(
        GONE,
        "A death notes what became of the message.",
        "tests/contract/test_outcomes.py::test_a_message_that_fails_for_the_last_time_is_kept_as_dead[redis-failed]",
    ),
    "removal_leaves_no_outcome": Mutant(
        GONE,
        "A removal and a cancellation note what became of a message that waited.",
        "tests/contract/test_outcomes.py::test_what_a_person_removes_is_kept_as_removed[fixed_time-redis-cancel]",
    ),
    "zombie_reports_progress": Mutant(
        If("not record"),
        "Only the holder of its receipt reports the progress of a delivery.",
        "tests/contract/test_outcomes.py::test_a_zombie_cannot_say_what_became_of_a_message[fixed_time-redis]",
    ),
    "outcomes_never_go": Mutant(
        As("local old = {}"),
        "What became of a message is forgotten after OUTCOME_RETENTION.",
        "tests/contract/test_outcomes.py::test_what_is_too_old_cannot_be_seen_and_goes_with_the_next_end[fixed_time-redis]",
    ),
    "outcomes_without_bound": Mutant(
        GONE,
        "A slot keeps a bounded number of outcomes.",
        "tests/contract/test_outcomes.py::test_a_slot_keeps_the_latest_ten_thousand[redis]",
    ),
    "outcome_outstays": Mutant(
        If("at"),
        "Nothing older than OUTCOME_RETENTION is shown.",
        "tests/contract/test_outcomes.py::test_what_is_too_old_cannot_be_seen_and_goes_with_the_next_end[fixed_time-redis]",
    ),
    "extend_anyone": Mutant(
        If("records[i] and score"),
        "Only the holder of its receipt extends a delivery.",
        "tests/contract/test_gate.py::test_a_receipt_other_than_the_deliverys_changes_nothing[redis--1-extend-range_merge]",
    ),
    "extend_gives_retries": Mutant(
        As("flat[#flat + 1] = string.format('%.0f', now_s * 1000 + 16)"),
        "An extended delivery has the retries it had.",
        "tests/contract/test_releasing.py::test_a_released_retry_that_nothing_replaces_has_the_budget_it_had[redis-range_merge]",
    ),
    "time_out_opens_silently": Mutant(
        GONE,
        "Whoever opens the gate wakes who waits for it.",
        "tests/contract/test_waking.py::test_who_met_a_shut_gate_is_woken_when_it_opens_and_not_before[redis-time_out-range_merge]",
    ),
    "promote_wakes_nobody": Mutant(
        GONE,
        "What comes back from its rest wakes who sleeps.",
        "tests/contract/test_waking.py::test_promote_and_time_out_wake_who_sleeps_on[redis-range_merge]",
    ),
    "release_needs_memory": Mutant(
        As("redis.call('ZADD', prepare, 0, member)\nredis.call('ZREM', prepare, member)"),
        "A full server lets the queue drain: release.",
        "tests/integration/test_faults.py::test_on_a_full_server_everything_else_does_what_it_always_does[release-range_merge]",
    ),
    "extend_needs_memory": Mutant(
        GONE,
        "A full server lets listeners go on: extend.",
        "tests/integration/test_faults.py::test_on_a_full_server_everything_else_does_what_it_always_does[extend-range_merge]",
    ),
    "time_out_needs_memory": Mutant(
        GONE,
        "A full server lets the queue drain: time_out.",
        "tests/integration/test_faults.py::test_on_a_full_server_a_record_dated_ahead_is_dated_now",
    ),
    "acquire_does_not_fence": Mutant(
        As("return redis.call('HINCRBY', control, 'epoch', 0)"),
        "Every acquire begins a new epoch.",
        "tests/contract/test_gate.py::test_epochs_rise_and_an_old_one_is_fenced[redis]",
    ),
    "acquire_needs_memory": Mutant(
        GONE,
        "A full server lets the queue drain: acquire.",
        "tests/integration/test_faults.py::test_on_a_full_server_everything_else_does_what_it_always_does[acquire-range_merge]",
    ),
    "acquire_slots_stops_at_a_foreign_epoch": Mutant(
        As("local epoch = redis.call('HINCRBY', control, 'epoch', 1)"),
        "An epoch that is no number keeps no other slot from its owner.",
        "tests/contract/test_strangers.py::test_an_epoch_that_is_no_number_keeps_no_other_slot_from_its_owner[redis-]",
        mark="fence",
    ),
    "acquire_slots_does_not_fence": Mutant(
        As("local epoch = redis.pcall('HINCRBY', control, 'epoch', 0)"),
        "Every acquire of many slots begins a new epoch in each.",
        "tests/contract/test_acquiring.py::test_what_is_empty_is_left_as_an_acquire_and_an_empty_prepare_would[redis-range_merge]",
        mark="fence",
    ),
    "acquire_slots_needs_memory": Mutant(
        GONE,
        "A full server lets the queue drain: acquire_slots.",
        "tests/integration/test_faults.py::test_on_a_full_server_everything_else_does_what_it_always_does[acquire_slots-range_merge]",
    ),
    "asleep_over_messages": Mutant(
        If("not (is_open and true)"),
        "Who acquires a slot that holds something does not fall asleep there.",
        "tests/contract/test_acquiring.py::test_nobody_sleeps_where_anything_is[redis-waits-range_merge]",
    ),
    "asleep_where_claims_end": Mutant(
        As("keys[n + 4], n = slots_keys[i + 2], n + 4"),
        "A slot of which Spark holds something is not empty.",
        "tests/contract/test_acquiring.py::test_nobody_sleeps_where_anything_is",
    ),
    "asleep_though_paused": Mutant(
        As("local is_open = not known[3] and (known[1] or slots) == slots"),
        "Nobody is to be woken in a slot that is paused.",
        "tests/contract/test_acquiring.py::test_nobody_sleeps_in_a_slot_that_is_paused_or_shut_or_of_another_count[redis]",
        mark="asleep_while_open",
    ),
    "asleep_while_moving": Mutant(
        As("local is_open = not known[2] and (known[1] or slots) == slots"),
        "Who acquires a slot whose messages move is told so by prepare.",
        "tests/contract/test_acquiring.py::test_nobody_sleeps_in_a_slot_that_is_paused_or_shut_or_of_another_count[redis]",
        mark="asleep_while_open",
    ),
    "asleep_in_another_count": Mutant(
        As("local is_open = not (known[2] or known[3]) and true"),
        "Who acquires a slot of another slot count is told so by prepare.",
        "tests/contract/test_acquiring.py::test_nobody_sleeps_in_a_slot_that_is_paused_or_shut_or_of_another_count[redis]",
        mark="asleep_while_open",
    ),
    "asleep_unannounced": Mutant(
        As("'sleeping_until', '0')"),
        "Senders wake who fell asleep when it acquired.",
        "tests/contract/test_acquiring.py::test_what_is_empty_is_left_as_an_acquire_and_an_empty_prepare_would[redis-range_merge]",
    ),
    "list_held_without_receipts": Mutant(
        As("found[#found + 1] = '0 0'"),
        "held tells the receipt with which the caller goes on.",
        "tests/contract/test_gate.py::test_after_a_lost_reply_of_prepare_the_owner_is_told_what_it_holds[redis-body-range_merge]",
    ),
    "list_held_tells_strangers": Mutant(
        GONE,
        "While another owner's deliveries are open, held answers busy.",
        "tests/contract/test_gate.py::test_held_is_refused_to_others_while_anything_is_in_flight[redis]",
    ),
    "head_though_some_run": Mutant(
        As("local is_head = topic_type ~= 'priority' and after_score == '' and #late == 0"),
        "What is taken leaves Store, not what was left out before it.",
        "tests/contract/test_claims.py::test_prepare_gives_what_is_not_claimed_where_there_is_no_gate[range_merge-body-serial-redis]",
        mark="head_of_store",
    ),
    "head_though_retries_wait": Mutant(
        As("local is_head = topic_type ~= 'priority' and after_score == '' and #free == #rows"),
        "What is taken leaves Store, not the retries before it.",
        "tests/contract/test_time.py::test_at_most_half_of_a_prepare_is_retries_while_fresh_messages_are_due[redis-range_merge]",
        mark="head_of_store",
    ),
    "head_though_further_on": Mutant(
        As("local is_head = topic_type ~= 'priority' and #late == 0 and #free == #rows"),
        "What is taken leaves Store, not what lies before the cursor.",
        "tests/contract/test_priorities.py::test_what_is_taken_behind_a_cursor_leaves_what_lies_before_it[redis-range_merge]",
        mark="head_of_store",
    ),
    "head_though_the_highest_goes_first": Mutant(
        As("local is_head = after_score == '' and #late == 0 and #free == #rows"),
        "What is taken leaves Store, not the lowest priority.",
        "tests/contract/test_priorities.py::test_the_highest_priority_is_taken_first[redis]",
        mark="head_of_store",
    ),
    # --- sending
    "merge_takes_the_later_time": Mutant(
        As("local reply = place(members, rows, envelope, 'merged', true, {})"),
        "Merged sends keep the time of the first.",
        "tests/contract/test_waking.py::test_a_merge_that_changes_nothing_wakes_nobody[redis]",
    ),
    "replace_keeps_the_first": Mutant(
        As("local reply = place(members, rows, envelope, 'replaced', false, {})"),
        "Of several sends the last score counts.",
        "tests/contract/test_duplicates.py::test_of_two_priorities_in_one_call_the_last_counts[redis]",
    ),
    "merge_moved_ignored": Mutant(
        GONE,
        "A sender with another slot count is told, and nothing changes.",
        "tests/contract/test_sending.py::test_a_client_with_another_slot_count_is_told_and_nothing_changes[redis-range_merge]",
    ),
    "replace_takes_any_score": Mutant(
        If("false"),
        "A send whose score would read as a retry is refused.",
        "tests/contract/test_sending.py::test_scores_that_no_sender_may_use_are_refused_as_a_whole[redis-seen0-priority]",
    ),
    "alone_is_moved_nowhere": Mutant(
        If("alone and backlog == 0 and not known.err"),
        "A sender with another slot count is told, and nothing changes.",
        "tests/contract/test_sending.py::test_a_client_with_another_slot_count_is_told_and_nothing_changes[redis-range_merge]",
        mark="alone",
    ),
    "alone_wakes_nobody": Mutant(
        GONE,
        "A send wakes who sleeps past its due time.",
        "tests/contract/test_waking.py::test_only_what_is_due_earlier_wakes[redis-range_merge]",
    ),
    "alone_forgets_its_place": Mutant(
        GONE,
        "A message gets a place behind all that were sent before it.",
        "tests/contract/test_fifo.py::test_a_lone_message_takes_the_place_behind_which_the_next_ones_come[redis]",
        mark="alone_notes_nothing",
    ),
    "alone_follows_the_clock_back": Mutant(
        As("local in_line = true"),
        "After the clock was set back, a message is still behind all that were sent before it.",
        "tests/contract/test_fifo.py::test_a_lone_message_takes_the_place_behind_which_the_next_ones_come[redis]",
    ),
    "alone_in_a_foreign_control": Mutant(
        If("alone and backlog == 0 and (known[1] or slots) == slots"),
        "Every key's type is looked at before the first write.",
        "tests/integration/test_faults.py::test_a_lone_send_names_a_key_of_a_foreign_type_and_changes_nothing[body-range_merge]",
        mark="alone",
    ),
    "alone_notes_no_slots": Mutant(
        GONE,
        "The first send settles the slot count.",
        "tests/contract/test_scattering.py::test_it_leaves_in_each_slot_what_a_send_leaves[redis]",
    ),
    "scatter_wakes_nobody": Mutant(
        GONE,
        "A send wakes who sleeps past its due time, in each of many slots.",
        "tests/contract/test_scattering.py::test_each_slot_wakes_its_own_sleeper_if_that_sleeps_longer[redis]",
    ),
    "alone_beyond_the_backlog": Mutant(
        If("alone and not known.err and (known[1] or slots) == slots"),
        "A slot refuses what exceeds its part of MAX_BACKLOG.",
        "tests/contract/test_sending.py::test_what_rests_counts_as_backlog_and_what_runs_does_not[redis-range_merge]",
        mark="alone",
    ),
    "alone_takes_the_later_time": Mutant(
        As("local added = redis.pcall('ZADD', store, at, alone)"),
        "Merged sends keep the time of the first.",
        "tests/contract/test_states.py::test_send[range_merge-body-serial-redis-W]",
    ),
    "alone_merges_with_a_retry": Mutant(
        As("word = number % 1 == 0 and met"),
        "A send that meets a waiting retry supersedes it.",
        "tests/contract/test_states.py::test_send[range_merge-body-serial-redis-w]",
        mark="alone_meets",
    ),
    "alone_merges_with_a_retry_at_its_priority": Mutant(
        As("word = number > floor and met"),
        "A send that meets a waiting retry supersedes it, also at its own priority.",
        "tests/contract/test_states.py::test_send[priority-body-serial-redis-w]",
        mark="alone_meets",
    ),
    "alone_keeps_the_first": Mutant(
        GONE,
        "Of several sends the last score counts.",
        "tests/contract/test_priorities.py::test_the_last_priority_sent_counts[redis]",
    ),
    "alone_tells_the_former_score": Mutant(
        GONE,
        "A send says which score counts.",
        "tests/contract/test_states.py::test_send[priority-body-serial-redis-W]",
    ),
    "alone_leaves_the_resting_retry": Mutant(
        As("or type(redis.pcall('HLEN', body)) == 'number'"),
        "A send that meets a resting retry supersedes it.",
        "tests/contract/test_states.py::test_send[range_merge-body-serial-redis-T]",
        mark="alone_rests",
    ),
    "alone_ignores_what_rests_unkeyed": Mutant(
        As("local is_free = not envelope"),
        "A send that meets a resting retry supersedes it, and every key's type is looked at before the first write.",
        "tests/contract/test_states.py::test_send[range_merge-body-serial-redis-T]",
    ),
    "alone_without_a_body": Mutant(
        GONE,
        "The envelope of a keyed message is kept.",
        "tests/contract/test_states.py::test_send[range_merge-key-serial-redis-W]",
    ),
    "alone_counts_half": Mutant(
        GONE,
        "The ledger counts every message.",
        "tests/contract/test_states.py::test_send[range_merge-body-serial-redis-W]",
    ),
    "alone_writes_before_the_ledger_is_known": Mutant(
        If("is_free"),
        "Every key's type is looked at before the first write.",
        "tests/integration/test_faults.py::test_a_lone_send_names_a_key_of_a_foreign_type_and_changes_nothing[key-range_merge]",
    ),
    "alone_writes_before_bodies_are_known": Mutant(
        As("or not redis.pcall('ZSCORE', retry, alone)"),
        "Every key's type is looked at before the first write.",
        "tests/integration/test_faults.py::test_a_lone_send_names_a_key_of_a_foreign_type_and_changes_nothing[key-range_merge]",
        mark="alone_rests",
    ),
    "alone_takes_any_score": Mutant(
        As("local alone = is_plain and ARGV[first + 1]"),
        "A send whose score would read as a retry is refused.",
        "tests/contract/test_sending.py::test_scores_that_no_sender_may_use_are_refused_as_a_whole[redis-seen1-priority]",
    ),
    "ensure_ignores_what_runs": Mutant(
        If("false"),
        "ensure sends nothing that runs already.",
        "tests/contract/test_states.py::test_ensure",
    ),
    "ensure_replaces": Mutant(
        As("local reply = place(members, rows, envelope, 'replaced', true, running)"),
        "ensure leaves what waits as it is.",
        "tests/contract/test_duplicates.py::test_of_two_ensures_in_one_call_the_first_counts[redis-range_merge]",
    ),
    # --- schedules
    "a_stale_tick_is_written": Mutant(
        GONE,
        "Who computed a tick before its schedule was changed does not write it.",
        "tests/contract/test_ticks.py::test_a_tick_of_an_earlier_generation_is_refused[redis]",
    ),
    "a_tick_is_doubled": Mutant(
        GONE,
        "A tick becomes one message, however often it is written.",
        "tests/contract/test_ticks.py::test_a_tick_is_one_message_that_is_due_at_its_instant[redis-range_merge]",
    ),
    "a_tick_that_left_counts": Mutant(
        If("latest == generation and last >= due"),
        "A slot that a tick has left does not count for what is planned after a change.",
        "tests/contract/test_ticks.py::test_a_slot_that_a_tick_has_left_does_not_count_for_what_is_planned_after_a_change[redis]",
    ),
    "a_tick_in_an_old_slot": Mutant(
        GONE,
        "A tick goes to the slot that the present slot count says.",
        "tests/contract/test_ticks.py::test_a_tick_follows_its_topic_to_another_slot_count_unless_it_was_written_before[redis]",
    ),
    "a_refused_tick_counts": Mutant(
        GONE,
        "A tick that found its slot full was not written.",
        "tests/contract/test_ticks.py::test_a_tick_that_finds_its_slot_full_is_written_later[redis]",
    ),
    "a_retraction_forgets": Mutant(
        As("local outcome = 0"),
        "Who asks again what came of a retraction hears the same.",
        "tests/contract/test_ticks.py::test_what_was_taken_is_not_taken_back[redis]",
    ),
    "a_retraction_takes_a_later_tick": Mutant(
        If("false"),
        "A late retraction leaves the tick of a later generation.",
        "tests/contract/test_ticks.py::test_a_late_retraction_leaves_the_tick_of_a_later_generation[redis]",
    ),
    "a_retraction_takes_what_ran": Mutant(
        If("score > 0 and redis.call('ZREM', store, member) > 0"),
        "A tick that was delivered before is not taken back.",
        "tests/contract/test_ticks.py::test_what_was_taken_is_not_taken_back[redis]",
    ),
    "a_retraction_leaves_the_body": Mutant(
        GONE,
        "The body of a tick goes with it.",
        "tests/contract/test_ticks.py::test_a_tick_that_waits_is_taken_back_with_its_body_and_late_writers_are_refused[redis-range_merge]",
    ),
    "a_late_writer_is_not_fenced": Mutant(
        GONE,
        "Who comes late with a tick that was taken back does not write it.",
        "tests/contract/test_ticks.py::test_a_tick_that_was_never_written_is_fenced[redis]",
    ),
    "a_change_without_a_generation": Mutant(
        As("local generation = string.format('%.0f', tonumber(known[7]) or now_ms)"),
        "Each change of a schedule has a generation of its own.",
        "tests/unit/test_schedule_scripts.py::test_a_change_takes_back_the_tick_that_waits_and_fences_who_computed_it_before[redis-paused]",
    ),
    "a_change_against_who_declares": Mutant(
        GONE,
        "Who would remove or replace what a worker declares meanwhile does nothing.",
        "tests/unit/test_schedule_scripts.py::test_what_a_worker_has_declared_meanwhile_is_not_changed[redis]",
    ),
    "a_lost_key_gives_a_generation_again": Mutant(
        As("local newest = 0"),
        "A generation is not given again after the schedules were lost and the slots were not.",
        "tests/unit/test_schedule_scripts.py::test_a_generation_is_not_given_again_after_the_key_was_lost",
    ),
    "a_change_leaves_the_tick": Mutant(
        GONE,
        "A tick that waits is taken back before a changed schedule goes on.",
        "tests/unit/test_schedule_scripts.py::test_a_change_takes_back_the_tick_that_waits_and_fences_who_computed_it_before[redis-paused]",
    ),
    "two_plans_for_one_tick": Mutant(
        GONE,
        "Of many workers one decides the next tick, and none for a paused schedule.",
        "tests/unit/test_schedule_scripts.py::test_what_is_resumed_counts_from_now[redis]",
    ),
    "a_plan_skips_the_write": Mutant(
        GONE,
        "The next tick is decided once the one before is written.",
        "tests/unit/test_schedule_scripts.py::test_one_of_many_plans_a_tick_and_only_once_it_is_due[redis]",
    ),
    "two_ticks_wait": Mutant(
        GONE,
        "At most one tick of a schedule is written ahead, so that a change finds it.",
        "tests/unit/test_schedule_scripts.py::test_one_of_many_plans_a_tick_and_only_once_it_is_due[redis]",
    ),
    "a_stale_writer_settles": Mutant(
        GONE,
        "Who settles an earlier tick changes nothing.",
        "tests/unit/test_schedule_scripts.py::"
        "test_a_change_takes_back_the_tick_that_waits_and_fences_who_computed_it_before[redis-spec]",
    ),
    "a_tick_taken_back_is_lost": Mutant(
        As("at = tonumber(known[4])"),
        "A tick that was due and not written when its schedule changed is planned again.",
        "tests/unit/test_schedule_scripts.py::test_a_tick_that_was_due_and_perhaps_not_written_is_planned_again[redis]",
    ),
    # --- persons and programs
    "replay_takes_two": Mutant(
        As("local lives = redis.call('ZSCORE', store, member)"),
        "A dead message merges with its live copy, also with one that rests.",
        "tests/contract/test_states.py::test_replay",
    ),
    "replay_at_once_or_never": Mutant(
        GONE,
        "A replayed message is fresh: its score does not read as a retry.",
        "tests/contract/test_releasing.py::test_what_died_with_a_strangers_retry_score_is_replayed_fresh[redis-7-priority]",
    ),
    "replay_without_body": Mutant(
        GONE,
        "A replayed message has its body again.",
        "tests/contract/test_persons.py::test_replay_may_bring_a_new_body[redis-range_merge]",
    ),
    "replay_needs_memory": Mutant(
        GONE,
        "A full server lets the queue drain: replay without a new body.",
        "tests/integration/test_faults.py::test_on_a_full_server_everything_else_does_what_it_always_does[replay-range_merge]",
    ),
    "replay_past_what_runs": Mutant(
        GONE,
        "An older body is not replayed past the newer one that runs.",
        "tests/contract/test_bodies.py::test_an_older_body_is_not_replayed_past_the_newer_one_that_runs[range_merge-redis-False]",
        mark="newer_body",
    ),
    "replay_past_what_is_claimed": Mutant(
        GONE,
        "An older body is not replayed past the newer one that is claimed.",
        "tests/contract/test_bodies.py::test_an_older_body_is_not_replayed_past_the_newer_one_that_runs[range_merge-redis-True]",
    ),
    "replay_merges_with_what_ends": Mutant(
        GONE,
        "A replay does not merge with a delivery that a person has ended.",
        "tests/contract/test_bodies.py::test_a_newer_copy_that_was_buried_is_replayed_past_the_older_one_in_flight[range_merge-redis]",
    ),
    "edited_body_merges": Mutant(
        If("not lives and has_body == '1'"),
        "A new body waits behind what runs.",
        "tests/contract/test_bodies.py::test_a_replay_with_a_new_body_waits_behind_what_runs[range_merge-redis-False]",
        mark="newer_body",
    ),
    "bury_before_what_is_claimed": Mutant(
        If("waiting or resting"),
        "A newer body is not dead before the older one that is claimed ends.",
        "tests/contract/test_bodies.py::test_a_body_that_waits_behind_a_claim_is_not_dead_before_the_older_one[range_merge-redis]",
    ),
    "bury_forgets_the_newer_death": Mutant(
        As("local outlived = (waiting or resting) and ' outlived' or ''"),
        "Buried again, an older copy does not overwrite the newer one in Dead.",
        "tests/contract/test_bodies.py::test_of_two_copies_that_are_buried_the_newer_body_stays[range_merge-redis-marked_again2-rollback]",
    ),
    "remove_forgets_the_newer_death": Mutant(
        As("local outlived = ''"),
        "Removed and buried, an older copy does not overwrite the newer one in Dead.",
        "tests/contract/test_bodies.py::test_of_two_copies_that_are_buried_the_newer_body_stays[range_merge-redis-marked_again2-rollback]",
    ),
    "bury_leaves_a_retry": Mutant(
        GONE,
        "What a person buries waits nowhere any more.",
        "tests/contract/test_persons.py::test_each_member_of_a_call_is_answered_by_itself[redis-bury-range_merge]",
    ),
    "bury_lets_it_run": Mutant(
        GONE,
        "What a person buries while it runs dies when its delivery ends.",
        "tests/contract/test_states.py::test_bury",
    ),
    "remove_lets_it_run": Mutant(
        GONE,
        "What a person removes while it runs is gone when its delivery ends.",
        "tests/contract/test_states.py::test_remove",
    ),
    "remove_forgets_the_cancellation": Mutant(
        As("local cancelled = cancels"),
        "A removal does not keep from its consumer that a delivery is cancelled.",
        "tests/contract/test_states.py::test_a_removal_does_not_withdraw_a_cancellation_and_a_burial_does",
    ),
    "cancel_tells_nobody": Mutant(
        GONE,
        "Consumers learn that a delivery is cancelled.",
        "tests/contract/test_states.py::test_consumers_are_told_of_what_is_cancelled_in_flight_and_of_nothing_else",
    ),
    "extend_keeps_quiet": Mutant(
        As("words[i] = 'ok'"),
        "A consumer that was not there when a delivery was cancelled learns it from extend.",
        "tests/contract/test_states.py::test_cancel",
    ),
    "rollback_keeps_quiet": Mutant(
        As("words[#words + 1] = 'ok'"),
        "A consumer whose delivery fails just as somebody cancels it learns that it ended as cancelled.",
        "tests/contract/test_states.py::test_only_the_delivery_that_runs_is_cancelled",
    ),
    "cancelled_cannot_succeed": Mutant(
        As("return true"),
        "A cancelled delivery that succeeds is done.",
        "tests/contract/test_states.py::test_a_cancelled_delivery_that_does_not_succeed_ends_as_cancelled",
    ),
    "cancelled_returns": Mutant(
        If("false"),
        "A cancelled delivery that does not succeed is not tried again.",
        "tests/contract/test_states.py::test_a_cancelled_delivery_that_does_not_succeed_ends_as_cancelled",
    ),
    "overran_uncounted": Mutant(
        GONE,
        "Deliveries that exceeded HARD_TIMEOUT are counted.",
        "tests/contract/test_states.py::test_a_message_that_ran_for_too_long_comes_back_alone_and_is_counted",
    ),
    "overran_in_company": Mutant(
        As("return what == 'timed_out'"),
        "A message that exceeded HARD_TIMEOUT is delivered alone afterwards.",
        "tests/contract/test_states.py::test_a_message_that_ran_for_too_long_comes_back_alone_and_is_counted",
    ),
    "remove_digs_up": Mutant(
        If("which ~= 'live' and not cancels and redis.call('ZREM', dead, member) > 0"),
        "Removing a live message leaves the dead of that name alone.",
        "tests/contract/test_states.py::test_remove_with_a_dead_copy",
    ),
    "remove_leaves_the_body": Mutant(
        GONE,
        "A removed message takes its body along.",
        "tests/contract/test_states.py::test_remove",
    ),
    "discard_takes_the_later_death": Mutant(
        If("true"),
        "Who deletes what was archived leaves alone what has died again since.",
        "tests/contract/test_persons.py::test_discarding_deletes_the_death_that_was_seen_and_no_later_one[redis-range_merge]",
    ),
    "reschedule_makes_fresh": Mutant(
        If("waiting"),
        "A retry that is rescheduled keeps its budget.",
        "tests/contract/test_states.py::test_reschedule",
    ),
    "reschedule_early": Mutant(
        As("redis.call('ZADD', store, 'NX', score, member)"),
        "A rescheduled message has its new time or priority.",
        "tests/contract/test_states.py::test_reschedule",
    ),
    "purge_takes_what_runs": Mutant(
        If("not claimed[i]"),
        "Purging leaves the diagnosis of what runs.",
        "tests/contract/test_persons.py::test_purging_what_waits_leaves_the_diagnosis_of_what_runs[redis]",
        mark="purge_leaves_what_runs",
    ),
    "purge_up_to_all": Mutant(
        As("local members = redis.call('ZRANGEBYSCORE', set, '-inf', '+inf', 'LIMIT', 0, limit)"),
        "Purging keeps to the scores it was given.",
        "tests/contract/test_persons.py::test_purge_takes_the_lowest_scores_up_to_a_bound_and_a_number[redis-store-range_merge]",
        mark="purge_within_bounds",
    ),
    "purge_from_the_lowest": Mutant(
        As("local members = redis.call('ZRANGEBYSCORE', set, '-inf', highest, 'LIMIT', 0, limit)"),
        "Purging by age leaves what has none.",
        "tests/contract/test_persons.py::test_purge_takes_the_lowest_scores_up_to_a_bound_and_a_number[redis-store-range_merge]",
        mark="purge_within_bounds",
    ),
    "trash_without_bound": Mutant(
        GONE,
        "An act keeps no more than it may.",
        "tests/contract/test_trash.py::test_an_act_keeps_as_many_as_it_may_and_the_rest_is_deleted_for_good",
    ),
    "trash_blocks_the_deletion": Mutant(
        As("local added = redis.call('HSET', trash, unpack(kept_copies))"),
        "A full server lets people delete.",
        "tests/integration/test_faults.py::test_a_full_server_deletes_without_keeping",
    ),
    "trash_stays_for_ever": Mutant(
        GONE,
        "What an act has deleted is forgotten after an hour.",
        "tests/contract/test_trash.py::test_what_was_deleted_is_forgotten_after_an_hour",
    ),
    "trash_takes_the_failures_of_what_runs": Mutant(
        As("local failure = redis.call('HGET', failures, member) or ''"),
        "The failures of a delivery are not those of the copy behind it.",
        "tests/contract/test_trash.py::test_what_runs_keeps_its_failures",
    ),
    "purge_keeps_the_failures_of_what_runs": Mutant(
        As("local failure = redis.call('HGET', failures, member) or ''"),
        "The failures of a delivery are not those of the copy behind it, also in a purge.",
        "tests/contract/test_trash.py::test_what_runs_keeps_its_failures",
    ),
    "restored_into_a_former_slot": Mutant(
        GONE,
        "A slot with another slot count takes nothing back.",
        "tests/contract/test_trash.py::test_a_slot_with_another_slot_count_takes_nothing_back",
    ),
    "restored_bodies_dropped": Mutant(
        GONE,
        "Collected bodies come back behind a delivery.",
        "tests/contract/test_trash.py::test_collected_bodies_come_back_behind_a_newer_delivery",
    ),
    "restored_behind_a_claim": Mutant(
        GONE,
        "Beside a claim no body comes back that may be older.",
        "tests/contract/test_trash.py::test_beside_a_claim_only_what_has_no_body_comes_back",
    ),
    "retry_restored_beside_a_delivery": Mutant(
        GONE,
        "A retry does not come back beside a delivery.",
        "tests/contract/test_trash.py::test_a_retry_does_not_come_back_beside_a_delivery",
    ),
    "restored_behind_a_newer_delivery": Mutant(
        As("return false"),
        "A delivery that began after the deletion is the newer copy.",
        "tests/contract/test_trash.py::test_a_delivery_that_began_since_is_the_newer_copy",
    ),
    "restored_before_an_older_delivery": Mutant(
        As("return true"),
        "What waited behind a delivery, or meets a marked one, comes back.",
        "tests/contract/test_trash.py::test_what_waited_behind_a_delivery_waits_behind_it_again",
        mark="restored_behind_a_newer_delivery",
    ),
    "restored_over_a_later_death": Mutant(
        If("false"),
        "A later death stays.",
        "tests/contract/test_trash.py::test_a_copy_that_was_sent_since_stays",
    ),
    "restored_twice": Mutant(
        As("local waits = nil"),
        "A copy that was sent since stays.",
        "tests/contract/test_trash.py::test_a_copy_that_was_sent_since_stays",
    ),
    "restored_without_its_failures": Mutant(
        GONE,
        "A retry comes back with its failures.",
        "tests/contract/test_trash.py::test_a_retry_that_waits_comes_back_with_the_retries_that_it_had",
    ),
    "restored_without_its_body": Mutant(
        GONE,
        "What comes back has its body.",
        "tests/contract/test_trash.py::test_what_was_deleted_comes_back_as_it_was",
    ),
    "restored_again": Mutant(
        GONE,
        "What came back is no longer in the trash.",
        "tests/contract/test_trash.py::test_what_was_deleted_comes_back_as_it_was",
    ),
    "restored_unheard": Mutant(
        GONE,
        "Who sleeps is woken by what comes back.",
        "tests/contract/test_trash.py::test_who_sleeps_is_woken_by_what_comes_back",
    ),
    "orphans_take_what_rests": Mutant(
        As("records, homes = body, { store }"),
        "What rests keeps its records.",
        "tests/contract/test_persons.py::test_records_that_belong_to_no_message_are_found_and_deleted[redis-body]",
    ),
    "orphans_forget_spark": Mutant(
        As("records, homes = failures, { store, retry, prepare }"),
        "What Spark holds keeps its records.",
        "tests/contract/test_persons.py::test_what_spark_holds_keeps_its_records[redis]",
    ),
    "orphans_are_deleted_unasked": Mutant(
        If("#loose > 0"),
        "Looking changes nothing.",
        "tests/contract/test_persons.py::test_records_that_belong_to_no_message_are_found_and_deleted[redis-inflight]",
    ),
    "pause_for_ever": Mutant(
        As("redis.call('HDEL', control, 'sleeping_until')"),
        "A slot that is resumed hands out again.",
        "tests/contract/test_configuring.py::test_a_paused_slot_hands_out_nothing_and_takes_everything_else[redis-range_merge]",
    ),
    "pause_tells_nobody": Mutant(
        GONE,
        "Who pauses a slot tells whoever holds messages of it.",
        "tests/contract/test_waking.py::test_resuming_wakes_once_and_pausing_is_told_once[redis-range_merge]",
    ),
    "resume_wakes_nobody": Mutant(
        GONE,
        "Who resumes a slot wakes who sleeps.",
        "tests/contract/test_waking.py::test_a_send_wakes_who_sleeps_without_end_exactly_once[redis-range_merge]",
    ),
    "configure_rereads_scores": Mutant(
        If("topic_type == 'priority' and false"),
        "MAX_RETRIES does not change where it would make a priority of a retry.",
        "tests/contract/test_configuring.py::test_the_retries_of_a_priority_topic_change_only_where_no_live_score_would_read_otherwise[redis-True-16-20]",
    ),
    "configure_only_asks": Mutant(
        If("false"),
        "Asking whether a definition could be applied changes nothing.",
        "tests/contract/test_configuring.py::test_the_retries_of_a_priority_topic_change_only_where_no_live_score_would_read_otherwise[redis-True-16-20]",
    ),
    "adopt_twice": Mutant(
        GONE,
        "Two persons do not book the same foreign messages.",
        "tests/contract/test_configuring.py::test_adopting_books_what_strangers_sent_once[redis]",
    ),
    "retire_what_holds": Mutant(
        GONE,
        "A slot that holds messages is never forgotten.",
        "tests/contract/test_retiring.py::test_a_slot_that_holds_messages_is_not_forgotten[redis-body-waiting]",
    ),
    # --- looking
    "list_unbounded": Mutant(
        If("false"),
        "A page holds a bounded number of bytes.",
        "tests/contract/test_paging.py::test_a_page_ends_behind_the_entry_that_fills_it[redis]",
    ),
    "list_ends_early": Mutant(
        As("return { 'end', found }"),
        "A page says whether more follow.",
        "tests/contract/test_paging.py::test_pages_show_every_entry_once_in_order[redis-1-False]",
    ),
    "search_ends_early": Mutant(
        If("not last and (matches >= limit or bytes >= max_bytes)"),
        "A search says where to go on.",
        "tests/contract/test_paging.py::test_find_goes_on_where_it_stopped_and_finds_each_once[redis-1-1-False]",
    ),
    "search_only_in_members": Mutant(
        GONE,
        "A search looks into what is known of failures too.",
        "tests/contract/test_paging.py::test_find_looks_into_members_bodies_and_records[redis]",
    ),
    "errors_are_searched_everywhere": Mutant(
        GONE,
        "People who may filter by error class cannot search bodies.",
        "tests/contract/test_seeking.py::test_a_class_is_compared_whole_or_by_its_last_part[redis-Boom\\nTraceback-False-False]",
    ),
    "error_texts_are_searched": Mutant(
        As("return class and #class <= 200 and string.find(record, text, 1, true)"),
        "People who may filter by error class cannot search error texts.",
        "tests/contract/test_seeking.py::test_a_class_is_compared_whole_or_by_its_last_part",
    ),
    "words_are_classes": Mutant(
        As("local class = string.match(said, '^[^%S\\n]*([A-Za-z_][A-Za-z0-9_.<>]*)')"),
        "A word that somebody said is not searched for as the class of an error.",
        "tests/contract/test_seeking.py::test_a_class_is_compared_whole_or_by_its_last_part[redis-Boom\\nTraceback-False-False]",
    ),
    "keyed_bodies_are_errors": Mutant(
        As("local said = string.sub(record, #head + 1)"),
        "The class of a dead message's error is not read from its body.",
        "tests/contract/test_seeking.py::test_the_body_of_a_dead_message_completes_no_class[redis]",
    ),
    "bodies_are_grouped": Mutant(
        As("return string.sub(record, at, stop - 1)"),
        "The body of a dead message is no part of the line by which it is grouped.",
        "tests/contract/test_seeking.py::test_the_body_of_a_dead_message_is_no_part_of_its_group[redis]",
    ),
    "classes_lose_their_numbers": Mutant(
        As("local colon = 0"),
        "Errors of classes that differ in a number are not grouped together.",
        "tests/contract/test_seeking.py::test_deaths_are_grouped_by_the_first_line_of_their_error[redis]",
    ),
    "every_death_is_named": Mutant(
        If("true"),
        "A group of deaths names a bounded number of messages.",
        "tests/contract/test_seeking.py::test_groups_of_deaths_have_their_hours_and_name_their_last_ones[redis]",
    ),
    "hours_are_joined": Mutant(
        If("n > 0"),
        "Deaths of different hours are counted apart.",
        "tests/contract/test_seeking.py::test_groups_of_deaths_have_their_hours_and_name_their_last_ones[redis]",
    ),
    "group_ends_early": Mutant(
        If("false"),
        "Groups of deaths say where to go on.",
        "tests/contract/test_seeking.py::test_groups_of_deaths_have_their_hours_and_name_their_last_ones[redis]",
    ),
    "ranks_among_all": Mutant(
        As("ranks[#ranks + 1] = rank"),
        "An id says the rank among equal scores, which does not move with the others.",
        "tests/contract/test_seeking.py::test_ranks_are_those_among_equal_scores[redis]",
    ),
    "find_by_digest_unbounded": Mutant(
        If("missing > 0 and is_left(area)"),
        "A look for a message is bounded.",
        "tests/contract/test_seeking.py::test_a_look_reads_about_as_many_bytes_as_it_may[redis]",
    ),
    "find_by_digest_forwards_only": Mutant(
        GONE,
        "A message is found on both sides of where it was seen.",
        "tests/contract/test_seeking.py::test_a_member_that_has_drifted_from_its_place_is_found_in_both_directions[redis]",
    ),
    "find_by_digest_one_area_at_a_time": Mutant(
        As("local near, far = area.looked, area.looked + scan"),
        "A message that is gone does not use up the look for the others.",
        "tests/contract/test_seeking.py::test_a_look_reads_about_as_many_bytes_as_it_may[redis]",
    ),
    "find_by_digest_begins_anew": Mutant(
        As("areas[#areas + 1] = { set = set, from = from, to = to, place = place, looked = 0 }"),
        "A look for a message goes on where the last one ended.",
        "tests/contract/test_seeking.py::test_a_look_is_bounded_and_says_where_to_go_on[redis]",
    ),
    "find_by_digest_leaves_its_score": Mutant(
        As("low, high = math.max(low, 0), high"),
        "A look keeps to the score that an id says.",
        "tests/contract/test_seeking.py::test_a_member_is_found_at_its_place_by_its_digest_alone[redis]",
    ),
    "count_all_as_due": Mutant(
        As("due = waiting"),
        "Only what can be taken now is counted as due.",
        "tests/contract/test_paging.py::test_what_is_due_is_counted_with_its_oldest[redis-range_merge]",
    ),
    "dead_is_resting": Mutant(
        As("return count_slot(store, prepare, dead, retry, control, claim, inflight, claimants, claims)"),
        "What rests is counted apart from what is dead.",
        "tests/contract/test_paging.py::test_a_retry_is_due_when_its_rest_is_over_though_nobody_has_looked[redis-priority]",
    ),
    "rested_not_due": Mutant(
        As("found = 0"),
        "A retry whose rest is over is due, though nobody has looked.",
        "tests/contract/test_paging.py::test_a_retry_is_due_when_its_rest_is_over_though_nobody_has_looked[redis-range_merge]",
    ),
    "timed_out_not_due": Mutant(
        As("local late = 0"),
        "A delivery that has timed out is due, though nobody has looked.",
        "tests/contract/test_paging.py::test_a_delivery_is_due_when_it_has_timed_out_though_nobody_has_looked[redis-range_merge]",
    ),
    "unleased_claim_not_due": Mutant(
        As("return 0, math.huge"),
        "What is claimed under a lease that has ended is due, though nobody has looked.",
        "tests/contract/test_paging.py::test_what_is_claimed_is_due_when_its_lease_has_ended_though_nobody_has_looked[redis-range_merge-True]",
    ),
    "live_claim_is_due": Mutant(
        As("if not head[1] then return 0, math.huge end"),
        "What is claimed is not due while its lease lasts.",
        "tests/contract/test_paging.py::test_what_is_claimed_is_due_when_its_lease_has_ended_though_nobody_has_looked[redis-range_merge-True]",
    ),
    "acknowledged_is_due": Mutant(
        As(""),
        "What was acknowledged and is not deleted yet is not due.",
        "tests/contract/test_paging.py::test_what_is_left_of_an_acknowledged_claim_is_never_due[redis]",
    ),
    "overdue_undated": Mutant(
        As(""),
        "What can be taken of a priority topic and is not in Store has waited for a time.",
        "tests/contract/test_paging.py::test_a_retry_is_due_when_its_rest_is_over_though_nobody_has_looked[redis-priority]",
    ),
    "newest_runs_longest": Mutant(
        As("first = tonumber(string.match(record or '', '^%d+')) or math.huge"),
        "Of what is in flight, the first delivery has run for the longest.",
        "tests/contract/test_paging.py::test_what_runs_has_run_since_its_delivery_however_often_it_was_extended[redis-range_merge-False]",
    ),
    # --- claims
    "claim_ignores_the_gate": Mutant(
        If("(holding > 0 and not ours) or false or known[6]"),
        "While a delivery of a serial slot is open, Spark claims nothing of it.",
        "tests/contract/test_claims.py::test_claim[range_merge-body-serial-redis-s-F]",
        mark="claim_gate",
    ),
    "claims_of_two": Mutant(
        If("(serial and in_flight > 0) or known[6]"),
        "One consumer at a time claims a slot.",
        "tests/contract/test_claims.py::test_claim[range_merge-body-serial-redis-t-C]",
        mark="claim_gate",
    ),
    "claim_without_an_owner": Mutant(
        As("redis.call('HDEL', control, '')"),
        "Who claims is the slot's owner.",
        "tests/contract/test_claims.py::test_claim[range_merge-body-serial-redis-s-W]",
    ),
    "claim_of_a_paused_slot": Mutant(
        GONE,
        "A paused slot is not claimed from.",
        "tests/contract/test_claims.py::test_a_paused_slot_is_not_claimed_from_and_goes_on_with_its_upkeep[redis]",
    ),
    "claim_numbers_again": Mutant(
        If("number < newest or false"),
        "A sealed claim takes nothing more, however late a request arrives.",
        "tests/contract/test_claims.py::test_a_claim_grows_until_it_is_sealed[range_merge-body-serial-redis]",
    ),
    "claim_before_the_last_has_ended": Mutant(
        GONE,
        "A consumer's next claim waits for the end of the one before.",
        "tests/contract/test_claims.py::test_claim[range_merge-body-serial-redis-s-C]",
    ),
    "lost_claim_is_unfinished": Mutant(
        As("if ours and number > newest then return answer('unfinished') end"),
        "A consumer whose claim was lost waits until it is back.",
        "tests/contract/test_claims.py::test_what_else_waits_is_taken_while_a_lost_claim_comes_back[redis-range_merge-True]",
    ),
    "ended_claim_shuts": Mutant(
        As("return true"),
        "What else waits is taken while a lost claim comes back.",
        "tests/contract/test_claims.py::test_what_else_waits_is_taken_while_a_lost_claim_comes_back[redis-range_merge-True]",
    ),
    "fifo_passes_a_lost_claim": Mutant(
        GONE,
        "On fifo topics nothing is taken before a lost claim is back.",
        "tests/contract/test_claims.py::test_what_else_waits_is_taken_while_a_lost_claim_comes_back[redis-fifo-True]",
    ),
    "claimed_twice": Mutant(
        If("not running[i]"),
        "What is claimed and sent again is not claimed twice.",
        "tests/contract/test_claims.py::test_what_is_claimed_and_sent_again_is_not_claimed_twice[range_merge-body-serial-redis]",
        mark="claim_once",
    ),
    "claim_of_what_runs": Mutant(
        If("not held[i]"),
        "What is in flight is not claimed.",
        "tests/contract/test_claims.py::test_claim[range_merge-body-shared-redis-s-FW]",
        mark="claim_once",
    ),
    "claim_leaves_the_body": Mutant(
        As("redis.call('HDEL', control, '')"),
        "A claim is read again with the bodies that it took.",
        "tests/contract/test_claims.py::test_claim[range_merge-key-serial-redis-s-W]",
    ),
    "claim_of_what_expired": Mutant(
        If("false"),
        "A message that has expired is not claimed.",
        "tests/contract/test_claims.py::test_an_expired_message_dies_instead_of_being_claimed[redis]",
    ),
    "claim_of_the_future": Mutant(
        As("return redis.call('ZRANGEBYSCORE', store, '-inf', '+inf', 'WITHSCORES', 'LIMIT', 0, scan)"),
        "Nothing is claimed before its time.",
        "tests/contract/test_claims.py::test_a_claim_takes_what_is_due_in_the_order_of_the_topic[redis-range_merge]",
    ),
    "claim_of_the_future_as_it_is": Mutant(
        As("if topic_type ~= 'priority' then due = redis.call('ZCARD', store) end"),
        "Nothing is claimed before its time, in one step either.",
        "tests/contract/test_claims.py::test_what_is_not_due_stays_when_all_that_is_due_is_claimed[redis-few-range_merge]",
    ),
    "claim_of_the_wrong_end": Mutant(
        GONE,
        "What goes into a claim in one step are the first ones of the topic's order.",
        "tests/contract/test_claims.py::test_a_claim_takes_what_is_due_in_the_order_of_the_topic[redis-priority]",
    ),
    "claim_of_all_that_waits": Mutant(
        GONE,
        "Where a whole Store changes its name, what is not to be taken goes back.",
        "tests/contract/test_claims.py::test_what_can_go_as_it_is_is_claimed_in_one_step[redis-all-but-a-few-range_merge]",
        mark="claim_carries_back",
    ),
    "claim_carries_back_the_first": Mutant(
        As("if rest > 0 then carry(claim, store, rest, topic_type ~= 'priority') end"),
        "Where a whole Store changes its name, what goes back are the last ones of the topic's order.",
        "tests/contract/test_claims.py::test_what_can_go_as_it_is_is_claimed_in_one_step[redis-all-but-a-few-range_merge]",
        mark="claim_carries_back",
    ),
    "claim_carries_back_any_number": Mutant(
        As("local few = rest < n"),
        "A claim carries back so many messages and no more.",
        "tests/contract/test_claims.py::test_what_can_go_as_it_is_is_claimed_in_one_step[redis-too-many-to-carry-back-range_merge]",
        mark="claim_carries_back_few",
    ),
    "claim_copies_any_number": Mutant(
        GONE,
        "A step of a claim copies so many messages and no more.",
        "tests/contract/test_claims.py::test_what_can_go_as_it_is_is_claimed_in_one_step[redis-too-many-to-carry-back-range_merge]",
    ),
    "claim_whole_of_any_size": Mutant(
        If("few"),
        "A whole Store is claimed only if it is no larger than was told.",
        "tests/contract/test_claims.py::test_long_messages_go_in_one_step_as_far_as_their_bytes_allow[redis]",
        mark="claim_whole",
    ),
    "claim_removes_by_rank_what_runs": Mutant(
        If("false"),
        "What is left out of a claim because it runs stays in Store.",
        "tests/contract/test_claims.py::test_what_runs_stays_in_store_when_the_others_are_claimed[redis]",
    ),
    "claim_as_it_is_of_what_runs": Mutant(
        If("redis.call('ZCARD', claim) > 0"),
        "Where something is in flight, each message is looked at before it is claimed.",
        "tests/contract/test_claims.py::test_claim[range_merge-body-shared-redis-s-FW]",
        mark="claim_into_nothing",
    ),
    "claim_overwrites_what_is_claimed": Mutant(
        If("in_flight > 0"),
        "A claim that grows keeps what it holds.",
        "tests/contract/test_claims.py::test_a_claim_grows_until_it_is_sealed[range_merge-body-serial-redis]",
        mark="claim_into_nothing",
    ),
    "claim_as_it_is_of_what_rests": Mutant(
        If("has_bodies"),
        "Where something rests, each message is looked at before it is claimed.",
        "tests/contract/test_claims.py::test_a_claim_supersedes_the_resting_retry_of_a_message_that_a_stranger_sent[redis]",
        mark="claim_without_a_look",
    ),
    "claim_as_it_is_without_bodies": Mutant(
        If("redis.call('ZCARD', retry) > 0"),
        "Where there are bodies, each message is looked at before it is claimed.",
        "tests/contract/test_claims.py::test_claim[range_merge-key-serial-redis-s-W]",
        mark="claim_without_a_look",
    ),
    "claim_of_any_size": Mutant(
        As("return n"),
        "A step of a claim moves no more bytes than it was told.",
        "tests/contract/test_claims.py::test_long_messages_go_in_one_step_as_far_as_their_bytes_allow[redis]",
        mark="claim_fits",
    ),
    "claim_copies_any_size": Mutant(
        As("local bytes = most"),
        "A step of a claim copies so many bytes and no more.",
        "tests/contract/test_claims.py::test_only_a_whole_slot_is_claimed_whatever_its_bytes[redis]",
    ),
    "large_ones_as_small_ones": Mutant(
        GONE,
        "Of large messages a step of a claim moves fewer bytes.",
        "tests/contract/test_claims.py::test_only_a_whole_slot_is_claimed_whatever_its_bytes[redis]",
    ),
    "claim_carries_back_any_size": Mutant(
        GONE,
        "What is left of a claimed Store goes back only if it has few bytes.",
        "tests/contract/test_claims.py::test_only_a_whole_slot_is_claimed_whatever_its_bytes[redis]",
    ),
    "claim_looks_at_any_size": Mutant(
        As("limit, max_bytes = math.min(limit, 1000), math.min(max_bytes, STEP_BYTES)"),
        "Where each message is looked at, a claim reads so many bytes and no more.",
        "tests/contract/test_claims.py::test_a_claim_reads_no_more_than_may_be_moved[redis-body]",
    ),
    "claim_moves_any_size": Mutant(
        As("limit = fit_here(math.min(limit, 1000))"),
        "Where each message is looked at, a claim moves so many bytes and no more.",
        "tests/contract/test_claims.py::test_a_claim_moves_no_more_bytes_than_it_may_if_it_did_not_see_the_longest[redis]",
        mark="claim_looks_at_any_size",
    ),
    "claim_ends_in_steps_of_any_size": Mutant(
        As("return redis.call('ZRANGE', claim, 0, limit - 1, 'WITHSCORES')"),
        "A step in which a claim ends moves so many bytes and no more.",
        "tests/contract/test_claims.py::test_a_claim_ends_in_steps_of_no_more_bytes_than_it_began_in[redis-return-body]",
    ),
    "claim_of_any_bodies": Mutant(
        As("local kept = ''"),
        "The bodies of what is claimed count as its members do.",
        "tests/contract/test_claims.py::test_a_claim_reads_no_more_than_may_be_moved[redis-key]",
    ),
    "claim_forgets_no_consumer": Mutant(
        If("false"),
        "What ended thirty days ago is forgotten.",
        "tests/contract/test_claims.py::test_how_a_claim_ended_is_remembered_for_thirty_days[redis]",
    ),
    "claim_forgets_any_consumer": Mutant(
        If("not first"),
        "Of too many consumers the one that ended first is forgotten.",
        "tests/contract/test_claims.py::test_a_slot_forgets_the_consumer_that_ended_longest_ago[redis]",
    ),
    "claim_refuses_the_newcomer": Mutant(
        If("false"),
        "A new consumer is remembered, however many there were before it.",
        "tests/contract/test_claims.py::test_a_slot_forgets_the_consumer_that_ended_longest_ago[redis]",
    ),
    "prepare_takes_what_is_claimed": Mutant(
        If("not running[i]"),
        "Where there is no gate, what Spark has claimed is not handed out.",
        "tests/contract/test_claims.py::test_prepare_never_takes_what_is_claimed[range_merge-body-serial-redis-s-CW]",
    ),
    "prepare_sleeps_past_a_lease": Mutant(
        If("false"),
        "Who is busy for a claim asks again when its lease ends.",
        "tests/contract/test_claims.py::test_every_end_of_a_claim_opens_the_gate_and_says_so[redis-return_claim]",
    ),
    "leases_never_end": Mutant(
        GONE,
        "A claim whose lease has ended is given back by any upkeep.",
        "tests/contract/test_claims.py::test_the_end_of_a_lease_spends_a_retry[range_merge-body-serial-redis-time_out-0-C]",
    ),
    "lease_ends_early": Mutant(
        If("limit < 1 or not head[1] or tonumber(head[2]) > now_ms + 1"),
        "A lease lasts as long as was said.",
        "tests/contract/test_claims.py::test_the_end_of_a_lease_spends_a_retry[range_merge-body-serial-redis-time_out-0-C]",
    ),
    "lost_is_not_noted": Mutant(
        GONE,
        "A claim is lost from the first step of its return on: it reads as empty, and its ack is stale.",
        "tests/contract/test_claims.py::test_the_end_of_a_lease_spends_a_retry[range_merge-body-serial-redis-time_out-0-C]",
    ),
    "lost_costs_nothing": Mutant(
        As("ended, earliest = return_claimed(limit, false)"),
        "The end of a lease spends a retry.",
        "tests/contract/test_claims.py::test_the_end_of_a_lease_spends_a_retry[range_merge-body-serial-redis-time_out-0-C]",
    ),
    "acked_is_given_back": Mutant(
        If("false"),
        "An acknowledgement that was interrupted is finished, not undone.",
        "tests/contract/test_claims.py::test_ack_walks_in_steps_where_failures_are_to_be_tidied_up[redis]",
    ),
    "returned_overwrites": Mutant(
        If("true"),
        "A claimed message that comes back gives way to the newer copy.",
        "tests/contract/test_claims.py::test_a_claim_given_back_is_as_if_it_had_never_been[priority-body-serial-redis-CW]",
    ),
    "returned_body_overwrites": Mutant(
        As("redis.call('HSET', body, member, kept)"),
        "The newer copy keeps its body when the claimed one comes back.",
        "tests/contract/test_bodies.py::test_a_replay_with_a_new_body_waits_behind_what_runs[range_merge-redis-True]",
        mark="claimed_body_comes_back",
    ),
    "returned_without_its_body": Mutant(
        GONE,
        "A claimed message comes back with its body.",
        "tests/contract/test_claims.py::test_the_end_of_a_lease_spends_a_retry[range_merge-key-serial-redis-time_out-16-C]",
        mark="claimed_body_comes_back",
    ),
    "claim_keeps_the_gate": Mutant(
        GONE,
        "A claim that holds nothing any more opens the gate.",
        "tests/contract/test_claims.py::test_ack[range_merge-body-serial-redis-C]",
    ),
    "ack_tears_the_failures_of_the_living": Mutant(
        If("true"),
        "A newer copy keeps what is known of its failures when the claimed one is acknowledged.",
        "tests/contract/test_claims.py::test_what_is_known_of_a_claimed_messages_failures_outlives_its_newer_copy[range_merge-key-serial-redis-bury]",
    ),
    "ack_leaves_failures": Mutant(
        GONE,
        "What is acknowledged takes its failures along.",
        "tests/contract/test_claims.py::test_what_is_known_of_a_claimed_messages_failures_outlives_its_newer_copy[range_merge-body-serial-redis-purge]",
    ),
    "ack_without_a_seal": Mutant(
        GONE,
        "Only what was sealed, and so could be read whole, is acknowledged.",
        "tests/contract/test_claims.py::test_a_claim_grows_until_it_is_sealed[range_merge-body-serial-redis]",
    ),
    "ack_of_the_lost": Mutant(
        If("number ~= newest"),
        "The remains of a lost claim cannot be acknowledged.",
        "tests/contract/test_claims.py::test_the_end_of_a_lease_spends_a_retry[range_merge-body-serial-redis-time_out-0-C]",
    ),
    "ack_is_not_noted": Mutant(
        GONE,
        "An acknowledgement is for good from its first step on.",
        "tests/contract/test_claims.py::test_ack_walks_in_steps_where_failures_are_to_be_tidied_up[redis]",
    ),
    "ack_wakes_nobody": Mutant(
        If("left == 0 and tonumber(sleeping_until) == GATE and false"),
        "Whoever waits at the gate of a claim is woken when it opens.",
        "tests/contract/test_claims.py::test_a_claim_holds_the_gate_until_it_has_ended[redis]",
    ),
    "ack_wakes_the_gate_alone": Mutant(
        GONE,
        "Who sleeps is woken for what a query has failed.",
        "tests/contract/test_failing_claimed.py::test_who_sleeps_is_woken_for_what_failed[redis]",
    ),
    "ack_leaves_undrained": Mutant(
        GONE,
        "A slot has work to drain since what a query has failed came back.",
        "tests/contract/test_undrained.py::test_what_a_query_has_failed_begins_it_when_the_claim_is_acknowledged[redis]",
    ),
    "fail_of_the_ended": Mutant(
        If("tonumber(newest) ~= number"),
        "Nothing can fail of a claim that is being ended.",
        "tests/contract/test_failing_claimed.py::test_nothing_can_fail_of_a_claim_that_is_being_ended[redis]",
    ),
    "fail_without_a_seal": Mutant(
        If("false"),
        "Only what was sealed, and so could be read, can fail.",
        "tests/contract/test_failing_claimed.py::test_only_messages_of_a_sealed_claim_fail_and_each_once[range_merge-body-serial-redis]",
    ),
    "fail_of_what_is_not_claimed": Mutant(
        If("false"),
        "Only what the claim holds can fail.",
        "tests/contract/test_failing_claimed.py::test_only_messages_of_a_sealed_claim_fail_and_each_once[range_merge-body-serial-redis]",
    ),
    "failed_are_acknowledged": Mutant(
        As("local noted, members, earliest = false, nil, nil"),
        "What a query has failed is not acknowledged.",
        "tests/contract/test_failing_claimed.py::test_what_has_failed_uses_a_retry_however_the_claim_ends[range_merge-body-serial-redis-ack_claim]",
    ),
    "failed_are_returned": Mutant(
        As("local noted = false"),
        "What a query has failed does not come back as it was.",
        "tests/contract/test_failing_claimed.py::test_what_has_failed_uses_a_retry_however_the_claim_ends[range_merge-body-serial-redis-return_claim]",
    ),
    "claim_note_outlives": Mutant(
        GONE,
        "What a query has failed is forgotten with its end.",
        "tests/contract/test_failing_claimed.py::test_what_has_failed_uses_a_retry_however_the_claim_ends[range_merge-body-serial-redis-ack_claim]",
    ),
    "claimed_reject_is_a_failure": Mutant(
        If("false"),
        "What a query has rejected goes to Dead at once.",
        "tests/contract/test_failing_claimed.py::test_what_was_rejected_is_dead_however_the_claim_ends[range_merge-body-serial-redis-ack_claim]",
    ),
    "open_costs_a_retry": Mutant(
        As("if state == 'open' or state == 'sealed' then state = 'lost' end"),
        "What was never sealed was read by nobody, and costs no retry.",
        "tests/contract/test_failing_claimed.py::test_a_claim_that_was_never_sealed_costs_nothing_when_its_lease_ends[range_merge-body-serial-redis]",
    ),
    "return_wakes_nobody": Mutant(
        If("left == 0 and tonumber(sleeping_until) == GATE and false"),
        "Whoever waits at the gate of a claim is woken when it is given back.",
        "tests/contract/test_claims.py::test_the_gate_opens_for_what_waits_though_all_that_was_claimed_dies[redis]",
    ),
    "return_of_the_acknowledged": Mutant(
        If("number ~= newest"),
        "What was acknowledged is not given back.",
        "tests/contract/test_claims.py::test_ack_walks_in_steps_where_failures_are_to_be_tidied_up[redis]",
    ),
    "return_without_end": Mutant(
        GONE,
        "A claim that is being given back reads as empty.",
        "tests/contract/test_claims.py::test_a_claim_given_back_is_as_if_it_had_never_been[range_merge-body-serial-redis-C]",
    ),
    "renewal_of_the_lost": Mutant(
        If("tonumber(newest) ~= number"),
        "A lost claim is not renewed.",
        "tests/contract/test_claims.py::test_the_end_of_a_lease_spends_a_retry[range_merge-body-serial-redis-time_out-0-C]",
    ),
    "no_seal": Mutant(
        If("false"),
        "A sealed claim takes nothing more and can be read.",
        "tests/contract/test_claims.py::test_send_meets_a_claimed_message_as_one_in_flight[range_merge-key-serial-redis-C]",
    ),
    "read_of_another": Mutant(
        If("false"),
        "A claim reads as its own rows or as none, never as others: claiming afresh is not re-reading.",
        "tests/contract/test_claims.py::test_a_sealed_claim_reads_the_same_until_it_ends_and_then_as_nothing[range_merge-body-serial-redis]",
    ),
    "read_of_the_open": Mutant(
        If("limit > 0"),
        "A claim that still grows is not read.",
        "tests/contract/test_claims.py::test_a_claim_grows_until_it_is_sealed[range_merge-body-serial-redis]",
    ),
    "read_of_the_lost": Mutant(
        GONE,
        "A lost claim reads as empty.",
        "tests/contract/test_claims.py::test_ack_walks_in_steps_where_failures_are_to_be_tidied_up[redis]",
    ),
    "ensure_ignores_claims": Mutant(
        As("running[i] = running[i]"),
        "What Spark has claimed is present.",
        "tests/contract/test_claims.py::test_ensure_finds_a_claimed_message_present[range_merge-body-serial-redis-C]",
    ),
    "purge_tears_the_failures_of_the_claimed": Mutant(
        If("not running[i]"),
        "A claimed message keeps what is known of its failures.",
        "tests/contract/test_claims.py::test_what_is_known_of_a_claimed_messages_failures_outlives_its_newer_copy[range_merge-body-serial-redis-purge]",
        mark="purge_leaves_what_runs",
    ),
    "remove_tears_the_failures_of_the_claimed": Mutant(
        If("false"),
        "A person takes nothing from a claim, nor its failures.",
        "tests/contract/test_claims.py::test_a_person_takes_nothing_from_a_claim[range_merge-body-serial-redis-remove-C]",
    ),
    "bury_tears_the_failures_of_the_claimed": Mutant(
        If("redis.call('ZSCORE', prepare, member)"),
        "A claimed message keeps what is known of its failures when its newer copy dies.",
        "tests/contract/test_claims.py::test_what_is_known_of_a_claimed_messages_failures_outlives_its_newer_copy[range_merge-body-serial-redis-bury]",
    ),
    "reschedule_misses_the_claimed": Mutant(
        If("redis.call('ZSCORE', prepare, member)"),
        "A claimed message is in flight.",
        "tests/contract/test_claims.py::test_reschedule[range_merge-body-serial-redis-C]",
    ),
    "configure_ignores_claims": Mutant(
        GONE,
        "Scores in a claim are read again when it comes back.",
        "tests/contract/test_claims.py::test_a_configuration_that_would_read_claimed_priorities_anew_is_refused[redis]",
    ),
    "heads_without_leases": Mutant(
        If("false"),
        "The slow poll and the sweep come when a lease ends.",
        "tests/contract/test_claims.py::test_every_end_of_a_claim_opens_the_gate_and_says_so[redis-return_claim]",
    ),
    "count_never_paused": Mutant(
        As("known[1] or '', 0, held, undrained_since, first_delivery, unleased }"),
        "A paused slot is shown as paused.",
        "tests/contract/test_paging.py::test_a_count_says_whether_a_slot_is_paused[redis]",
    ),
    "nothing_is_paused": Mutant(
        GONE,
        "A paused slot is shown as paused, also where it is empty.",
        "tests/contract/test_paging.py::test_many_slots_say_which_hold_messages_and_how_many_are_paused[redis]",
    ),
    "claimed_slots_are_empty": Mutant(
        As("local exist = redis.call('EXISTS', unpack(slots_keys, i, i + 3))"),
        "A slot of which everything is claimed holds messages.",
        "tests/contract/test_paging.py::test_a_slot_is_empty_while_it_has_no_message_in_any_state[redis-range_merge]",
    ),
    "one_foreign_key_hides_all": Mutant(
        As("if counts.err then return counts end found[#found + 1] = counts"),
        "What another program wrote into one slot hides no other slot.",
        "tests/contract/test_paging.py::test_many_slots_are_counted_as_each_of_them_is[redis]",
    ),
    "between_all": Mutant(
        As("return redis.call('ZCARD', set)"),
        "What is counted before a purge is what the purge takes.",
        "tests/contract/test_paging.py::test_messages_are_counted_between_two_scores[redis]",
    ),
    "describe_past_its_bound": Mutant(
        GONE,
        "A look is bounded.",
        "tests/contract/test_paging.py::test_a_look_shows_all_copies_of_a_member[redis]",
    ),
    "heads_without_timeouts": Mutant(
        As("due = due"),
        "The slow poll comes when a delivery times out.",
        "tests/contract/test_paging.py::test_heads_tell_when_each_slot_can_next_be_taken_from[redis-range_merge]",
    ),
    "audit_of_another": Mutant(
        As("return { redis.call('ZCARD', store), redis.call('ZCARD', retry), redis.call('ZCARD', prepare),"),
        "The depths of a ledger are those of its slot.",
        "tests/contract/test_configuring.py::test_retries_up_to_sixteen_and_time_outs_change_while_messages_wait[redis-range_merge]",
    ),
    # --- rates, permits and requests that are done once
    "permits_never_end": Mutant(
        As("local left = tonumber(held) or 0"),
        "Who settles a message gives its permit back.",
        "tests/unit/test_quota_scripts.py",
    ),
    "permits_are_not_renewed": Mutant(
        As("local until_ms = tonumber(ends)"),
        "What is extended counts as in flight for longer.",
        "tests/unit/test_quota_scripts.py::test_both_brokers_end_permits_alike",
    ),
    "spent_beyond_the_rate": Mutant(
        GONE,
        "Nobody sends more than its rate.",
        "tests/unit/test_quota_scripts.py::test_both_brokers_spend_alike_and_never_more_than_the_rate",
    ),
    "a_bucket_without_a_bound": Mutant(
        As("empty = empty + each * wanted"),
        "Who was silent for long may send no more at once than the rate says.",
        "tests/unit/test_quota_scripts.py::test_both_brokers_spend_alike_and_never_more_than_the_rate",
    ),
    "locked_out_by_a_clock": Mutant(
        If("not empty"),
        "A clock that is set back locks no sender out.",
        "tests/unit/test_quota_scripts.py::test_a_bucket_is_full_again_after_its_time_and_survives_a_clock_that_is_set_back",
    ),
    "answered_for_another": Mutant(
        GONE,
        "A key stands for one request.",
        "tests/unit/test_quota_scripts.py::test_both_brokers_answer_alike",
    ),
    "done_twice": Mutant(
        GONE,
        "A request with a key is done once.",
        "tests/unit/test_quota_scripts.py::test_both_brokers_answer_alike",
    ),
    "consumer_of_two_drivers": Mutant(
        As("local is_free = true"),
        "A consumer has one driver until its lease ends.",
        "tests/unit/test_quota_scripts.py::test_a_driver_has_a_consumers_name_until_its_lease_ends[0]",
    ),
    "consumer_goes_back": Mutant(
        If("not is_free"),
        "A driver that has lost its consumer does not get it back.",
        "tests/unit/test_quota_scripts.py::test_a_driver_has_a_consumers_name_until_its_lease_ends[0]",
    ),
    "consumer_without_a_lease": Mutant(
        GONE,
        "A consumer belongs to its driver while the lease lasts.",
        "tests/unit/test_quota_scripts.py::test_a_driver_has_a_consumers_name_until_its_lease_ends[0]",
    ),
    "leaves_what_another_holds": Mutant(
        As("if not holder then return 'absent' end"),
        "A driver leaves no consumer that another one has.",
        "tests/unit/test_quota_scripts.py::test_a_driver_has_a_consumers_name_until_its_lease_ends[0]",
    ),
    "results_go_back": Mutant(
        GONE,
        "A late record of a task's start does not overwrite its result.",
        "tests/unit/test_quota_scripts.py::test_what_is_known_of_a_task_never_goes_back",
    ),
    "done_beside_itself": Mutant(
        GONE,
        "A request with a key is not done twice at the same time.",
        "tests/unit/test_quota_scripts.py::test_both_brokers_answer_alike",
    ),
    "kept_by_the_dead": Mutant(
        GONE,
        "An attempt that was thought dead does not speak for the one after it.",
        "tests/unit/test_quota_scripts.py::test_both_brokers_answer_alike",
    ),
}


def switch_off(mutant: str) -> None:
    """Let this process, and no other, read the scripts with one rule switched off."""
    from django_rmq.core import lua

    read = lua._read

    def read_mutated(name: str) -> str:
        return switched_off(mutant, read(name))

    lua._read = read_mutated
    lua._sections.cache_clear()
    lua.load.cache_clear()
    lua.declaration.cache_clear()


class Serving:
    """A plugin of pytest: once all is collected, tests run when they are asked for, each time in a child of this process."""

    def __init__(self, requests: IO[str], answers: IO[str], switch_off: Callable[[str], None]) -> None:
        self.requests, self.answers, self.switch_off = requests, answers, switch_off
        self.failed: list[str] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self) -> None:
        # Not earlier: pytest wants to be the first to import what has plugins for it.
        from hypothesis import HealthCheck, Phase, settings

        # The first failure is enough: nobody wants to read the shortest one.
        settings.register_profile(
            "mutants",
            deadline=None,
            max_examples=400,
            stateful_step_count=40,
            phases=[Phase.generate],
            database=None,
            suppress_health_check=list(HealthCheck),
        )

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        gc.freeze()
        for line in self.requests:
            name, test = json.loads(line)
            items = [item for item in session.items if test in named(item.nodeid)]
            child = os.fork()
            if child == 0:
                os._exit(self._judge(name, items))
            _, status = os.waitpid(child, 0)
            if status:
                self._answer(len(items), f"died with {os.waitstatus_to_exitcode(status)}")
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    def _judge(self, name: str, items: list[pytest.Item]) -> int:
        if name:
            self.switch_off(name)
        for item in items:
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            if self.failed:
                break
        self._answer(len(items), *self.failed[:1])
        return 0

    def _answer(self, asked: int, killer: str = "") -> None:
        print(json.dumps([asked, killer]), file=self.answers, flush=True)


def named(case: str) -> tuple[str, str, str]:
    """Return a case, its test and its file."""
    return case, case.partition("[")[0], case.partition("::")[0]


QUIET = ["-q", "--tb=no", "-p", "no:cacheprovider", "--hypothesis-profile=mutants"]


def serve(files: list[str], switch_off: Callable[[str], None]) -> int:
    """Collect the tests of these files once; then answer each line [mutant, test] with a line [number of cases, who failed].

    What is asked for on the input may be a case, a test with all its cases, or a file. No mutant: all rules are on.
    """
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    # The answers are alone on their way: what pytest says of the tests goes elsewhere.
    os.dup2(2, 1)
    return int(pytest.main([*QUIET, *files], plugins=[Serving(requests, answers, switch_off)]))


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1:], switch_off))
