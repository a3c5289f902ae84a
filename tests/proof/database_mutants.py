"""Rules of the outbox and of listeners with ``once``, each switched off by a change to one place; see `python_mutants`."""

from __future__ import annotations

from tests.proof.python_mutants import PythonMutant

ONCE = "integration/test_once.py::test_"
OUTBOX = "integration/test_outbox.py::test_"

DATABASE_MUTANTS: dict[str, PythonMutant] = {
    "keeps_the_effects_of_a_failure": PythonMutant(
        "project/listening/once.py",
        "connection.set_rollback(True)",
        "pass",
        "What a listener with once wrote is rolled back unless its message is a success.",
        (ONCE + "whatever_is_no_success_rolls_back",),
    ),
    "calls_again_for_what_is_recorded": PythonMutant(
        "project/listening/once.py",
        "return (messages if made.new else []), made.id",
        "return messages, made.id",
        "A listener with once is not called for a message that was processed before.",
        (ONCE + "a_delivery_whose_end_was_lost_has_no_second_effect",),
    ),
    "forgets_rows_without_replicas": PythonMutant(
        "project/outbox/rows.py",
        "and (result.replicas or 0) >= self.wanted.replicas",
        "and True",
        "A row stays until as many replicas as it requires have its message.",
        (OUTBOX + "a_row_stays_until_enough_replicas_have_its_message",),
    ),
    "goes_on_without_its_row": PythonMutant(
        "project/outbox/rows.py",
        "with transaction.mark_for_rollback_on_error(using=alias):",
        "if True:",
        "A transaction whose row could not be written cannot be committed.",
        (OUTBOX + "a_row_that_cannot_be_written_undoes_its_transaction",),
    ),
    "trusts_a_relay_that_is_under_way": PythonMutant(
        "project/outbox/rows.py",
        "gone -= {row.id for row in own if row.identity in doubtful}",
        "pass",
        "A send that a relay may have overtaken is sent again.",
        (OUTBOX + "a_send_that_a_relay_may_have_overtaken_is_sent_again",),
    ),
}
