"""The faults that the numbered scenarios must find are patches of the product (``scripts/mutants`` runs them)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.patches import changed_by, patches

MUTANTS = patches("prompts")


def test_there_is_one_for_each_promise() -> None:
    assert [patch.stem for patch in MUTANTS] == [
        "a_context_item_owns_a_token",
        "a_late_cancel_hits_whatever_runs",
        "a_late_write_brings_it_back",
        "a_permission_survives",
        "a_resume_keeps_a_stale_token",
        "a_session_error_on_a_prompts_abort",
        "a_shell_is_killed_by_a_prompts_abort",
        "a_shell_while_busy",
        "a_single_newest_slot",
        "a_token_leaks",
        "an_absorbed_prompt_still_owns",
        "cancel_kills_the_replacement",
        "cancel_of_a_queued_prompt_hits_the_active_one",
        "cancelled_input_stays_in_the_batch",
        "idle_at_the_hand_off",
        "idle_twice",
        "idle_while_another_prepares",
        "no_final_check",
        "no_recheck_before_the_claim",
        "stop_forgets_tokens",
    ]


@pytest.mark.parametrize("patch", MUTANTS, ids=lambda patch: patch.stem)
def test_a_mutant_applies_to_the_product(patch: Path) -> None:
    changed = changed_by(patch)
    assert len(changed) == 1
    assert changed[0].startswith("runner/")
