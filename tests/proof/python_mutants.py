"""Rules of the worker, each switched off by a change to one place of its Python code.

This is the counterpart of `mutants`, which does the same to the scripts in Redis. `python_switch` makes the change, and
`test_python_mutants` runs the tests.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

from tests.proof.mutants import GONE, As, If

IT = "IT"
"""In the new text of a mutant: what the code has there."""


class Value(str):
    """The right side of the marked assignment, what is returned, looped over or entered, reads so."""

    __slots__ = ()


class Function(str):
    """The function of the first call reads so."""

    __slots__ = ()


class Operand(NamedTuple):
    """An operand of ``and`` and ``or``, counted through all of the marked statement, reads so."""

    at: int
    text: str


class Argument(NamedTuple):
    """An argument reads so: of the first call by its position, or of the first call that names it."""

    name: int | str
    text: str


class PythonMutant(NamedTuple):
    """A rule switched off, at the statements of the package that are marked for it: ``# rule: name``.

    The mark is at the end of its line, or on a line of its own before it.
    """

    switch: str | Operand | Argument
    """`GONE` or `As`: the statement; `If`: its condition, or what it excepts; or `Value`, `Function`, `Operand`, `Argument`."""
    rule: str
    """The rule that is switched off, in a sentence."""
    caught_by: tuple[str, ...]
    """The tests that must fail, relative to ``tests``."""
    mark: str = ""
    """Its mark, where that is not its own name: several rules share a statement."""


def marks(text: str) -> dict[str, list[int]]:
    """Return where the marks of a file are: the numbers of the marked lines."""
    marked: dict[str, list[int]] = {}
    waiting: list[str] = []
    for number, line in enumerate(text.split("\n"), 1):
        mark = re.search(r"# rule: (\w+)$", line)
        if line.lstrip().startswith("#"):
            waiting += [mark[1]] if mark else []
            continue
        for name in [*waiting, *([mark[1]] if mark else [])]:
            marked.setdefault(name, []).append(number)
        waiting = []
    return marked


def switched_off(mutant: PythonMutant, mark: str, text: str) -> str:
    """Return a file's text with a rule switched off at its ``mark``, if it is marked there."""
    code, tree = text.encode(), ast.parse(text)
    starts = [0]
    for line in code.split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)
    edits = []
    for number in marks(text).get(mark, []):
        node = _part(_statement(tree, number), mutant.switch)
        if node is None:
            raise ValueError(f"{mark}: line {number} has nothing for {mutant.switch!r}")
        begin = starts[node.lineno - 1] + node.col_offset
        edits.append(
            (begin, starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0), node.col_offset)
        )
    for begin, end, indent in sorted(edits, reverse=True):
        code = code[:begin] + _new(mutant.switch, code[begin:end].decode(), indent).encode() + code[end:]
    return code.decode()


def _new(switch: str | Operand | Argument, old: str, indent: int) -> str:
    if switch == GONE:
        return "pass"
    text = switch if isinstance(switch, str) else switch.text
    if isinstance(switch, As):
        return text.replace("\n", "\n" + " " * indent).replace(IT, old)
    return text.replace(IT, f"({old})")


def _statement(tree: ast.Module, number: int) -> ast.stmt | ast.ExceptHandler:
    """Return the innermost statement of a line."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.stmt | ast.ExceptHandler)]
    around = [node for node in nodes if node.lineno <= number <= (node.end_lineno or 0)]
    return max(around, key=lambda node: (node.lineno, node.col_offset))


Part = ast.expr | ast.stmt | ast.ExceptHandler


def _part(node: ast.stmt | ast.ExceptHandler, switch: str | Operand | Argument) -> Part | None:
    """Return what a switch replaces of a statement."""
    if switch == GONE or isinstance(switch, As):
        return node
    if isinstance(switch, If):
        return _condition(node)
    if isinstance(switch, Value):
        if isinstance(node, ast.With):
            return node.items[0].context_expr
        return getattr(node, "iter", None) or getattr(node, "value", None)
    inside = list(_expressions(node))
    if isinstance(switch, Operand):
        operands = {id(each) for node in inside if isinstance(node, ast.BoolOp) for each in node.values}
        leaves = [each for each in inside if id(each) in operands and not isinstance(each, ast.BoolOp)]
        return leaves[switch.at] if switch.at < len(leaves) else None
    calls = [each for each in inside if isinstance(each, ast.Call)]
    if isinstance(switch, Argument) and isinstance(switch.name, str):
        return next((word.value for call in calls for word in call.keywords if word.arg == switch.name), None)
    if not calls:
        return None
    if isinstance(switch, Argument):
        return calls[0].args[int(switch.name)] if int(switch.name) < len(calls[0].args) else None
    return calls[0].func


def _condition(node: ast.stmt | ast.ExceptHandler) -> ast.expr | None:
    if isinstance(node, ast.ExceptHandler):
        return node.type
    if isinstance(node, ast.If | ast.While):
        return node.test
    inside = list(_expressions(node))
    choices = [each.test for each in inside if isinstance(each, ast.IfExp)]
    lists = [each for each in inside if isinstance(each, ast.ListComp | ast.SetComp | ast.GeneratorExp)]
    filters = [test for each in lists for part in each.generators for test in part.ifs]
    return next(iter(choices + filters), None)


def _expressions(node: ast.AST) -> Iterator[ast.expr]:
    """Iterate over the expressions of a statement without the statements in it, in their order."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.ExceptHandler):
            continue
        if isinstance(child, ast.expr):
            yield child
        yield from _expressions(child)


DISPATCHER = "integration/test_dispatcher.py::test_"
HUNG = "integration/test_hung_listeners.py::test_"
DEFINITIONS = "integration/test_definitions.py::test_"
FOREIGN = "integration/test_foreign_values.py::test_"
CLUSTER = "integration/test_cluster.py::test_"
EXECUTOR = "integration/test_executor.py::test_"
CELLS = "unit/test_cells.py::test_"
HOOKS = "integration/test_async_hooks.py::test_"
LEFTOVERS = "integration/test_leftovers.py::test_"
LISTS = "integration/test_failing_batches.py::test_"
OVERLAPPING = "integration/test_overlapping.py::test_"
SCHEDULES = "integration/test_schedules.py::test_"
SIZES = "integration/test_bytes_in_hand.py::test_"
ORDER = "integration/test_order.py::test_"
STOPPING = "integration/test_stopping.py::test_"
SUPERVISOR = "unit/test_supervisor.py::test_"
THREADS = "integration/test_threads.py::test_"
TYPED = "unit/test_typed_bodies.py::test_"
TRIPS = "integration/test_dispatcher_trips.py::test_"
WHOLE = "integration/test_whole_deliveries.py::test_"

PYTHON_MUTANTS: dict[str, PythonMutant] = {
    # --- the dispatcher
    "prepares_without_its_epoch": PythonMutant(
        Argument(3, "None"),
        "A worker shows its epoch, so that a later owner of the slot fences it.",
        (DISPATCHER + "a_fenced_worker_leaves_a_slot_alone_that_another_one_holds",),
    ),
    "keeps_what_it_was_fenced_from": PythonMutant(
        GONE,
        "A fenced worker gives back what has not begun.",
        (DISPATCHER + "a_fenced_worker_gives_back_what_has_not_begun",),
    ),
    "forgets_what_it_told_before": PythonMutant(
        GONE,
        "A settlement whose answer was lost is known to be a repetition.",
        (TRIPS + "a_commit_whose_answer_is_lost_is_told_again",),
    ),
    "commits_as_a_whole_what_is_not_alone": PythonMutant(
        Operand(0, "True"),
        "Only what was delivered alone is committed as a whole.",
        (WHOLE + "what_is_delivered_beside_another_delivery_is_named",),
    ),
    "takes_each_report_for_a_whole_delivery": PythonMutant(
        Value("True"),
        "Only what a thread reports at once is committed as a whole.",
        (WHOLE + "what_a_thread_reports_in_parts_is_named",),
    ),
    "takes_what_needs_names_for_refused": PythonMutant(
        Value("bool(self._acks.pending)"),
        "A worker ends after it has named what could not be committed as a whole.",
        (WHOLE + "a_worker_that_ends_names_what_could_not_be_committed_as_a_whole",),
    ),
    "takes_no_answer_for_an_end": PythonMutant(
        Operand(1, "False"),
        "What could not be committed as a whole is committed by name.",
        (WHOLE + "what_a_person_marks_meanwhile_ends_as_marked",),
    ),
    "sleeps_over_what_a_fail_over_brings_back": PythonMutant(
        GONE,
        "A slot is asked again when an end was stale: a fail-over may have brought its message back.",
        (TRIPS + "a_slot_is_asked_again_when_a_fail_over_has_lost_what_it_delivered",),
    ),
    "starts_in_a_slot_that_is_shut": PythonMutant(
        If("False"),
        "Nothing begins in a slot that is shut for a listener that does not return.",
        (THREADS + "nothing_begins_in_a_slot_that_is_shut_for_a_listener_that_does_not_return[True]",),
    ),
    "overlooks_what_comes_when_it_falls_asleep": PythonMutant(
        If("False"),
        "What comes just when a worker begins to wait wakes it.",
        (TRIPS + "whatever_comes_ends_the_sleep_of_a_worker",),
    ),
    "keeps_what_a_dead_thread_had": PythonMutant(
        GONE,
        "What a dead thread had is in hand no more.",
        (THREADS + "a_dead_thread_is_replaced_and_holds_nothing[True-1]",),
    ),
    "gives_back_what_has_ended": PythonMutant(
        If("False"),
        "A message is given back once.",
        (HUNG + "of_a_slot_with_two_batches_in_hand_each_message_is_given_back_once",),
    ),
    "takes_for_threads_that_are_taken": PythonMutant(
        If("False"),
        "Nothing is taken for a thread whose call does not end.",
        (HUNG + "behind_hung_calls_of_its_own_topic_nothing_waits_in_hand[by priority]",),
    ),
    "keeps_slots_with_a_thread_that_is_taken": PythonMutant(
        Value("False"),
        "Slots of a thread whose call does not end go to other threads.",
        (HUNG + "the_other_slots_of_a_thread_that_hangs_go_to_threads_that_are_free",),
    ),
    "stops_lists_that_it_refreshes": PythonMutant(
        Argument("drops", "True"),
        "A list that failed is settled also while the rest of its batch is taken again.",
        (LISTS + "a_list_is_settled_in_one_pass_though_it_fails_while_the_rest_of_its_batch_is_taken_again",),
    ),
    "takes_all_bytes": PythonMutant(
        If("False"),
        "The bytes in hand of a process are bounded.",
        (
            SIZES + "large_messages_are_worked_off_within_a_bound[True-in the member]",
            SIZES + "large_messages_are_worked_off_within_a_bound[False-in the envelope]",
        ),
    ),
    "takes_the_time_out_of_the_topic": PythonMutant(
        Argument("timeout", "None"),
        "A worker keeps to the time-outs of single messages.",
        (DISPATCHER + "a_message_is_given_back_and_not_begun_when_half_of_its_time_out_is_over[60-30]",),
    ),
    # --- the executor
    "begins_without_half_a_time_out_left": PythonMutant(
        Operand(0, "False"),
        "Nothing begins with less than half of its time-out left.",
        (
            EXECUTOR + "what_was_confirmed_longer_than_half_a_time_out_ago_does_not_begin[None]",
            OVERLAPPING + "what_was_confirmed_longer_than_half_a_time_out_ago_does_not_begin",
            DISPATCHER + "a_message_is_given_back_and_not_begun_when_half_of_its_time_out_is_over[30-None]",
        ),
    ),
    "lists_lose_patience": PythonMutant(
        If("False"),
        "A list that failed is settled in one pass.",
        (EXECUTOR + "a_list_that_failed_is_settled_also_when_the_rest_of_its_batch_is_wanted_back[False]",),
    ),
    "overtakes_receipts": PythonMutant(
        If("False"),
        "The receipts of a serial slot rise.",
        (THREADS + "of_a_serial_slot_the_older_batch_runs_first_whatever_their_heads",),
    ),
    "trusts_errors": PythonMutant(
        If("ZeroDivisionError"),
        "An error that cannot be described is a failure like any other.",
        (THREADS + "an_error_whose_class_fails_is_a_failure_like_any_other[None]",),
    ),
    "does_not_report_what_it_failed_at": PythonMutant(
        GONE,
        "A failure outside a listener ends its batch.",
        (THREADS + "what_a_thread_fails_at_outside_a_listener_is_reported_before_it_is_logged",),
    ),
    # --- the event loop
    "slots_overlap": PythonMutant(
        If("False"),
        "In a serial slot one call of an async listener runs at a time.",
        (
            OVERLAPPING + "two_batches_of_one_serial_slot_never_overlap",
            CELLS + "a_slot_has_one_turn_at_a_time_in_the_order_of_its_receipts",
        ),
    ),
    "runs_all_at_once": PythonMutant(
        Value("1_000_000"),
        "No more calls of a topic overlap than its CONCURRENCY.",
        (OVERLAPPING + "no_more_batches_run_than_the_concurrency",),
    ),
    "takes_more_than_it_can_run": PythonMutant(
        Value("1_000_000"),
        "A worker takes no more for its event loop than that can run.",
        (OVERLAPPING + "a_worker_takes_no_more_than_it_can_run",),
    ),
    "begins_after_the_stop": PythonMutant(
        Operand(0, "False"),
        "What an async listener has not begun when its worker stops is given back.",
        (OVERLAPPING + "a_batch_halted_on_the_way_reports_the_rest_as_not_begun",),
    ),
    "leaves_slots_of_a_blocked_loop_open": PythonMutant(
        Value("list(IT)[:1]"),
        "While the event loop is blocked, nothing begins in the slots of what runs there.",
        (OVERLAPPING + "a_loop_that_is_blocked_beyond_max_runtime_is_replaced_and_its_slots_stay_shut",),
    ),
    "shares_cells": PythonMutant(
        Value("list(range(len(IT)))"),
        "What a batch records is not overwritten by another one.",
        (CELLS + "what_ran_while_many_others_came_and_went_is_known_after_a_death",),
    ),
    "shares_connections": PythonMutant(
        GONE,
        "Calls that overlap have threads, and so connections, of their own.",
        (HOOKS + "calls_that_overlap_have_threads_of_their_own_and_each_call_only_one",),
    ),
    "copies_go_on": PythonMutant(
        If("False"),
        "A process that a listener forked ends when the listener returns in it.",
        (
            THREADS + "a_listener_that_forks_and_returns_in_the_child_ends_it[None-returns]",
            THREADS + "a_listener_that_forks_and_returns_in_the_child_ends_it[10-raises]",
        ),
    ),
    # --- the order of strict topics
    "goes_on_behind_a_failure": PythonMutant(
        If("False"),
        "A thread begins nothing behind a message of a strict topic that failed.",
        (ORDER + "a_worker_holds_a_strict_slot_behind_a_message_that_failed",),
    ),
    "asks_beside_a_commit": PythonMutant(
        Value("set()"),
        "A strict slot is asked again only once Redis has answered its commit, which a later trip may overtake.",
        (TRIPS + "a_strict_slot_is_not_asked_before_its_commit_is_known",),
    ),
    "goes_on_behind_what_it_lost": PythonMutant(
        If("False"),
        "A thread begins nothing behind a message of a strict topic that it no longer holds.",
        (ORDER + "a_stale_message_ends_its_batch",),
    ),
    "commits_behind_a_failure": PythonMutant(
        If("False"),
        "Of a list of a strict topic, only what precedes its first failure is committed.",
        (ORDER + "a_list_commits_only_what_comes_before_its_first_failure[many-4]",),
    ),
    "lists_retries_last": PythonMutant(
        If("False"),
        "A batch listener is given fifo messages in their order, also those that failed.",
        (ORDER + "retries_of_a_fifo_topic_are_listed_in_their_place",),
    ),
    "sends_on_behind_an_error": PythonMutant(
        Value("False"),
        "What comes behind an error of a fifo send is not sent.",
        (ORDER + "what_comes_behind_an_error_is_not_sent",),
    ),
    "rest_hands_out_many_of_a_strict_slot": PythonMutant(
        If("False"),
        "A program is given one message of a strict slot at a time.",
        (ORDER + "a_program_is_given_one_message_of_a_strict_slot_at_a_time[strict-1]",),
    ),
    # --- its threads
    "log_calls_raise": PythonMutant(
        If("ZeroDivisionError"),
        "A log call ends no thread.",
        (THREADS + "a_log_filter_that_raises_ends_no_thread[10]",),
    ),
    "dead_threads_stay_dead": PythonMutant(
        If("True"),
        "A dead thread is replaced.",
        (
            THREADS + "a_dead_thread_is_replaced_and_holds_nothing[True-0]",
            THREADS + "a_dead_heartbeat_is_replaced",
            THREADS + "a_dead_wake_up_thread_is_replaced",
        ),
    ),
    "coordinators_are_not_revived": PythonMutant(
        If("False"),
        "The thread that tells a worker what it owns is replaced when it has died.",
        (THREADS + "a_coordinator_goes_on_when_its_threads_have_died",),
    ),
    "beats_without_all_its_threads": PythonMutant(
        If("False"),
        "A process that cannot replace a thread is not ready, and the watchdog counts.",
        ("unit/test_notes.py::test_a_process_that_lacks_a_thread_is_not_ready_and_does_not_beat",),
    ),
    "successors_share_marks": PythonMutant(
        If("False"),
        "The successor of a thread that hangs notes elsewhere what it runs.",
        (THREADS + "a_successor_shares_no_marks_with_a_thread_that_hangs",),
    ),
    # --- the heartbeat
    "extends_for_dead_threads": PythonMutant(
        If("False"),
        "A batch whose thread is dead is not extended.",
        (THREADS + "a_batch_of_a_dead_thread_is_not_extended",),
    ),
    "never_gives_up": PythonMutant(
        If("False"),
        "A delivery whose listener exceeds MAX_RUNTIME is not extended.",
        (DISPATCHER + "a_hung_listener_times_out_while_the_other_slots_of_its_thread_go_on",),
    ),
    # --- stopping what runs
    "asks_nothing_when_something_is_cancelled": PythonMutant(
        Value("0.0"),
        "A worker asks at once what was cancelled of what it has in hand.",
        (STOPPING + "a_sync_listener_sees_that_it_is_cancelled_and_stops",),
    ),
    "misses_what_was_cancelled_while_it_was_deaf": PythonMutant(
        Argument(1, "0.0"),
        "A worker that subscribes again asks what was cancelled meanwhile.",
        (STOPPING + "a_worker_that_missed_the_news_is_told[it subscribes again-19]",),
    ),
    "forgets_news_of_what_is_not_in_hand_yet": PythonMutant(
        If("True"),
        "News that something was cancelled may come before its batch is in hand.",
        (STOPPING + "news_that_comes_before_its_batch_is_in_hand_is_kept_for_it",),
    ),
    "extends_what_is_abandoned": PythonMutant(
        Operand(0, "True"),
        "News that something was cancelled extends nothing that exceeded MAX_RUNTIME.",
        (STOPPING + "what_is_abandoned_is_not_extended_by_news",),
    ),
    "disturbs_a_coroutine_that_cleans_up": PythonMutant(
        Operand(2, "True"),
        "A coroutine is cancelled once for each reason.",
        (STOPPING + "a_coroutine_that_learns_by_extending_is_cancelled_once",),
    ),
    "charges_those_that_a_blocked_loop_keeps_waiting": PythonMutant(
        Function("(lambda: 0.0)"),
        "The time for which one coroutine blocks the loop is not charged to the others.",
        (STOPPING + "a_coroutine_that_blocks_the_loop_costs_only_itself",),
    ),
    "cancels_a_list_for_one_message": PythonMutant(
        Function("any"),
        "An async list is cancelled only if all of its messages are.",
        (STOPPING + "in_a_list_each_message_is_told_by_itself[True]",),
    ),
    "ends_a_list_that_ran_too_long_as_a_whole": PythonMutant(
        GONE,
        "Of an async list that exceeded HARD_TIMEOUT, each message has a time of its own.",
        (STOPPING + "an_async_list_that_runs_for_too_long_is_tried_one_by_one",),
    ),
    "waits_for_coroutines_that_do_not_end": PythonMutant(
        If("False"),
        "A coroutine that was cancelled and does not end costs its process.",
        (STOPPING + "a_thread_that_runs_for_too_long_ends_its_worker_and_only_its_message_is_charged[True]",),
    ),
    "logs_before_it_ends_a_call": PythonMutant(
        As('logger.error("HARD_TIMEOUT")\nIT'),
        "A listener that holds the lock of a log handler is ended, too.",
        (STOPPING + "a_listener_that_holds_the_lock_of_a_log_handler_ends_its_worker_all_the_same",),
    ),
    "charges_the_neighbours_of_what_ran_too_long": PythonMutant(
        Operand(1, "False"),
        "Who ran beside a listener that exceeded HARD_TIMEOUT is not charged.",
        (
            STOPPING
            + "a_thread_that_runs_for_too_long_ends_its_worker_and_only_its_message_is_charged[False]",
        ),
    ),
    "forgives_what_ran_too_long": PythonMutant(
        GONE,
        "What exceeded HARD_TIMEOUT uses a retry.",
        (
            STOPPING
            + "a_thread_that_runs_for_too_long_ends_its_worker_and_only_its_message_is_charged[False]",
        ),
    ),
    "leaves_to_others_what_still_runs": PythonMutant(
        Argument("keeps_beating", "False"),
        "Until its process has ended, a listener that exceeded HARD_TIMEOUT keeps its message.",
        (STOPPING + "until_its_process_has_ended_a_listener_keeps_its_message",),
    ),
    "forgets_what_was_cancelled_with_a_lost_answer": PythonMutant(
        If("word == 'ok'"),
        "What a lost answer had handed out, and was cancelled since, ends at once.",
        (TRIPS + "what_is_cancelled_before_a_lost_answer_is_made_up_for_ends_without_having_begun",),
    ),
    "begins_what_was_cancelled": PythonMutant(
        If("False"),
        "What was cancelled in the hand of a worker does not begin.",
        (STOPPING + "what_is_in_hand_and_has_not_begun_does_not_begin[True]",),
    ),
    # --- slots that others have acquired
    "stays_away_from_its_own": PythonMutant(
        If("False"),
        "A fenced slot is acquired again when the coordinator, asked since, says that it is ours.",
        ("integration/test_fences.py::test_a_worker_that_missed_an_assignment_goes_on_with_its_slots",),
    ),
    "takes_an_old_answer_for_a_new_one": PythonMutant(
        If("True"),
        "What was asked before a slot was fenced does not say that it is ours.",
        ("unit/test_fences.py::test_only_a_later_question_gives_a_fenced_slot_back",),
        mark="stays_away_from_its_own",
    ),
    # --- messages that timed out
    "repeated_suspects_run_together": PythonMutant(
        Operand(3, "False"),
        "Messages that timed out repeatedly run one at a time.",
        (
            "unit/test_suspects.py::test_several_wait_and_run_in_their_order",
            DISPATCHER + "messages_that_timed_out_repeatedly_run_one_at_a_time_and_hold_up_no_other",
        ),
    ),
    "every_suspect_waits": PythonMutant(
        Argument(1, "batch.messages[0].max_retries - left >= 1"),
        "A message that timed out once holds up no other one.",
        (DISPATCHER + "a_slow_message_that_timed_out_once_holds_up_no_other_and_nothing_behind_it",),
        mark="the_last_try_has_company",
    ),
    "the_last_try_has_company": PythonMutant(
        Argument(0, "False"),
        "A message on its last try runs beside no suspect.",
        ("unit/test_suspects.py::test_who_waits_is_not_overtaken_by_one_that_it_is_kept_apart_from",),
    ),
    # --- what a dead process leaves
    "left_to_its_time_out": PythonMutant(
        As("continue"),
        "What ran in a process that is dead is charged at once.",
        (
            "unit/test_notes.py::test_what_ran_in_a_dead_process_rests_as_after_a_time_out_and_is_handed_out_alone",
        ),
    ),
    "given_back_for_nothing": PythonMutant(
        If("True"),
        "What ran in a process that is dead may have killed it, and spends a retry.",
        ("unit/test_notes.py::test_a_message_without_retries_that_ran_in_a_dead_process_is_dead",),
        mark="charges_the_neighbours_of_what_ran_too_long",
    ),
    # --- how a process ends, and what a message leaves
    "believes_an_exit_code": PythonMutant(
        Value("status"),
        "An exit that a process has not announced is a death, whatever its code.",
        (
            SUPERVISOR + "an_exit_that_the_process_has_not_announced_is_a_death_whatever_its_code[_exit-0-1]",
            SUPERVISOR + "an_exit_that_the_process_has_not_announced_is_a_death_whatever_its_code[exit-75-3]",
        ),
    ),
    "ends_without_exit_handlers": PythonMutant(
        GONE,
        "A process that ends by itself runs exit handlers.",
        (SUPERVISOR + "exit_handlers_run_after_an_end_that_was_announced",),
    ),
    "ends_what_the_parent_has_made": PythonMutant(
        GONE,
        "A process leaves alone what modules have made in its parent.",
        (SUPERVISOR + "what_modules_have_made_in_the_parent_stays_when_a_process_ends",),
    ),
    "copies_keep_the_handlers_of_a_worker": PythonMutant(
        Argument(1, "signal.SIG_IGN"),
        "A process that a listener forks ends on SIGTERM.",
        (SUPERVISOR + "a_copy_of_a_worker_does_not_keep_its_signal_handler",),
    ),
    "leaves_a_transaction_open": PythonMutant(
        GONE,
        "A transaction that a message leaves open ends with it.",
        (LEFTOVERS + "a_transaction_left_open_fails_its_message_and_no_other[sqlite-leave-one]",),
    ),
    "commits_what_left_a_transaction_open": PythonMutant(
        GONE,
        "A message that leaves a transaction open has failed.",
        (LEFTOVERS + "of_a_list_only_the_message_that_leaves_a_transaction_open_fails",),
    ),
    "lets_an_old_block_end_a_transaction": PythonMutant(
        GONE,
        "A block that was left open ends no transaction of another message.",
        (LEFTOVERS + "the_late_end_of_an_open_block_ends_no_transaction_of_another_message",),
    ),
    "shares_a_context": PythonMutant(
        Function("(lambda function, *given: function(*given))"),
        "Context variables, language and time zone end with the call of a listener.",
        (LEFTOVERS + "language_time_zone_and_context_variables_end_with_the_call[sqlite-one]",),
    ),
    # --- what strangers write
    "a_foreign_value_ends_the_process": PythonMutant(
        If("ZeroDivisionError"),
        "A value that cannot be read is an error of its slot.",
        (
            FOREIGN + "foreign_values_stop_their_slot_at_most_and_nothing_when_they_are_gone[before]",
            FOREIGN + "an_answer_that_means_nothing_names_its_script_and_key",
        ),
    ),
    # --- definitions
    "changed_under_workers": PythonMutant(
        If("False"),
        "What running workers would not follow is not applied.",
        (DEFINITIONS + "rmqtopics_does_not_apply_what_running_workers_would_not_follow[timeout]",),
    ),
    "senders_compare_everything": PythonMutant(
        Operand(0, "False"),
        "A change of what only consumers need never raises in a sender.",
        (DEFINITIONS + "a_sender_follows_redis_in_what_only_consumers_need[max_retries]",),
    ),
    "senders_keep_their_retries": PythonMutant(
        Value("{'slots': IT['slots']}"),
        "The first priority of a slot settles the retries that Redis has, not those of its sender.",
        (DEFINITIONS + "the_first_priority_of_a_slot_settles_the_registered_retries",),
    ),
    # --- typed bodies
    "tries_an_unfit_body_again": PythonMutant(
        If("False"),
        "A body that does not fit its type is dead at once.",
        (TYPED + "a_body_that_does_not_fit_is_dead_at_once_and_reaches_no_listener",),
    ),
    "trusts_instances": PythonMutant(
        Argument(1, "self._instance(adapter, body)"),
        "An instance is validated with all that is in it, and what could not be read is not sent.",
        (
            TYPED + "what_a_dataclass_does_not_enforce_is_converted_or_refused",
            TYPED + "what_could_not_be_read_is_not_sent",
        ),
    ),
    # --- a Redis Cluster
    "what_never_ran_is_refused": PythonMutant(
        If("False"),
        "What no node has run in time may be tried again.",
        (
            CLUSTER + "scripts_that_a_node_forgets_again_and_again_are_trouble_of_that_node",
            CLUSTER + "a_slot_whose_nodes_all_say_that_it_is_elsewhere_is_trouble_of_its_node[script]",
        ),
    ),
    # --- schedules
    "an_old_worker_removes_what_a_newer_one_declares": PythonMutant(
        If("False"),
        "A schedule is removed only when no live worker declares it.",
        (SCHEDULES + "an_old_worker_that_starts_again_does_not_take_away_what_a_newer_one_declares",),
    ),
    "an_older_version_replaces_the_present_one": PythonMutant(
        If("False"),
        "Versions side by side do not change a schedule back and forth.",
        (SCHEDULES + "versions_side_by_side_do_not_change_a_schedule_back_and_forth",),
    ),
    "an_outage_counts_as_silence": PythonMutant(
        GONE,
        "While Redis is unavailable nobody can say that it declares a schedule.",
        (SCHEDULES + "while_redis_is_unavailable_nobody_counts_as_gone",),
    ),
    "a_lost_schedule_stays_lost": PythonMutant(
        As("return False"),
        "A schedule that Redis has lost is declared again.",
        (SCHEDULES + "schedules_that_redis_has_lost_go_on_and_the_log_says_so",),
    ),
    "a_stale_tick_counts_as_written": PythonMutant(
        Operand(0, "False"),
        "A tick of a generation that its slot refuses is planned again.",
        (SCHEDULES + "a_tick_of_a_schedule_whose_last_changes_were_lost_is_written_all_the_same",),
    ),
    "a_tick_written_again_is_another_message": PythonMutant(
        Argument(1, "str(__import__('uuid').uuid4())"),
        "A tick that is written again has the same origin.",
        (SCHEDULES + "a_tick_that_is_written_again_has_the_same_origin",),
    ),
    "a_tick_stays_where_old_rules_put_it": PythonMutant(
        Operand(0, "not IT"),
        "New rules of a time zone move the tick that waits.",
        (
            SCHEDULES
            + "new_rules_of_a_time_zone_move_the_tick_that_waits_and_it_runs_once[3-2027-01-01T09:00:00Z]",
        ),
    ),
    "new_rules_repeat_a_run": PythonMutant(
        Operand(2, "False"),
        "A fixed time of day runs once, also where the rules of its time zone change on that day.",
        (SCHEDULES + "new_rules_within_the_day_of_a_run_neither_repeat_it_nor_leave_it_out[set forward]",),
    ),
}

__all__ = ["PYTHON_MUTANTS", "PythonMutant"]
