"""Rules of the worker, each switched off by a change to one place of its Python code.

This is the counterpart of `mutants`, which does the same to the scripts in Redis. `test_python_mutants` runs the tests.
"""

from __future__ import annotations

from typing import NamedTuple


class PythonMutant(NamedTuple):
    """One rule switched off: ``find`` occurs exactly once in the file and is replaced."""

    file: str
    """Relative to the package ``django_rmq``."""
    find: str
    replace: str
    rule: str
    """The rule that is switched off, in a sentence."""
    caught_by: tuple[str, ...]
    """The tests that must fail, relative to ``tests``."""

    def applied_to(self, text: str) -> str:
        """Return the file's text with the rule switched off."""
        if text.count(self.find) != 1:
            raise ValueError(f"{self.file} contains {text.count(self.find)} times, not once: {self.find}")
        return text.replace(self.find, self.replace)


DISPATCHER = "integration/test_dispatcher.py::test_"
EXECUTOR = "integration/test_executor.py::test_"
TRIPS = "integration/test_dispatcher_trips.py::test_"

PYTHON_MUTANTS: dict[str, PythonMutant] = {
    # --- the dispatcher
    "prepares_without_its_epoch": PythonMutant(
        "consumer/dispatcher.py",
        "topic, place.slot, self.owner, place.epoch, limit,",
        "topic, place.slot, self.owner, None, limit,",
        "A worker shows its epoch, so that a later owner of the slot fences it.",
        (DISPATCHER + "a_fenced_worker_leaves_a_slot_alone_that_another_one_holds[memory]",),
    ),
    "keeps_what_it_was_fenced_from": PythonMutant(
        "consumer/dispatcher.py",
        'place.due, place.entry = float("inf"), 0\n        self._give_back_slot(place)',
        'place.due, place.entry = float("inf"), 0',
        "A fenced worker gives back what has not begun.",
        (DISPATCHER + "a_fenced_worker_gives_back_what_has_not_begun[memory]",),
    ),
    "forgets_what_it_told_before": PythonMutant(
        "consumer/dispatcher.py",
        "kept.messages |= settlement.messages\n            kept.repeated = True",
        "kept.messages |= settlement.messages",
        "A settlement whose answer was lost is known to be a repetition.",
        (TRIPS + "a_commit_whose_answer_is_lost_is_told_again",),
    ),
    # --- the executor
    "begins_without_half_a_time_out_left": PythonMutant(
        "consumer/executor.py",
        "now > batch.confirmed + half or ",
        "",
        "Nothing begins with less than half of its time-out left.",
        (
            EXECUTOR + "what_was_confirmed_longer_than_half_a_time_out_ago_does_not_begin[None]",
            DISPATCHER + "what_was_confirmed_too_long_ago_is_given_back_and_not_begun[memory]",
        ),
    ),
    # --- the heartbeat
    "never_gives_up": PythonMutant(
        "consumer/heartbeat.py",
        "if since is not None and now - since > batch.topic.max_runtime:",
        "if False:",
        "A delivery whose listener exceeds MAX_RUNTIME is not extended.",
        (DISPATCHER + "a_hung_listener_times_out_while_the_other_slots_of_its_thread_go_on[memory]",),
    ),
}

__all__ = ["PYTHON_MUTANTS", "PythonMutant"]
