"""The reliability scoreboard: each row's tests are run, and what they measured becomes a table.

    python tests/scoreboard.py            # every row (the slow ones too)
    python tests/scoreboard.py U1 P2      # these rows; the others keep their last run

Results are kept in tests/scoreboard.json, from which tests/SCOREBOARD.md is written. No figure is
typed by hand: they come from the tests' ``figure`` fixture.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import dataclass
from datetime import date
from pathlib import Path

FOLDER = Path(__file__).parent
RESULTS, TABLE = FOLDER / "scoreboard.json", FOLDER / "SCOREBOARD.md"


@dataclass(frozen=True)
class Row:
    """What must be shown, and the tests (files, or names in them) that show it."""

    claim: str
    tests: tuple[str, ...]


_CLIPPING = "tests/mechanism/test_clipping.py::test_"
_NOISE = "tests/mechanism/test_noise.py::test_"
_TRAINER = "tests/test_trainer.py::test_"
_RESUME = "tests/test_resume.py::test_"
_LEDGER = "tests/privacy/test_ledger.py::test_"
_ACCOUNTING = "tests/privacy/test_accounting.py::test_"
_PUSH = "tests/publishing/test_push.py::test_"

ROWS = {
    "G1": Row(
        "released sum = textbook loop, 9 models × {full, LoRA, head} × 6 geometries: ≤ 1e-9 in "
        "float64, ≤ 1e-5 in float32",
        ("tests/mechanism/test_reference.py",),
    ),
    "G2": Row(
        "any example removed, NaN, Inf, 3e38, empty: ‖Δ sum‖ ≤ C, always finite, 2,000 cases",
        (
            f"{_CLIPPING}one_example_moves_the_sum_by_at_most_its_sensitivity_in_2000_cases",
            f"{_CLIPPING}a_non_finite_example_contributes_zero_and_leaves_the_others_unchanged",
            f"{_CLIPPING}an_empty_batch_gives_zeros",
            f"{_CLIPPING}positions_that_cancel_do_not_hide_a_gradient",
            f"{_CLIPPING}rows_that_cancel_do_not_hide_a_gradient",
            f"{_CLIPPING}a_gradient_where_both_roots_are_smallest_stays_below_c",
        ),
    ),
    "G3": Row(
        "preconditioner with two different private sets: bit-identical",
        (f"{_TRAINER}the_first_preconditioner_does_not_depend_on_private_data",),
    ),
    "G4": Row(
        "n → n+1 with the same public constants changes no rate, step, divisor or learning rate",
        (f"{_TRAINER}one_record_more_changes_no_public_number",),
    ),
    "G5": Row(
        "micro-batch 1, 2, 3, 7, B: same update; one noise draw per logical step",
        (
            f"{_CLIPPING}micro_batches_add_up_to_the_same_sum",
            f"{_CLIPPING}sums_of_two_processes_add",
            f"{_TRAINER}a_logical_step_draws_noise_exactly_once",
        ),
    ),
    "N1": Row(
        "variance of the noise, 10^6 and 10^7 draws; 0.98 σ and 1.02 σ are rejected",
        (
            f"{_NOISE}noise_has_variance_sigma_squared_c_squared",
            f"{_NOISE}noise_has_its_variance_over_ten_million_draws",
            f"{_NOISE}noise_is_normal",
        ),
    ),
    "N2": Row(
        "noise is fresh across steps, parameters, resumes and whatever differs; an identical "
        "replay repeats itself",
        (
            f"{_NOISE}noise_is_fresh_where_anything_differs",
            f"{_NOISE}an_identical_replay_repeats_itself",
            f"{_NOISE}parameters_of_one_step_get_independent_noise",
            f"{_NOISE}chunks_of_one_draw_are_independent",
            f"{_RESUME}a_change_draws_fresh_noise_and_is_charged",
        ),
    ),
    "N3": Row(
        "same seed, two runs: different noise, same start",
        (f"{_TRAINER}the_same_seed_gives_the_same_start_and_other_noise",),
    ),
    "A1": Row(
        "ε against Google's dp-accounting (PLD, RDP) and Opacus' PRV, 300 settings, anchors",
        (
            f"{_ACCOUNTING}the_anchor",
            f"{_ACCOUNTING}rdp_is_never_below_pld_in_300_settings",
            f"{_ACCOUNTING}rdp_equals_googles_in_300_settings",
            f"{_ACCOUNTING}no_accountant_is_below_pld",
        ),
    ),
    "A2": Row(
        "calibration, 500 targets: 0.99·target ≤ ε ≤ target",
        (f"{_ACCOUNTING}calibration_hits_500_targets",),
    ),
    "A3": Row(
        "budget under random interruptions: never above the plan",
        (
            f"{_LEDGER}random_interruptions_never_overspend",
            f"{_LEDGER}nothing_beyond_the_plan_is_granted",
            f"{_RESUME}a_spent_budget_takes_no_further_step",
        ),
    ),
    "A4": Row(
        "Poisson draws: inclusion rate, pairwise independence, size variance Nq(1−q)",
        ("tests/mechanism/test_sampling.py",),
    ),
    "P1": Row(
        "kill -9 at 20 random points, resume: ledger and weights as if uninterrupted",
        (f"{_RESUME}kill_9_at_random_points_changes_nothing",),
    ),
    "P2": Row(
        "kill inside checkpoint, ledger write and push: no charge lost, no torn file",
        (
            f"{_RESUME}a_kill_inside_a_write_loses_no_charge_and_tears_no_file",
            f"{_RESUME}a_kill_during_a_push_publishes_nothing_by_halves",
            f"{_RESUME}a_torn_checkpoint_is_passed_over",
        ),
    ),
    "P3": Row(
        "resume with changed data, batch size, σ, world size, code: refused, or charged",
        (
            f"{_RESUME}changed_data_is_charged_and_the_run_stops_earlier_and_says_so",
            f"{_RESUME}another_plan_is_refused_with_what_differs",
            f"{_RESUME}another_number_of_processes_is_charged",
            f"{_RESUME}another_version_of_the_code_is_charged",
            f"{_RESUME}a_checkpoint_of_another_run_is_refused",
        ),
    ),
    "P4": Row(
        "ledger tampered with: detected, 1,000 of 1,000; a torn last line is survived",
        (
            f"{_LEDGER}tampering_is_detected",
            f"{_LEDGER}a_chain_recomputed_without_the_key_is_detected",
            f"{_LEDGER}a_torn_last_line_is_survived",
        ),
    ),
    "U1": Row(
        "audits: a correct step and training stay below their claims; half the noise of a step "
        "(ε 1, 2, 4, 8, at 99.99 %) and a tenth of a training's are caught",
        ("tests/diagnostics/test_audit.py", "tests/diagnostics/test_bounds.py"),
    ),
    "U2": Row("every planted bug is killed", ("tests/test_mutants.py",)),
    "H1": Row(
        "push and reload {model, LoRA} × {public, private}: weights equal, card valid",
        (
            f"{_PUSH}a_model_comes_back_with_equal_weights_and_a_card",
            f"{_PUSH}a_lora_adapter_comes_back_through_peft",
        ),
    ),
    "H2": Row(
        "what is pushed under every hub strategy, with planted secrets: allow-list only",
        (f"{_PUSH}nothing_but_the_allow_list_leaves_under_any_strategy",),
    ),
    "H3": Row(
        "401/403/404/409/429/503/dropped connection on each call: retried, or one clear error",
        (
            f"{_PUSH}a_passing_fault_is_retried",
            f"{_PUSH}a_lasting_fault_is_one_clear_error_and_nothing_is_published",
            f"{_PUSH}a_hub_that_stays_down_is_given_up_with_nothing_published",
        ),
    ),
    "H5": Row(
        "push with ε = ∞, no ledger, overspent ledger: refused",
        (
            f"{_PUSH}a_model_without_guarantee_is_not_published",
            f"{_PUSH}a_model_that_was_never_trained_is_not_published",
            "tests/publishing/test_statement.py::test_a_statement_without_guarantee_is_refused",
        ),
    ),
    "C1": Row(
        "1,000 malformed configurations and inputs: one typed error that names the field",
        ("tests/test_malformed.py",),
    ),
    "D1": Row(
        "two processes (gloo) against one: same sum, noise variance counted once",
        ("tests/test_distributed.py",),
    ),
    "X1": Row(
        "an example's loss and clipped contribution don't move with its batch-mates; a "
        "batch-normalised loss is caught",
        (
            "tests/mechanism/test_independence.py",
            "tests/test_losses.py::test_left_padding_does_not_move_a_causal_loss",
            "tests/test_losses.py::test_padding_does_not_move_a_span_loss",
        ),
    ),
    "R1": Row(
        "2,000 steps: memory flat, < 1 MB per 1,000 steps",
        ("tests/test_soak.py",),
    ),
}


def belongs(node: str, row: Row) -> bool:
    """Whether a test, by its pytest id, is one of a row's."""
    return any(node == t or node.startswith((f"{t}[", f"{t}::")) for t in row.tests)


def run(names: list[str]) -> dict[str, dict]:
    """Run the rows' tests; outcome, seconds and figures by test."""
    import pytest

    class Collector:
        def __init__(self):
            self.results = {}

        def pytest_runtest_logreport(self, report):
            if report.when == "call" or report.failed:
                self.results[report.nodeid] = {
                    "outcome": report.outcome,
                    "seconds": round(report.duration, 1),
                    "figures": [text for key, text in report.user_properties if key == "figure"],
                }

    collector = Collector()
    tests = sorted({test for name in names for test in ROWS[name].tests})
    parallel = ["-n", "auto", "--dist", "worksteal"]
    pytest.main(["-q", "--rootdir", str(FOLDER.parent), *parallel, *tests], plugins=[collector])
    return collector.results


def merged(before: dict, names: list[str], results: dict) -> dict:
    """The last results of rows that weren't run stay; of those that were, none does."""
    kept = {n: r for n, r in before.items() if not any(belongs(n, ROWS[name]) for name in names)}
    return dict(sorted((kept | results).items()))


def render(tests: dict, day: str) -> str:
    """The table."""
    lines = [
        "# Reliability scoreboard",
        "",
        f"Written by `python tests/scoreboard.py`, last run {day}; never edited by hand. Each "
        "row's tests run in CI: the fast ones in `make test`, the others in `make test-all`.",
        "",
        "| row | what is shown | result | figures | seconds |",
        "|---|---|---|---|---|",
    ]
    for name, row in ROWS.items():
        mine = {n: r for n, r in tests.items() if belongs(n, row)}
        passed = sum(r["outcome"] == "passed" for r in mine.values())
        result = f"{passed} of {len(mine)} passed" if mine else "not run"
        figures = Counter(text for r in mine.values() for text in r["figures"])
        shown = "; ".join(f"{n} × {text}" if n > 1 else text for text, n in figures.items())
        seconds = sum(r["seconds"] for r in mine.values())
        lines.append(f"| {name} | {row.claim} | {result} | {shown} | {seconds:.0f} |")
    return "\n".join(lines) + "\n"


def stored() -> dict:
    """What earlier runs left."""
    if not RESULTS.exists():
        return {"day": "", "tests": {}}
    return json.loads(RESULTS.read_text())


def main(names: list[str]) -> None:
    tests = merged(stored()["tests"], names, run(names))
    day = date.today().isoformat()
    RESULTS.write_text(
        json.dumps({"day": day, "tests": tests}, indent=1, ensure_ascii=False) + "\n"
    )
    TABLE.write_text(render(tests, day))


if __name__ == "__main__":
    main(sys.argv[1:] or list(ROWS))
