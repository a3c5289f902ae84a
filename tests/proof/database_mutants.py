"""Rules of the outbox and of listeners with ``once``, each switched off by a change to one place; see `python_mutants`."""

from __future__ import annotations

from tests.proof.mutants import GONE, If
from tests.proof.python_mutants import Operand, PythonMutant, Value

ONCE = "integration/test_once.py::test_"
OUTBOX = "integration/test_outbox.py::test_"

DATABASE_MUTANTS: dict[str, PythonMutant] = {
    "keeps_the_effects_of_a_failure": PythonMutant(
        GONE,
        "What a listener with once wrote is rolled back unless its message is a success.",
        (ONCE + "whatever_is_no_success_rolls_back",),
    ),
    "calls_again_for_what_is_recorded": PythonMutant(
        If("True"),
        "A listener with once is not called for a message that was processed before.",
        (ONCE + "a_delivery_whose_end_was_lost_has_no_second_effect",),
    ),
    "forgets_rows_without_replicas": PythonMutant(
        Operand(1, "True"),
        "A row stays until as many replicas as it requires have its message.",
        (OUTBOX + "a_row_stays_until_enough_replicas_have_its_message",),
    ),
    "goes_on_without_its_row": PythonMutant(
        Value("__import__('contextlib').nullcontext()"),
        "A transaction whose row could not be written cannot be committed.",
        (OUTBOX + "a_row_that_cannot_be_written_undoes_its_transaction",),
    ),
    "trusts_a_relay_that_is_under_way": PythonMutant(
        GONE,
        "A send that a relay may have overtaken is sent again.",
        (OUTBOX + "a_send_that_a_relay_may_have_overtaken_is_sent_again",),
    ),
    "looks_for_no_older_row": PythonMutant(
        Operand(0, "True"),
        "Before a send its older rows are looked for, unless its message can have none.",
        (OUTBOX + "a_state_that_a_newer_transaction_has_replaced_is_not_sent",),
    ),
    "takes_an_old_row_for_there": PythonMutant(
        Operand(1, "True"),
        "A slow process looks for its row before it sends.",
        (OUTBOX + "a_slow_process_looks_for_its_row_although_its_message_has_no_key",),
        "looks_for_no_older_row",
    ),
}
