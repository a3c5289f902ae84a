"""The scripts with one rule switched off each, and a way to run tests against them.

    python -m tests.proof.mutants NAME PYTEST-ARGUMENT...

runs pytest in a process whose scripts are those of the mutant; without a word it serves runs (see `serve`). Nothing
of this is in the package: the texts that `django_rmq.lua` reads are changed on their way in.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from typing import NamedTuple

import pytest


class Mutant(NamedTuple):
    """One rule switched off: ``find`` occurs exactly once in the file and is replaced."""

    file: str
    find: str
    replace: str
    rule: str
    """The rule that dies, in a sentence."""
    caught_by: str
    """Who is asked first: a suite, or a file of the contract (with ``::`` and a test of it)."""

    def applied_to(self, text: str) -> str:
        """Return the file's text with the rule switched off."""
        if text.count(self.find) != 1:
            raise ValueError(f"{self.file}.lua holds {text.count(self.find)} times, not once: {self.find}")
        return text.replace(self.find, self.replace)


MUTANTS: dict[str, Mutant] = {
    # --- re-slotting
    "a_slot_is_shut_again": Mutant(
        "shut",
        "if known == tonumber(reslot) then return 'known' end",
        "",
        "A slot that its re-slotting has opened stays open.",
        "moving",
    ),
    "a_later_re_slotting_is_overruled": Mutant(
        "shut",
        "if known > tonumber(reslot) then return 'stale' end",
        "",
        "Who is late with an older re-slotting changes nothing.",
        "moving",
    ),
    "shut_though_it_holds_something": Mutant(
        "shut",
        "if empty and held > 0 then return 'holds' end",
        "",
        "Where nobody can tell new slots, a slot is shut only when it is empty.",
        "moving",
    ),
    "shut_slots_hand_out": Mutant(
        "prepare",
        "if shut or known[9] then",
        "if shut then",
        "A slot whose messages move hands out nothing.",
        "moving",
    ),
    "receipts_fall": Mutant(
        "reopen",
        "if tonumber(deliveries) > (tonumber(known[3]) or 0) then",
        "if false then",
        "Receipts rise across a re-slotting.",
        "moving",
    ),
    "pauses_end": Mutant(
        "reopen",
        "if paused then redis.call('HSET', control, 'paused', '1') end",
        "",
        "What was paused stays paused.",
        "moving",
    ),
    "survey_overlooks_replays": Mutant(
        "survey",
        "'rescheduled', 'revived'",
        "'rescheduled', 'rescheduled'",
        "What a person sends back to an earlier state is noticed.",
        "moving",
    ),
    "moved_while_in_flight": Mutant(
        "move_out",
        "if redis.call('ZCARD', prepare) > 0 or redis.call('ZCARD', claimants) > 0 then return { 'busy' } end",
        "",
        "Nothing leaves a slot in which something is in flight.",
        "moving",
    ),
    "what_left_is_forgotten": Mutant(
        "move_out",
        "if staged[1] and staged[1] ~= arrived then",
        "if false then",
        "What has left is kept until it is known to have arrived.",
        "moving",
    ),
    "moved_out_of_an_open_slot": Mutant(
        "move_out",
        "if known[1] ~= reslot or not known[2] then return { 'stale' } end",
        "",
        "Only the re-slotting that shut a slot moves its messages.",
        "moving",
    ),
    "moved_in_twice": Mutant(
        "move_in",
        "if (tonumber(redis.call('HGET', arrived, source)) or 0) >= tonumber(ticket) then return 'known' end",
        "",
        "A hand-over that is repeated arrives once.",
        "moving",
    ),
    "moved_into_an_open_slot": Mutant(
        "move_in",
        "if known[1] ~= reslot or not known[2] then return 'stale' end",
        "",
        "Nothing arrives in a slot that is open again.",
        "moving",
    ),
    "moved_over_a_later_send": Mutant(
        "move_in",
        "if waiting and not is_retry(tonumber(waiting)) then",
        "if false then",
        "A copy that was sent meanwhile is the later one.",
        "moving",
    ),
    "moved_over_a_later_death": Mutant(
        "move_in",
        "if not died or tonumber(score) > tonumber(died) then",
        "if true then",
        "Of two deaths the later one stays.",
        "moving",
    ),
    # --- fragments
    "lossy_text": Mutant(
        "_retries",
        "return string.format('%.17g', number)",
        "return tostring(number)",
        "Scores keep every digit on their way to Redis, so that the budget in a resting score survives.",
        "gate",
    ),
    "one_delivery_more": Mutant(
        "_retries",
        "return bounded(math.floor(q) - 1, 0, max_retries)",
        "return bounded(math.floor(q), 0, max_retries)",
        "Each failure spends one retry: 1 + MAX_RETRIES deliveries, exactly.",
        "duplicates",
    ),
    "budget_ignores_settings": Mutant(
        "_retries",
        "if not is_retry(score) then return max_retries end",
        "if not is_retry(score) then return 16 end",
        "A fresh message has the slot's own number of retries.",
        "configuring",
    ),
    "retries_sink": Mutant(
        "_retries",
        "if kind == 'priority' and retry_priority == 'original' and score > floor_priority() then",
        "if false then",
        "A retry keeps its message's own priority.",
        "layout",
    ),
    "priority_floor": Mutant(
        "_retries",
        "return math.max(16, max_retries)",
        "return 16",
        "With more than 16 retries, scores up to MAX_RETRIES are retries too.",
        "retries",
    ),
    "budget_at_the_largest_priority": Mutant(
        "_retries",
        "local LARGEST_WITH_RETRIES = 8796093022207",
        "local LARGEST_WITH_RETRIES = 8796093022208",
        "At the largest priority there is room for an odd number of retries below the point.",
        "retries",
    ),
    "expire_a_second_early": Mutant(
        "_expire",
        "'(' .. text_of((now_s - timeout) * 1000),",
        "'(' .. text_of((now_s - timeout + 1) * 1000),",
        "A delivery has timed out when more whole seconds than TIMEOUT have passed.",
        "time",
    ),
    "future_stamps_stay": Mutant(
        "_expire",
        "for i = 1, #ahead, 2 do",
        "for i = 1, 0, 2 do",
        "A record dated more than a time-out ahead is dated now.",
        "time",
    ),
    "promote_overwrites": Mutant(
        "_promote",
        "if alive then\n      count('dropped')\n    else",
        "if alive then count('dropped') end\n    do",
        "A rest that ends gives way to the copy that waits.",
        "strangers",
    ),
    "promote_early": Mutant(
        "_promote",
        "'(' .. text_of(now_ms + 1)",
        "'(' .. text_of(now_ms + 1001)",
        "A rest lasts as long as was said.",
        "paging",
    ),
    "promote_gives_a_retry": Mutant(
        "_promote",
        "% 1 * 1024 + 0.5), 1, 999)",
        "% 1 * 1024 + 1.5), 1, 999)",
        "The budget of a resting message is what it was when it began to rest.",
        "layout",
    ),
    "rollback_overwrites": Mutant(
        "_failures",
        "  if waits(member) then\n    count('dropped')",
        "  if false then\n    count('dropped')",
        "A failed delivery gives way to the newer send that waits.",
        "states::test_rollback_with_retries_left",
    ),
    "dead_one_failure_early": Mutant(
        "_failures",
        "elseif left <= 0 then",
        "elseif left <= 1 then",
        "A message dies when it fails with no retries left, not before.",
        "layout",
    ),
    "never_dies": Mutant(
        "_failures",
        "elseif left <= 0 then",
        "elseif left < 0 then",
        "A message that fails with no retries left dies.",
        "layout",
    ),
    "removed_returns": Mutant(
        "_failures",
        "if mark == 'removed' then",
        "if mark == 'gone' then",
        "A delivery that a person removed ends for good.",
        "duplicates",
    ),
    "buried_returns": Mutant(
        "_failures",
        "if mark == 'buried' then",
        "if mark == 'grave' then",
        "A delivery that a person buried ends in Dead.",
        "duplicates",
    ),
    "reject_is_a_failure": Mutant(
        "_failures",
        "elseif what == 'rejected' then",
        "elseif what == 'refused' then",
        "A rejected message is dead at once.",
        "paging",
    ),
    "body_outlives": Mutant(
        "_failures",
        "  redis.call('HDEL', body, member)\n  if claim",
        "  if claim",
        "The last live copy takes its body along.",
        "gate",
    ),
    "body_torn_from_the_living": Mutant(
        "_failures",
        "if waits(member) or redis.call('ZSCORE', prepare, member) then return end",
        "if redis.call('ZSCORE', prepare, member) then return end",
        "A copy that still waits keeps its body.",
        "states::test_reject",
    ),
    "record_outlives": Mutant(
        "_failures",
        "  redis.call('HDEL', inflight, member)\n  return due\nend",
        "  return due\nend",
        "inflight holds exactly the members of Prepare.",
        "duplicates",
    ),
    "death_miscounted": Mutant(
        "_failures",
        "then count('dead_merged') end",
        "then count('died') end",
        "A member that dies again replaces its earlier death in the ledger.",
        "persons",
    ),
    "no_jitter": Mutant(
        "_failures",
        "if backoff_cap > backoff_base then",
        "if false then",
        "Messages that fail together come back spread out.",
        "time",
    ),
    "no_doubling": Mutant(
        "_failures",
        "backoff_base * 2 ^ math.min(failures, 40)",
        "backoff_base",
        "The rest doubles with each failure.",
        "time",
    ),
    "merge_keeps_the_retry": Mutant(
        "_send",
        "local retried = existing and not earlier[member] and is_retry(tonumber(existing))",
        "local retried = false",
        "A send that meets a waiting retry supersedes it.",
        "states::test_send",
    ),
    "resting_retry_stays": Mutant(
        "_send",
        "if #leave > 0 then redis.call('ZREM', retry, unpack(leave)) end",
        "",
        "A send that meets a resting retry supersedes it.",
        "sending",
    ),
    "backlog_unlimited": Mutant(
        "_send",
        "local room = limit > 0 and limit - waiting - resting or math.huge",
        "local room = math.huge",
        "A slot refuses what exceeds its part of MAX_BACKLOG.",
        "sending",
    ),
    "retries_unsettled": Mutant(
        "_send",
        "if not settled_retries then redis.pcall('HSET', control, 'max_retries', text_of(max_retries)) end",
        "",
        "The first priority that waits settles which scores are retries.",
        "configuring",
    ),
    "send_wakes_nobody": Mutant(
        "_send",
        "if earliest < math.huge then wake(kind == 'priority' and 0 or earliest) end",
        "",
        "A send wakes who sleeps past its due time.",
        "waking",
    ),
    "refusal_after_a_write": Mutant(
        "_send",
        "  local n = #members\n",
        "  local n = #members\n  redis.call('HDEL', control, '')\n  redis.pcall('HSET', control, 'slots', slots)\n",
        "A full server refuses a send, and nothing has been written.",
        "faults",
    ),
    "types_unchecked": Mutant(
        "_types",
        "if type(size) == 'table' then",
        "if false then",
        "Every key's type is looked at before the first write.",
        "faults",
    ),
    "wakes_without_end": Mutant(
        "_wake",
        "    sleeping_until = nil\n    redis.pcall('HDEL', control, 'sleeping_until')\n",
        "",
        "Who sleeps is woken once.",
        "waking",
    ),
    "wakes_too_many": Mutant(
        "_wake",
        "if sleeper and due_ms < sleeper then",
        "if sleeper then",
        "What comes later than the sleeper asks anyway wakes nobody.",
        "waking",
    ),
    "half_the_ledger": Mutant(
        "_ledger",
        "(by or 1)",
        "1",
        "The ledger counts messages, not calls.",
        "configuring",
    ),
    "cursor_by_member_alone": Mutant(
        "_after",
        "if x ~= y then return x < y end",
        "if x ~= y then return x > y end",
        "A page goes on behind the cursor, also where its entry is gone.",
        "paging",
    ),
    "page_repeats": Mutant(
        "_after",
        "if descending then return redis.call('ZREVRANK', key, member) + 1 end",
        "if descending then return redis.call('ZREVRANK', key, member) end",
        "No entry is on two pages.",
        "paging",
    ),
    "page_skips": Mutant(
        "_after",
        "return redis.call('ZRANK', key, member) + 1",
        "return redis.call('ZRANK', key, member) + 2",
        "No entry is between two pages.",
        "paging",
    ),
    "rows_beyond_the_bound": Mutant(
        "_rows",
        "while #rows > 0 and tonumber(rows[#rows]) > tonumber(highest) do",
        "while false do",
        "A listing keeps to its highest score.",
        "paging",
    ),
    "time_of_the_caller": Mutant(
        "_now",
        "local now_s = math.floor(now_us / 1000000)",
        "local now_s = math.floor(now_us / 1000000) + 1",
        "Prepare holds the second in which a message was handed out.",
        "layout",
    ),
    # --- consuming
    "epoch_off": Mutant(
        "prepare",
        "if epoch and known_epoch and epoch < known_epoch then",
        "if false then",
        "An owner of an earlier epoch is fenced.",
        "gate",
    ),
    "fenced_uncounted": Mutant(
        "prepare",
        "redis.pcall('HINCRBY', stats, 'fenced', 1)",
        "",
        "Whoever is fenced is counted.",
        "gate",
    ),
    "gate_off": Mutant(
        "prepare",
        "if serial then shut = holder ~= owner and (in_flight > 0 or claimed) end",
        "if serial then shut = false end",
        "While one owner's deliveries are open, nobody else takes from the slot.",
        "configuring",
    ),
    "gate_ignores_claims": Mutant(
        "prepare",
        "(in_flight > 0 or claimed) end",
        "(in_flight > 0) end",
        "An open claim keeps the gate shut.",
        "gate",
    ),
    "room_off": Mutant(
        "prepare",
        "local shut = in_flight >= room",
        "local shut = false",
        "A slot that is not serial has at most MAX_PREPARED in flight.",
        "gate",
    ),
    "paused_hands_out": Mutant(
        "prepare",
        "if paused then return idle('paused', next_due(false), nil) end",
        "",
        "A paused slot hands out nothing.",
        "configuring",
    ),
    "moved_hands_out": Mutant(
        "prepare",
        "if known_slots and known_slots ~= slots then return { 'moved', known_slots } end",
        "",
        "A caller with another slot count is told, and nothing changes.",
        "sending",
    ),
    "receipts_repeat": Mutant(
        "prepare",
        "local receipt = (tonumber(known[5]) or 0) + 1",
        "local receipt = (tonumber(known[5]) or 1)",
        "A receipt is never used twice.",
        "gate",
    ),
    "in_flight_twice": Mutant(
        "prepare",
        "if not (in_flight > 0 or claimed) or #list == 0 then return list end",
        "if true then return list end",
        "The newer copy of what runs waits for its end.",
        "priorities",
    ),
    "suspect_in_company": Mutant(
        "prepare",
        "local alone = wary and suspicious(member)",
        "local alone = false",
        "A member whose last end was a time-out is handed out alone.",
        "time",
    ),
    "suspect_untold": Mutant(
        "prepare",
        "more, suspect = more or i < total, 'suspect'",
        "more = more or i < total",
        "Who is handed a message that timed out is told so.",
        "time",
    ),
    "company_for_a_suspect": Mutant(
        "prepare",
        "if serial and wary and in_flight == 1 and suspicious(",
        "if false and suspicious(",
        "Nobody joins a suspicious member while it runs.",
        "time",
    ),
    "all_retries": Mutant(
        "prepare",
        "share = math.min(#rested / 2, math.max(share, limit - #free / 2))",
        "share = math.min(#rested / 2, limit)",
        "At most half of a prepare is retries while fresh messages are due.",
        "time",
    ),
    "odd_one_never_a_retry": Mutant(
        "prepare",
        "local share = math.floor(limit / 2) + limit % 2 * (receipt % 2)",
        "local share = math.floor(limit / 2)",
        "With a limit of one, retries take turns with fresh messages.",
        "time",
    ),
    "before_their_time": Mutant(
        "prepare",
        "return redis.call('ZRANGEBYSCORE', store, '(999', text_of(now_ms),",
        "return redis.call('ZRANGEBYSCORE', store, '(999', '+inf',",
        "Nothing is handed out before it is due.",
        "strangers",
    ),
    "lapsed_is_delivered": Mutant(
        "prepare",
        "if envelope and has_lapsed(envelope) then",
        "if false then",
        "What has lapsed is not delivered.",
        "persons",
    ),
    "bytes_unbounded": Mutant(
        "prepare",
        "(alone or bytes > max_bytes)",
        "alone",
        "One prepare hands out a bounded number of bytes.",
        "priorities",
    ),
    "stranger_leaves_a_retry": Mutant(
        "prepare",
        "count('dropped', redis.call('ZREM', retry, unpack(members)))",
        "count('dropped', 0)",
        "A resting retry is superseded when the copy a stranger sent is taken.",
        "strangers",
    ),
    "owner_unknown": Mutant(
        "prepare",
        "redis.call('HSET', control, 'owner', owner, 'deliveries', text_of(receipt))",
        "redis.call('HSET', control, 'deliveries', text_of(receipt))",
        "Taking sets the owner.",
        "configuring",
    ),
    "sleeps_unnoticed": Mutant(
        "prepare",
        "if sleep then redis.call('HSET', control, 'sleeping_until', text_of(sleep)) end",
        "",
        "Who is left idle is noted, so that it can be woken.",
        "gate",
    ),
    "next_due_forgets_retries": Mutant(
        "prepare",
        "if head[1] then due = math.min(due, bounded(math.floor(tonumber(head[2])), 0, NEVER)) end",
        "",
        "The next due time is the earliest of Store, Retry and time-outs.",
        "waking",
    ),
    "no_upkeep": Mutant(
        "prepare",
        "local expired = expire_due(share)",
        "local expired = 0",
        "A prepare first ends what has timed out.",
        "gate",
    ),
    "no_random_start": Mutant(
        "prepare",
        "local start = (micros * 16807 + receipt * 69621) % 2147483647 % size",
        "local start = 0",
        "Of equal priorities each is first as often as any other.",
        "priorities",
    ),
    "prepare_needs_memory": Mutant(
        "prepare",
        "redis.call('HDEL', control, '')\nif not",
        "if not",
        "A full server lets the queue drain: prepare.",
        "faults",
    ),
    "commit_anyone": Mutant(
        "commit",
        "if record and string.find(record, prefix, 1, true) == 1 then",
        "if record then",
        "Only the holder of its receipt commits a delivery.",
        "gate",
    ),
    "commit_ignores_marks": Mutant(
        "commit",
        "if string.find(record, ' ', width + 1, true) then",
        "if false then",
        "A delivery that a person marked ends as removed or died, also when it succeeds.",
        "duplicates",
    ),
    "commit_takes_the_body": Mutant(
        "commit",
        "if not (waiting[i] or resting[i]) then gone[#gone + 1] = member end",
        "gone[#gone + 1] = member",
        "The copy that waits keeps its body when the one that ran is committed.",
        "persons",
    ),
    "commit_opens_silently": Mutant(
        "commit",
        "if #done + #marked > 0 and tonumber(sleeping_until) == GATE and redis.call('ZCARD', prepare) < room then wake(0) end",
        "",
        "Whoever opens the gate wakes who waits for it.",
        "waking",
    ),
    "commit_miscounts": Mutant(
        "commit",
        "count('committed', redis.call('ZREM', prepare, unpack(done)))",
        "redis.call('ZREM', prepare, unpack(done))\n  count('committed')",
        "Each commit is counted once for each message.",
        "gate",
    ),
    "rollback_anyone": Mutant(
        "rollback",
        "if record and score and string.sub(record, 1, #prefix) == prefix then",
        "if record and score then",
        "Only the holder of its receipt rolls a delivery back.",
        "gate",
    ),
    "rollback_delay_unbounded": Mutant(
        "rollback",
        "if delay then delay = bounded(math.floor(delay), 0, 4398046511104) end",
        "",
        "A rest is never so long that its score has no room for the budget.",
        "retries",
    ),
    "rollback_opens_silently": Mutant(
        "rollback",
        "if ended and tonumber(sleeping_until) == GATE and redis.call('ZCARD', prepare) < room then earliest = 0 end",
        "",
        "Whoever opens the gate wakes who waits for it.",
        "waking",
    ),
    "release_anyone": Mutant(
        "release",
        "string.sub(record, 1, #prefix) == prefix and redis.call('ZSCORE', prepare, member)",
        "redis.call('ZSCORE', prepare, member)",
        "Only the holder of its receipt releases a delivery.",
        "gate",
    ),
    "release_of_a_retry_wins": Mutant(
        "release",
        "kind == 'range_merge' and not is_retry(number) and number < waiting",
        "kind == 'range_merge' and number < waiting",
        "A released retry gives way to the fresh copy that waits.",
        "releasing",
    ),
    "release_keeps_the_later_time": Mutant(
        "release",
        "or (waiting and kind == 'range_merge' and not is_retry(number) and number < waiting)",
        "",
        "Of two fresh copies of a range_merge topic the earlier time counts.",
        "states::test_release",
    ),
    "release_ignores_marks": Mutant(
        "release",
        "elseif string.find(record, ' ', #prefix + 1, true) then",
        "elseif false then",
        "A marked delivery does not return by a release.",
        "duplicates",
    ),
    "extend_anyone": Mutant(
        "extend",
        "if records[i] and score and string.sub(records[i], 1, #prefix) == prefix then",
        "if records[i] and score then",
        "Only the holder of its receipt extends a delivery.",
        "gate",
    ),
    "extend_gives_retries": Mutant(
        "extend",
        "now_s * 1000 + math.floor(score % 1000)",
        "now_s * 1000 + 16",
        "An extended delivery has the retries it had.",
        "releasing",
    ),
    "expire_opens_silently": Mutant(
        "expire",
        "if expired > 0 and tonumber(sleeping_until) == GATE and redis.call('ZCARD', prepare) < room then earliest = 0 end",
        "",
        "Whoever opens the gate wakes who waits for it.",
        "waking",
    ),
    "promote_wakes_nobody": Mutant(
        "promote",
        "if promoted > 0 then wake(now_ms) end",
        "",
        "What comes back from its rest wakes who sleeps.",
        "waking",
    ),
    "release_needs_memory": Mutant(
        "release",
        "    redis.call('ZREM', prepare, member)\n",
        "    redis.call('ZADD', prepare, 0, member)\n    redis.call('ZREM', prepare, member)\n",
        "A full server lets the queue drain: release.",
        "faults",
    ),
    "extend_needs_memory": Mutant(
        "extend",
        "redis.call('HDEL', control, '')\n",
        "",
        "A full server lets listeners go on: extend.",
        "faults",
    ),
    "expire_needs_memory": Mutant(
        "expire",
        "redis.call('HDEL', control, '')\n",
        "",
        "A full server lets the queue drain: expire.",
        "faults",
    ),
    "acquire_does_not_fence": Mutant(
        "acquire",
        "return redis.call('HINCRBY', control, 'epoch', 1)",
        "return redis.call('HINCRBY', control, 'epoch', 0)",
        "Every acquire begins a new epoch.",
        "gate",
    ),
    "acquire_needs_memory": Mutant(
        "acquire",
        "redis.call('HDEL', control, '')\n",
        "",
        "A full server lets the queue drain: acquire.",
        "faults",
    ),
    "acquire_all_does_not_fence": Mutant(
        "acquire_all",
        "redis.call('HINCRBY', control, 'epoch', 1)",
        "redis.call('HINCRBY', control, 'epoch', 0)",
        "Every acquire of many slots begins a new epoch in each.",
        "acquiring",
    ),
    "acquire_all_needs_memory": Mutant(
        "acquire_all",
        "redis.call('HDEL', control, '')\n",
        "",
        "A full server lets the queue drain: acquire_all.",
        "faults",
    ),
    "asleep_over_messages": Mutant(
        "acquire_all",
        "(empty or all_empty(i, 1))",
        "true",
        "Who acquires a slot that holds something does not fall asleep there.",
        "acquiring",
    ),
    "asleep_where_claims_end": Mutant(
        "_empty",
        "keys[n + 4], n = slots_keys[i + 4], n + 4",
        "keys[n + 4], n = slots_keys[i + 2], n + 4",
        "A slot of which Spark holds something is not empty.",
        "acquiring",
    ),
    "asleep_though_paused": Mutant(
        "acquire_all",
        "not (known[2] or known[3])",
        "not known[3]",
        "Nobody is to be woken in a slot that is paused.",
        "acquiring",
    ),
    "asleep_while_moving": Mutant(
        "acquire_all",
        "not (known[2] or known[3])",
        "not known[2]",
        "Who acquires a slot whose messages move is told so by prepare.",
        "acquiring",
    ),
    "asleep_in_another_count": Mutant(
        "acquire_all",
        "(known[1] or slots) == slots",
        "true",
        "Who acquires a slot of another slot count is told so by prepare.",
        "acquiring",
    ),
    "asleep_unannounced": Mutant(
        "acquire_all",
        "'sleeping_until', '9007199254740991')",
        "'sleeping_until', '0')",
        "Senders wake who fell asleep when it acquired.",
        "acquiring",
    ),
    "held_without_receipts": Mutant(
        "held",
        "found[#found + 1] = redis.call('HGET', inflight, member)",
        "found[#found + 1] = '0 0'",
        "held tells the receipt with which the caller goes on.",
        "gate",
    ),
    "held_tells_strangers": Mutant(
        "held",
        "if holding and holding ~= owner and redis.call('ZCARD', prepare) > 0 then return { 'busy' } end",
        "",
        "While another owner's deliveries are open, held answers busy.",
        "gate",
    ),
    "head_though_some_run": Mutant(
        "prepare",
        " and #late == 0 and #free == #rows",
        " and #late == 0",
        "What is taken leaves Store, not what was left out before it.",
        "gate",
    ),
    "head_though_retries_wait": Mutant(
        "prepare",
        " and #late == 0 and #free == #rows",
        " and #free == #rows",
        "What is taken leaves Store, not the retries before it.",
        "retries",
    ),
    "head_though_further_on": Mutant(
        "prepare",
        "local is_head = kind ~= 'priority' and after_score == ''",
        "local is_head = kind ~= 'priority'",
        "What is taken leaves Store, not what lies before the cursor.",
        "priorities",
    ),
    "head_though_the_highest_goes_first": Mutant(
        "prepare",
        "local is_head = kind ~= 'priority' and",
        "local is_head =",
        "What is taken leaves Store, not the lowest priority.",
        "priorities",
    ),
    # --- sending
    "merge_takes_the_later_time": Mutant(
        "send_merge",
        "place(members, rows, envelope, 'merged', false, {})",
        "place(members, rows, envelope, 'merged', true, {})",
        "Merged sends keep the time of the first.",
        "states::test_send",
    ),
    "replace_keeps_the_first": Mutant(
        "send_replace",
        "place(members, rows, envelope, 'replaced', true, {})",
        "place(members, rows, envelope, 'replaced', false, {})",
        "Of several sends the last score counts.",
        "duplicates",
    ),
    "merge_moved_ignored": Mutant(
        "send_merge",
        "if known_slots and known_slots ~= slots then return { 'moved', known_slots } end",
        "",
        "A sender with another slot count is told, and nothing changes.",
        "sending",
    ),
    "replace_takes_any_score": Mutant(
        "send_replace",
        "if not is_fresh(tonumber(score)) then",
        "if false then",
        "A send whose score would read as a retry is refused.",
        "sending",
    ),
    "alone_is_moved_nowhere": Mutant(
        "_alone",
        "known[1] == slots",
        "known[1]",
        "A sender with another slot count is told, and nothing changes.",
        "sending",
    ),
    "alone_wakes_nobody": Mutant(
        "_alone",
        " and not (known[2] and due < tonumber(known[2]))",
        "",
        "A send wakes who sleeps past its due time.",
        "waking",
    ),
    "alone_beyond_the_backlog": Mutant(
        "_alone",
        "alone and limit == 0 and",
        "alone and",
        "A slot refuses what exceeds its part of MAX_BACKLOG.",
        "sending",
    ),
    "alone_takes_the_later_time": Mutant(
        "_alone",
        "redis.pcall('ZADD', store, 'NX', at, alone)",
        "redis.pcall('ZADD', store, at, alone)",
        "Merged sends keep the time of the first.",
        "states::test_send",
    ),
    "alone_merges_with_a_retry": Mutant(
        "_alone",
        "number > floor and number % 1 == 0 and met",
        "number % 1 == 0 and met",
        "A send that meets a waiting retry supersedes it.",
        "states::test_send",
    ),
    "alone_merges_with_a_retry_at_its_priority": Mutant(
        "_alone",
        "number > floor and number % 1 == 0 and met",
        "number > floor and met",
        "A send that meets a waiting retry supersedes it, also at its own priority.",
        "states::test_send",
    ),
    "alone_keeps_the_first": Mutant(
        "_alone",
        "        redis.call('ZADD', store, at, alone)\n",
        "",
        "Of several sends the last score counts.",
        "duplicates",
    ),
    "alone_tells_the_former_score": Mutant(
        "_alone",
        "        kept = at\n",
        "",
        "A send says which score counts.",
        "sending",
    ),
    "alone_leaves_the_resting_retry": Mutant(
        "_alone",
        "not envelope and redis.pcall('EXISTS', retry, body) == 0\n    or not redis.pcall('ZSCORE', retry, alone) and",
        "",
        "A send that meets a resting retry supersedes it.",
        "sending",
    ),
    "alone_ignores_what_rests_unkeyed": Mutant(
        "_alone",
        "not envelope and redis.pcall('EXISTS', retry, body) == 0",
        "not envelope",
        "A send that meets a resting retry supersedes it, and every key's type is looked at before the first write.",
        "states::test_send",
    ),
    "alone_without_a_body": Mutant(
        "_alone",
        "      if envelope then redis.call('HSET', body, alone, ARGV[envelope]) end\n",
        "",
        "The envelope of a keyed message is kept.",
        "states::test_send",
    ),
    "alone_counts_half": Mutant(
        "_alone",
        "      redis.pcall('HINCRBY', stats, word, '1')\n",
        "",
        "The ledger counts every message.",
        "states::test_send",
    ),
    "alone_writes_before_the_ledger_is_known": Mutant(
        "_alone",
        "is_free and type(redis.pcall('HLEN', stats)) == 'number'",
        "is_free",
        "Every key's type is looked at before the first write.",
        "faults",
    ),
    "alone_writes_before_bodies_are_known": Mutant(
        "_alone",
        " and type(redis.pcall('HLEN', body)) == 'number'",
        "",
        "Every key's type is looked at before the first write.",
        "faults",
    ),
    "alone_takes_any_score": Mutant(
        "send_replace",
        "settled_retries and is_fresh(tonumber(at)) and",
        "settled_retries and",
        "A send whose score would read as a retry is refused.",
        "sending",
    ),
    "alone_settles_nothing": Mutant(
        "send_replace",
        "n == 1 and settled_retries and",
        "n == 1 and",
        "The first priority that waits settles which scores are retries.",
        "sending",
    ),
    "ensure_ignores_what_runs": Mutant(
        "ensure",
        "if redis.call('ZCARD', prepare) > 0 then running =",
        "if false then running =",
        "ensure sends nothing that runs already.",
        "states::test_ensure",
    ),
    "ensure_replaces": Mutant(
        "ensure",
        "place(members, rows, envelope, 'present', false, running)",
        "place(members, rows, envelope, 'replaced', true, running)",
        "ensure leaves what waits as it is.",
        "duplicates",
    ),
    # --- persons and programs
    "replay_takes_two": Mutant(
        "replay",
        "if not (redis.call('ZSCORE', store, member) or redis.call('ZSCORE', retry, member)) then",
        "if not redis.call('ZSCORE', store, member) then",
        "A dead message merges with its live copy, also with one that rests.",
        "states::test_replay",
    ),
    "replay_at_once_or_never": Mutant(
        "replay",
        "if is_retry(again) then again = floor_priority() + 1 end",
        "",
        "A replayed message is fresh: its score does not read as a retry.",
        "releasing",
    ),
    "replay_without_body": Mutant(
        "replay",
        "if envelope == '' and has_body == '1' then",
        "if false then",
        "A replayed message has its body again.",
        "persons",
    ),
    "replay_needs_memory": Mutant(
        "replay",
        "if not edited then redis.call('HDEL', control, '') end",
        "",
        "A full server lets the queue drain: replay without a new body.",
        "faults",
    ),
    "bury_leaves_a_retry": Mutant(
        "bury",
        "if resting then redis.call('ZREM', retry, member) end",
        "",
        "What a person buries waits nowhere any more.",
        "persons",
    ),
    "bury_lets_it_run": Mutant(
        "bury",
        "redis.call('HSET', inflight, member, receipt_and_score .. ' buried')",
        "",
        "What a person buries while it runs dies when its delivery ends.",
        "states::test_bury",
    ),
    "remove_lets_it_run": Mutant(
        "remove",
        "redis.call('HSET', inflight, member, receipt_and_score .. ' removed')",
        "",
        "What a person removes while it runs is gone when its delivery ends.",
        "states::test_remove",
    ),
    "remove_digs_up": Mutant(
        "remove",
        "if word == 'not_found' and which ~= 'live' and",
        "if which ~= 'live' and",
        "Removing a live message leaves the dead of that name alone.",
        "states::test_remove_with_a_dead_copy",
    ),
    "remove_leaves_the_body": Mutant(
        "remove",
        "      redis.call('HDEL', failures, member)\n      redis.call('HDEL', body, member)\n",
        "      redis.call('HDEL', failures, member)\n",
        "A removed message takes its body along.",
        "states::test_remove",
    ),
    "discard_takes_the_later_death": Mutant(
        "discard",
        "if tonumber(died) == score then",
        "if true then",
        "Who deletes what was archived leaves alone what has died again since.",
        "persons::test_discarding_deletes_the_death_that_was_seen_and_no_later_one",
    ),
    "reschedule_makes_fresh": Mutant(
        "reschedule",
        "if waiting and not is_retry(waiting) then",
        "if waiting then",
        "A retry that is rescheduled keeps its budget.",
        "states::test_reschedule",
    ),
    "reschedule_early": Mutant(
        "reschedule",
        "redis.call('ZADD', store, score, member)",
        "redis.call('ZADD', store, 'NX', score, member)",
        "A rescheduled message has its new time or priority.",
        "states::test_reschedule",
    ),
    "purge_takes_what_runs": Mutant(
        "purge",
        "if not (running[i] or other[i]) then",
        "if not other[i] then",
        "Purging leaves body and diagnosis of what runs.",
        "states::test_purge",
    ),
    "purge_up_to_all": Mutant(
        "purge",
        "redis.call('ZRANGEBYSCORE', set, lowest, highest, 'LIMIT', 0, limit)",
        "redis.call('ZRANGEBYSCORE', set, '-inf', '+inf', 'LIMIT', 0, limit)",
        "Purging keeps to the scores it was given.",
        "persons",
    ),
    "purge_from_the_lowest": Mutant(
        "purge",
        "redis.call('ZRANGEBYSCORE', set, lowest, highest, 'LIMIT', 0, limit)",
        "redis.call('ZRANGEBYSCORE', set, '-inf', highest, 'LIMIT', 0, limit)",
        "Purging by age leaves what has none.",
        "persons",
    ),
    "loose_takes_what_rests": Mutant(
        "loose",
        "records, homes = body, { store, retry, prepare }",
        "records, homes = body, { store, prepare }",
        "What rests keeps its records.",
        "persons",
    ),
    "loose_forgets_spark": Mutant(
        "loose",
        "{ store, retry, prepare, claim }",
        "{ store, retry, prepare }",
        "What Spark holds keeps its records.",
        "persons",
    ),
    "loose_deletes_unasked": Mutant(
        "loose",
        "if repair and #loose > 0",
        "if #loose > 0",
        "Looking changes nothing.",
        "persons",
    ),
    "pause_for_ever": Mutant(
        "pause",
        "redis.call('HDEL', control, 'paused', 'sleeping_until')",
        "redis.call('HDEL', control, 'sleeping_until')",
        "A slot that is resumed hands out again.",
        "configuring",
    ),
    "pause_tells_nobody": Mutant(
        "pause",
        "redis.pcall('PUBLISH', channel, -1 - slot)",
        "",
        "Who pauses a slot tells whoever holds messages of it.",
        "waking",
    ),
    "resume_wakes_nobody": Mutant(
        "pause",
        "redis.pcall('PUBLISH', channel, slot)",
        "",
        "Who resumes a slot wakes who sleeps.",
        "waking",
    ),
    "configure_rereads_scores": Mutant(
        "configure",
        "math.max(16, max_retries) ~= math.max(16, known) and live > 0",
        "false",
        "MAX_RETRIES does not change where it would make a priority of a retry.",
        "configuring",
    ),
    "configure_only_asks": Mutant(
        "configure",
        "if apply then",
        "if true then",
        "Asking whether a definition could be applied changes nothing.",
        "configuring",
    ),
    "adopt_twice": Mutant(
        "adopt",
        "if (redis.call('HGET', stats, 'foreign') or '0') ~= foreign then return 'changed' end",
        "",
        "Two persons do not book the same foreign messages.",
        "configuring",
    ),
    # --- looking
    "peek_unbounded": Mutant(
        "peek",
        "if bytes >= max_bytes and i + 2 <= #rows then",
        "if false then",
        "A page holds a bounded number of bytes.",
        "paging",
    ),
    "peek_ends_early": Mutant(
        "peek",
        "return { #rows > limit * 2 and 'more' or 'end', found }",
        "return { 'end', found }",
        "A page says whether more follow.",
        "paging",
    ),
    "find_ends_early": Mutant(
        "find",
        "matches >= limit or bytes >= max_bytes or i + 1 == scan * 2",
        "matches >= limit or bytes >= max_bytes",
        "A search says where to go on.",
        "paging",
    ),
    "find_only_in_members": Mutant(
        "find",
        "or (record and string.find(record, text, 1, true))",
        "",
        "A search looks into what is known of failures too.",
        "paging",
    ),
    "count_all_as_due": Mutant(
        "count",
        "due = redis.call('ZCOUNT', store, '-inf', at)",
        "due = waiting",
        "Only what can be taken now is counted as due.",
        "paging",
    ),
    # --- claims
    "claim_ignores_the_gate": Mutant(
        "claim",
        "(serial and in_flight > 0)",
        "false",
        "While a delivery of a serial slot is open, Spark claims nothing of it.",
        "claims",
    ),
    "claims_of_two": Mutant(
        "claim",
        "if (holding > 0 and not ours) or",
        "if",
        "One consumer at a time claims a slot.",
        "claims",
    ),
    "claim_without_an_owner": Mutant(
        "claim",
        "redis.call('HSET', control, 'owner', consumer)",
        "redis.call('HDEL', control, '')",
        "Who claims is the slot's owner.",
        "claims",
    ),
    "claim_of_a_paused_slot": Mutant(
        "claim",
        "if paused then return answer('paused') end",
        "",
        "A paused slot is not claimed from.",
        "claims",
    ),
    "claim_numbers_again": Mutant(
        "claim",
        "(number == newest and state ~= 'open')",
        "false",
        "A sealed claim takes nothing more, however late a request arrives.",
        "claims",
    ),
    "claim_before_the_last_has_ended": Mutant(
        "claim",
        "if ours and number > newest then return answer('unfinished') end",
        "",
        "A consumer's next claim waits for the end of the one before.",
        "claims",
    ),
    "claimed_twice": Mutant(
        "claim",
        "if not (running[i] or held[i]) then",
        "if not running[i] then",
        "What is claimed and sent again is not claimed twice.",
        "claims",
    ),
    "claim_of_what_runs": Mutant(
        "claim",
        "if not (running[i] or held[i]) then",
        "if not held[i] then",
        "What is in flight is not claimed.",
        "claims",
    ),
    "claim_leaves_the_body": Mutant(
        "claim",
        "redis.call('HSET', claim_body, unpack(bodies))",
        "redis.call('HDEL', control, '')",
        "A claim is read again with the bodies that it took.",
        "claims",
    ),
    "claim_of_what_lapsed": Mutant(
        "claim",
        "if envelope and has_lapsed(envelope) then",
        "if false then",
        "A message that has lapsed is not claimed.",
        "claims",
    ),
    "claim_of_the_future": Mutant(
        "claim",
        "redis.call('ZRANGEBYSCORE', store, '-inf', text_of(now_ms),",
        "redis.call('ZRANGEBYSCORE', store, '-inf', '+inf',",
        "Nothing is claimed before its time.",
        "claims",
    ),
    "claim_of_the_future_as_it_is": Mutant(
        "claim",
        "due = redis.call('ZCOUNT', store, '-inf', text_of(now_ms))",
        "due = redis.call('ZCARD', store)",
        "Nothing is claimed before its time, in one step either.",
        "claims",
    ),
    "claim_of_the_wrong_end": Mutant(
        "claim",
        "if not lowest then first, last = -n, -1 end",
        "",
        "What goes into a claim in one step are the first ones of the topic's order.",
        "claims",
    ),
    "claim_of_all_that_waits": Mutant(
        "claim",
        "if rest > 0 then carry(claim, store, rest, kind == 'priority') end",
        "",
        "Where a whole Store changes its name, what is not to be taken goes back.",
        "claims",
    ),
    "claim_carries_back_the_first": Mutant(
        "claim",
        "carry(claim, store, rest, kind == 'priority')",
        "carry(claim, store, rest, kind ~= 'priority')",
        "Where a whole Store changes its name, what goes back are the last ones of the topic's order.",
        "claims",
    ),
    "claim_carries_back_any_number": Mutant(
        "claim",
        "if rest <= STEP and rest < n and",
        "if rest < n and",
        "A claim carries back so many messages and no more.",
        "claims",
    ),
    "claim_copies_any_number": Mutant(
        "claim",
        "  n = math.min(n, STEP)\n",
        "",
        "A step of a claim copies so many messages and no more.",
        "claims",
    ),
    "claim_whole_of_any_size": Mutant(
        "claim",
        "and n * longest_of(n) <= max_bytes then",
        "then",
        "A whole Store is claimed only if it is no larger than was told.",
        "claims",
    ),
    "claim_removes_by_rank_what_runs": Mutant(
        "claim",
        "if #free < #rows then",
        "if false then",
        "What is left out of a claim because it runs stays in Store.",
        "claims",
    ),
    "claim_as_it_is_of_what_runs": Mutant(
        "claim",
        "if in_flight > 0 or redis.call('ZCARD', claim) > 0 then return nil end",
        "if redis.call('ZCARD', claim) > 0 then return nil end",
        "Where something is in flight, each message is looked at before it is claimed.",
        "claims",
    ),
    "claim_overwrites_what_is_claimed": Mutant(
        "claim",
        "if in_flight > 0 or redis.call('ZCARD', claim) > 0 then return nil end",
        "if in_flight > 0 then return nil end",
        "A claim that grows keeps what it holds.",
        "claims",
    ),
    "claim_as_it_is_of_what_rests": Mutant(
        "claim",
        "if redis.call('ZCARD', retry) > 0 or redis.call('HLEN', body) > 0 then return nil end",
        "if redis.call('HLEN', body) > 0 then return nil end",
        "Where something rests, each message is looked at before it is claimed.",
        "claims",
    ),
    "claim_as_it_is_without_bodies": Mutant(
        "claim",
        "if redis.call('ZCARD', retry) > 0 or redis.call('HLEN', body) > 0 then return nil end",
        "if redis.call('ZCARD', retry) > 0 then return nil end",
        "Where there are bodies, each message is looked at before it is claimed.",
        "claims",
    ),
    "claim_of_any_size": Mutant(
        "claim",
        "local fit = math.min(n, math.floor(math.min(max_bytes, STEP_BYTES) / longest_of(n)))",
        "local fit = n",
        "A step of a claim moves no more bytes than it was told.",
        "claims",
    ),
    "claim_copies_any_size": Mutant(
        "claim",
        "math.floor(math.min(max_bytes, STEP_BYTES) / longest_of(n))",
        "math.floor(max_bytes / longest_of(n))",
        "A step of a claim copies so many bytes and no more.",
        "claims",
    ),
    "claim_looks_at_any_size": Mutant(
        "claim",
        "limit, max_bytes = math.min(limit, 1000), math.min(max_bytes, STEP_BYTES)",
        "limit = math.min(limit, 1000)",
        "Where each message is looked at, a claim moves so many bytes and no more.",
        "claims",
    ),
    "claim_forgets_no_consumer": Mutant(
        "claim",
        "if since < now_ms - 2592000000 and",
        "if false and",
        "What ended thirty days ago is forgotten.",
        "claims",
    ),
    "prepare_takes_what_is_claimed": Mutant(
        "prepare",
        "if not (running[i] or held[i]) then",
        "if not running[i] then",
        "Where there is no gate, what Spark has claimed is not handed out.",
        "claims",
    ),
    "prepare_sleeps_past_a_lease": Mutant(
        "prepare",
        "if claimed then due = math.min(due,",
        "if false then due = math.min(due,",
        "Who is busy for a claim asks again when its lease ends.",
        "claims",
    ),
    "leases_never_end": Mutant(
        "_expire",
        "if claimed then lost, due = expire_claim(limit - #late / 2) end",
        "",
        "A claim whose lease has ended is given back by any upkeep.",
        "claims",
    ),
    "lease_ends_early": Mutant(
        "_claims",
        "tonumber(head[2]) > now_ms then",
        "tonumber(head[2]) > now_ms + 1 then",
        "A lease lasts as long as was said.",
        "claims",
    ),
    "lost_is_not_noted": Mutant(
        "_claims",
        "if state ~= 'lost' and state ~= 'returned' then note_claim(head[1], number, 'lost') end",
        "",
        "A claim is lost from the first step of its return on: it reads as empty, and its ack is stale.",
        "claims",
    ),
    "lost_costs_nothing": Mutant(
        "_claims",
        "return_claimed(limit, state ~= 'returned')",
        "return_claimed(limit, false)",
        "The end of a lease spends a retry.",
        "claims",
    ),
    "acked_is_given_back": Mutant(
        "_claims",
        "if state == 'acked' then",
        "if false then",
        "An acknowledgement that was interrupted is finished, not undone.",
        "claims",
    ),
    "returned_overwrites": Mutant(
        "_claims",
        "if merges or not newer then",
        "if true then",
        "A claimed message that comes back gives way to the newer copy.",
        "claims",
    ),
    "returned_body_overwrites": Mutant(
        "_claims",
        "if not newer then redis.call('HSET', body, member, kept) end",
        "redis.call('HSET', body, member, kept)",
        "The newer copy keeps its body when the claimed one comes back.",
        "lockstep",
    ),
    "returned_without_its_body": Mutant(
        "_claims",
        "if not newer then redis.call('HSET', body, member, kept) end",
        "",
        "A claimed message comes back with its body.",
        "claims",
    ),
    "claim_keeps_the_gate": Mutant(
        "_tidy",
        "if left == 0 then redis.call('ZREM', claimants, of) end",
        "",
        "A claim that holds nothing any more opens the gate.",
        "claims",
    ),
    "ack_tears_the_failures_of_the_living": Mutant(
        "_tidy",
        "if not (waiting[i] or resting[i]) then",
        "if true then",
        "A newer copy keeps what is known of its failures when the claimed one is acknowledged.",
        "claims",
    ),
    "ack_leaves_failures": Mutant(
        "_tidy",
        "if #gone > 0 then redis.call('HDEL', failures, unpack(gone)) end",
        "",
        "What is acknowledged takes its failures along.",
        "claims",
    ),
    "ack_without_a_seal": Mutant(
        "ack",
        "if state == 'open' then return { 'open', redis.call('ZCARD', claim) } end",
        "",
        "Only what was sealed, and so could be read whole, is acknowledged.",
        "claims",
    ),
    "ack_of_the_lost": Mutant(
        "ack",
        "or not (state == 'open' or state == 'sealed' or state == 'acked') then",
        "then",
        "The remains of a lost claim cannot be acknowledged.",
        "claims",
    ),
    "ack_is_not_noted": Mutant(
        "ack",
        "if state == 'sealed' then note_claim(consumer, number, 'acked') end",
        "",
        "An acknowledgement is for good from its first step on.",
        "claims",
    ),
    "ack_wakes_nobody": Mutant(
        "ack",
        "redis.call('ZCARD', prepare) < room then wake(0) end",
        "false then wake(0) end",
        "Whoever waits at the gate of a claim is woken when it opens.",
        "claims",
    ),
    "return_wakes_nobody": Mutant(
        "return_claim",
        "redis.call('ZCARD', prepare) < room then earliest = 0 end",
        "false then earliest = 0 end",
        "Whoever waits at the gate of a claim is woken when it is given back.",
        "claims",
    ),
    "return_of_the_acknowledged": Mutant(
        "return_claim",
        "if number ~= newest or state == 'acked' then",
        "if number ~= newest then",
        "What was acknowledged is not given back.",
        "claims",
    ),
    "return_without_end": Mutant(
        "return_claim",
        "    note_claim(consumer, number, state)",
        "",
        "A claim that is being given back reads as empty.",
        "claims",
    ),
    "renewal_of_the_lost": Mutant(
        "renew",
        "or not (state == 'open' or state == 'sealed') then",
        "then",
        "A lost claim is not renewed.",
        "claims",
    ),
    "no_seal": Mutant(
        "renew",
        "if seal and state == 'open' then",
        "if false then",
        "A sealed claim takes nothing more and can be read.",
        "claims",
    ),
    "read_of_another": Mutant(
        "read_claim",
        "if number > 0 and number ~= newest then",
        "if false then",
        "A claim reads as its own rows or as none, never as others: claiming afresh is not re-reading.",
        "claims",
    ),
    "read_of_the_open": Mutant(
        "read_claim",
        "if state == 'sealed' and limit > 0 then",
        "if limit > 0 then",
        "A claim that still grows is not read.",
        "claims",
    ),
    "read_of_the_lost": Mutant(
        "read_claim",
        "if state ~= 'open' and state ~= 'sealed' then return { state, newest, 0, {}, {} } end",
        "",
        "A lost claim reads as empty.",
        "claims",
    ),
    "ensure_ignores_claims": Mutant(
        "ensure",
        "running[i] = running[i] or claimed",
        "running[i] = running[i]",
        "What Spark has claimed is present.",
        "claims",
    ),
    "purge_tears_the_failures_of_the_claimed": Mutant(
        "purge",
        "if not claimed[i] then well[#well + 1] = member end",
        "well[#well + 1] = member",
        "A claimed message keeps what is known of its failures.",
        "claims",
    ),
    "remove_tears_the_failures_of_the_claimed": Mutant(
        "remove",
        "elseif redis.call('ZSCORE', claim, member) then",
        "elseif false then",
        "A person takes nothing from a claim, nor its failures.",
        "claims",
    ),
    "bury_tears_the_failures_of_the_claimed": Mutant(
        "_failures",
        "  if claim and redis.call('ZSCORE', claim, member) then return end",
        "",
        "A claimed message keeps what is known of its failures when its newer copy dies.",
        "claims",
    ),
    "reschedule_misses_the_claimed": Mutant(
        "reschedule",
        "redis.call('ZSCORE', prepare, member) or redis.call('ZSCORE', claim, member)",
        "redis.call('ZSCORE', prepare, member)",
        "A claimed message is in flight.",
        "claims",
    ),
    "configure_ignores_claims": Mutant(
        "configure",
        "\n  + redis.call('ZCARD', claim)",
        "",
        "Scores in a claim are read again when it comes back.",
        "claims",
    ),
    "heads_without_leases": Mutant(
        "heads",
        "if claimed[1] then due",
        "if false then due",
        "The slow poll and the sweep come when a lease ends.",
        "claims",
    ),
    "count_never_paused": Mutant(
        "count",
        "known[2] and 1 or 0",
        "0",
        "A paused slot is shown as paused.",
        "paging",
    ),
    "between_all": Mutant(
        "between",
        "redis.call('ZCOUNT', set, lowest, highest)",
        "redis.call('ZCARD', set)",
        "What is counted before a purge is what the purge takes.",
        "paging",
    ),
    "look_past_its_bound": Mutant(
        "look",
        "if last - first >= 100 then return redis.error_reply('ERR too many members') end",
        "",
        "A look is bounded.",
        "paging",
    ),
    "heads_without_timeouts": Mutant(
        "heads",
        "due = math.min(due, (math.floor(tonumber(running[2]) / 1000) + (tonumber(own) or timeout) + 1) * 1000)",
        "due = due",
        "The slow poll comes when a delivery times out.",
        "paging",
    ),
    "audit_of_another": Mutant(
        "audit",
        "redis.call('ZCARD', prepare), redis.call('ZCARD', retry)",
        "redis.call('ZCARD', retry), redis.call('ZCARD', prepare)",
        "The depths of a ledger are those of its slot.",
        "configuring",
    ),
    # --- rates, permits and requests that are done once
    "permits_never_end": Mutant(
        "limits/ended",
        "local left = math.max(0, (tonumber(held) or 0) - ended)",
        "local left = tonumber(held) or 0",
        "Who settles a message gives its permit back.",
        "quotas",
    ),
    "permits_are_not_renewed": Mutant(
        "limits/ended",
        "local until_ms = lease_ms > 0 and now_ms + lease_ms or tonumber(ends)",
        "local until_ms = tonumber(ends)",
        "What is extended counts as in flight for longer.",
        "quotas",
    ),
    "spent_beyond_the_rate": Mutant(
        "limits/spend",
        "if empty > now_us then return math.ceil(empty - now_us) end",
        "",
        "Nobody sends more than its rate.",
        "quotas",
    ),
    "a_bucket_without_a_bound": Mutant(
        "limits/spend",
        "empty = math.max(empty, now_us - full_us) + each * wanted",
        "empty = empty + each * wanted",
        "Who was silent for long may send no more at once than the rate says.",
        "quotas",
    ),
    "locked_out_by_a_clock": Mutant(
        "limits/spend",
        "if not empty or empty > now_us + full_us then",
        "if not empty then",
        "A clock that is set back locks no sender out.",
        "quotas",
    ),
    "answered_for_another": Mutant(
        "answers/begin",
        "if known and known ~= print then return { 'other' } end",
        "",
        "A key stands for one request.",
        "quotas",
    ),
    "done_twice": Mutant(
        "answers/begin",
        "if kept then return { 'done', kept } end",
        "",
        "A request with a key is done once.",
        "quotas",
    ),
    "done_beside_itself": Mutant(
        "answers/begin",
        "if known and ends and ends > now_ms and ends <= now_ms + lease_ms then return { 'running' } end",
        "",
        "A request with a key is not done twice at the same time.",
        "quotas",
    ),
    "kept_by_the_dead": Mutant(
        "answers/keep",
        "if redis.call('HGET', answer, 'token') ~= token then return 'stale' end",
        "",
        "An attempt that was thought dead does not speak for the one after it.",
        "quotas",
    ),
}

SUITES: dict[str, list[str]] = {
    "lua": ["tests/unit/test_lua.py"],
    "contract": ["tests/contract", "-k", "redis"],
    "lockstep": ["tests/stateful/test_lockstep.py", "--hypothesis-profile=mutants"],
    "faults": ["tests/integration/test_faults.py"],
    "fairness": ["tests/integration/test_fairness.py"],
    "quotas": ["tests/unit/test_quota_scripts.py"],
}
"""The suites that may catch a mutant, from the cheapest to the dearest."""


class Mutation:
    """A plugin of pytest: lets this process, and no other, read the scripts with one rule switched off."""

    def __init__(self, mutant: Mutant | None) -> None:
        self.mutant = mutant

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self) -> None:
        # Not earlier: pytest wants to be the first to import what has plugins for it.
        from hypothesis import HealthCheck, Phase, settings

        from django_rmq import lua

        read = lua._read

        def read_mutated(name: str) -> str:
            text = read(name)
            return self.mutant.applied_to(text) if self.mutant and name == self.mutant.file else text

        lua._read = read_mutated
        lua.load.cache_clear()
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


def run(name: str, arguments: list[str]) -> int:
    """Run pytest against a mutant (or, with no name, against the scripts as they are) in this process."""
    plugins = [Mutation(MUTANTS[name] if name else None)]
    # Already imported by `serve`: the rewriting of their assertions is for tests of those plugins.
    quiet = ["-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    return int(pytest.main(["-x", "-q", *quiet, *arguments], plugins=plugins))


def serve() -> None:
    """Answer each line [name, argument, ...] of the input with a line [exit code, output], in JSON.

    Each run is a child of this process, which has imported what takes long: a tenth of a second instead of seconds.
    """
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "example_project.settings")
    importlib.import_module("django").setup()
    for module in ("django.test", "hypothesis.stateful", "redis", "django_rmq.testing"):
        importlib.import_module(module)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        with tempfile.TemporaryFile() as output:
            child = os.fork()
            if child == 0:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                code = 70
                try:
                    code = run(name, arguments)
                finally:
                    sys.stdout.flush()
                    os._exit(code)
            _, status = os.waitpid(child, 0)
            output.seek(0)
            text = output.read().decode(errors="replace")
        print(json.dumps([os.waitstatus_to_exitcode(status), text]), flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(run(sys.argv[1], sys.argv[2:]))
    serve()
