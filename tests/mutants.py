"""Planted bugs: one small change of the real source each, and the tests that must see it.

The change is made when the module is imported, so that everything that uses it runs the broken
code. Never by the package: ``tests/conftest.py`` plants what ``HF_DPKFC_MUTANT`` names.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path

VARIABLE = "HF_DPKFC_MUTANT"
PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class Mutant:
    """One planted bug.

    Attributes:
        module: Where it is planted.
        old: Source text that occurs there exactly once.
        new: What it becomes.
        killers: Tests of which each must fail.
    """

    module: str
    old: str
    new: str
    killers: tuple[str, ...]

    @property
    def path(self) -> Path:
        return PACKAGE / (self.module.replace(".", "/") + ".py")

    def mutate(self, source: str) -> str:
        assert source.count(self.old) == 1, f"{self.old!r} isn't once in {self.module}"
        return source.replace(self.old, self.new)


_NOISE = "tests/mechanism/test_noise.py"
_CLIPPING = "tests/mechanism/test_clipping.py"
_SAMPLING = "tests/mechanism/test_sampling.py"
_REFERENCE = "tests/mechanism/test_reference.py::test_clipped_sum_equals_the_textbook_loop"
_AUDIT = "tests/diagnostics/test_audit.py::test_a_correct_step_stays_below_its_claim"
_TRAINER = "tests/test_trainer.py"
_LEDGER = "tests/privacy/test_ledger.py"
_VARIANCE = f"{_NOISE}::test_noise_has_variance_sigma_squared_c_squared"

MUTANTS = {
    "half_noise": Mutant(
        "hf_dpkfc.mechanism.noise",
        "noise_multiplier * clipped_sum.sensitivity",
        "0.5 * noise_multiplier * clipped_sum.sensitivity",
        (_VARIANCE, _AUDIT),
    ),
    "no_noise": Mutant(
        "hf_dpkfc.mechanism.noise",
        ".mul_(standard_deviation)",
        ".mul_(0.0)",
        (_VARIANCE, _AUDIT),
    ),
    "noise_of_two_percent_less": Mutant(
        "hf_dpkfc.mechanism.noise",
        "noise_multiplier * clipped_sum.sensitivity",
        "0.98 * noise_multiplier * clipped_sum.sensitivity",
        (_VARIANCE,),
    ),
    "noise_skipped_on_odd_steps": Mutant(
        "hf_dpkfc.engine",
        "clipped, self.plan.noise_multiplier, self",
        "clipped, self.plan.noise_multiplier * (step % 2 == 0), self",
        (_AUDIT,),
    ),
    "empty_draw_skipped": Mutant(
        "hf_dpkfc.engine",
        "if verdict is Verdict.EXHAUSTED:",
        "if verdict is Verdict.EXHAUSTED or clipped.unsafe.num_examples == 0:",
        (f"{_TRAINER}::test_an_empty_draw_is_a_step_of_pure_noise",),
    ),
    "no_clip": Mutant(
        "hf_dpkfc.mechanism.clipping",
        ".clamp(max=1.0)",
        ".clamp(min=1.0, max=1.0)",
        (f"{_REFERENCE}[0.05-bert-full-none]", _AUDIT),
    ),
    "clip_before_precondition": Mutant(
        "hf_dpkfc.mechanism.clipping",
        "self.preconditioner[block.name].sq_norms(gradient, grams)",
        "gradient.sq_norms()",
        (f"{_REFERENCE}[0.05-bert-full-reduce-full]",),
    ),
    "per_batch_clip": Mutant(
        "hf_dpkfc.mechanism.clipping",
        "(bound / sq_norms.sqrt())",
        "(bound / sq_norms.sum().sqrt().expand_as(sq_norms))",
        (
            f"{_CLIPPING}::test_micro_batches_add_up_to_the_same_sum[1]",
            f"{_REFERENCE}[0.05-bert-full-none]",
        ),
    ),
    "margin_of_one_root_alone": Mutant(
        "hf_dpkfc.curvature.preconditioner",
        "return math.prod(high / low for low, high in ranges)",
        "return max(high / low for low, high in ranges)",
        (f"{_CLIPPING}::test_a_condition_beyond_the_precision_is_refused",),
    ),
    "sum_from_other_matrices": Mutant(
        "hf_dpkfc.layers.gradients",
        "if not self.prefers_gram:\n            # The very",
        "if False:\n            # The very",
        (f"{_CLIPPING}::test_positions_that_cancel_do_not_hide_a_gradient[none-1000000.0]",),
    ),
    "coarse_noise": Mutant(
        "hf_dpkfc.mechanism.noise",
        "np.float64 if is_fine else np.float32",
        "np.float32",
        (f"{_NOISE}::test_noise_is_as_fine_as_what_it_hides[dtype1-False]",),
    ),
    "oracle_run_claims_after_a_resume": Mutant(
        "hf_dpkfc.privacy.ledger",
        'header.get("claims_privacy") is not self.claims_privacy',
        "False",
        (f"{_LEDGER}::test_a_run_claims_its_epsilon_from_the_first_step_or_not_at_all",),
    ),
    "actual_batch_mean": Mutant(
        "hf_dpkfc.mechanism.noise",
        "noisy_sum.div_(expected_batch_size)",
        "noisy_sum.div_(max(1, clipped_sum.unsafe.num_examples))",
        (f"{_NOISE}::test_the_noisy_sum_is_divided_by_the_public_constant",),
    ),
    "shuffled_sampling": Mutant(
        "hf_dpkfc.mechanism.sampling",
        "np.flatnonzero(uniform < self.rate)",
        "np.sort(np.argsort(uniform)[: round(self.rate * self.num_records)])",
        (f"{_SAMPLING}::test_batch_sizes_have_the_binomial_variance",),
    ),
    "wrong_sampling_rate": Mutant(
        "hf_dpkfc.mechanism.sampling",
        "uniform < self.rate",
        "uniform < 1.05 * self.rate",
        (f"{_SAMPLING}::test_the_mean_batch_size_is_the_expected_one",),
    ),
    "wrong_accounted_rate": Mutant(
        "hf_dpkfc.privacy.plan",
        "return self.expected_batch_size / self.dataset_size",
        "return 0.5 * self.expected_batch_size / self.dataset_size",
        ("tests/privacy/test_plan.py::test_rate_and_epoch_come_from_public_constants_only",),
    ),
    "reused_seed": Mutant(
        "hf_dpkfc.mechanism.randomness",
        'self.step.to_bytes(8, "big") + self.digest',
        "self.digest",
        (f"{_NOISE}::test_noise_is_fresh_where_anything_differs[step]",),
    ),
    "replayed_noise_on_another_query": Mutant(
        "hf_dpkfc.mechanism.randomness",
        'self.step.to_bytes(8, "big") + self.digest',
        'self.step.to_bytes(8, "big")',
        (f"{_NOISE}::test_noise_is_fresh_where_anything_differs[digest]",),
    ),
    "public_key": Mutant(
        "hf_dpkfc.mechanism.randomness",
        "cls(secrets.token_bytes(KEY_BYTES))",
        "cls(bytes(KEY_BYTES))",
        (
            f"{_NOISE}::test_global_seeds_do_not_reach_the_noise",
            f"{_TRAINER}::test_the_same_seed_gives_the_same_start_and_other_noise",
        ),
    ),
    "private_preconditioner": Mutant(
        "hf_dpkfc.engine",
        "            self.probe,\n",
        '            __import__("hf_dpkfc.curvature.probes", fromlist=["_"]).PublicDataProbe('
        "query.dataset, query.collate),\n",
        (f"{_TRAINER}::test_the_first_preconditioner_does_not_depend_on_private_data",),
    ),
    "stale_norm": Mutant(
        "hf_dpkfc.mechanism.clipping",
        "        pairs = ((block, captured.gradient(block)) for block in self.table)\n",
        '        kept = self.__dict__.setdefault("kept", {})\n'
        "        kept |= {b.name: g for b in self.table if (g := captured.gradient(b))}\n"
        "        pairs = ((block, kept.get(block.name)) for block in self.table)\n",
        (f"{_CLIPPING}::test_state_of_one_pass_does_not_reach_the_next",),
    ),
    "tied_overwrite": Mutant(
        "hf_dpkfc.layers.gradients",
        "parts = self.rows.sq_norms() + self.outer.sq_norms()",
        "parts, cross = self.outer.sq_norms(), 0.0",
        (f"{_REFERENCE}[0.05-gpt2-full-none]",),
    ),
    "tied_without_cross_term": Mutant(
        "hf_dpkfc.layers.gradients",
        "torch.maximum(parts + 2 * cross",
        "torch.maximum(parts",
        (f"{_REFERENCE}[0.05-gpt2-full-none]",),
    ),
    "ledger_off_by_one": Mutant(
        "hf_dpkfc.privacy.ledger",
        "if self.num_releases >= self.plan.steps:",
        "if self.num_releases > self.plan.steps:",
        (f"{_LEDGER}::test_nothing_beyond_the_plan_is_granted",),
    ),
    "replay_by_step_is_free": Mutant(
        "hf_dpkfc.privacy.ledger",
        "        if self.has(step, digest):\n            return False",
        "        if self.has_step(step):\n            return False",
        (f"{_LEDGER}::test_an_identical_replay_is_free_and_anything_else_is_charged",),
    ),
    "frames_apart": Mutant(
        "hf_dpkfc.layers.layout",
        "reshape(batch_size * groups, -1, width)",
        "reshape(rows * groups, -1, width)",
        ("tests/layers/test_capture.py::test_frames_of_one_example_are_parts_of_one_gradient",),
    ),
    "anybodys_best_checkpoint": Mutant(
        "hf_dpkfc.callbacks",
        "state.best_model_checkpoint = None",
        "pass",
        (f"{_TRAINER}::test_another_runs_checkpoint_is_not_loaded_as_the_best",),
    ),
    "public_masks": Mutant(
        "hf_dpkfc.loading",
        "if not repeats:",
        "if False:",
        (
            f"{_TRAINER}::test_masks_of_a_public_seed_are_refused[42]",
            f"{_TRAINER}::test_a_collator_with_a_generator_of_its_own_is_refused",
        ),
    ),
    "trained_twice": Mutant(
        "hf_dpkfc.refusals",
        "_TRAINED.update(_training_modules(model))",
        "_TRAINED.clear()",
        (
            f"{_TRAINER}::test_weights_of_a_private_run_are_not_trained_again_under_a_new_plan",
            "tests/test_resume.py::"
            "test_a_run_is_replayed_from_its_start_with_the_weights_of_its_start_only",
        ),
    ),
    "attention_draws_in_the_check": Mutant(
        "hf_dpkfc.mechanism.independence",
        "if func is F.scaled_dot_product_attention:",
        "if False:",
        (
            "tests/mechanism/test_independence.py::"
            "test_attention_dropout_does_not_hide_a_dependence_in_train_mode[bert]",
        ),
    ),
}


class _MutantLoader(SourceFileLoader):
    """Compiles the changed source; compiled files on disk are neither read nor written."""

    def __init__(self, name: str, path: str, mutant: Mutant) -> None:
        super().__init__(name, path)
        self.mutant = mutant

    def get_code(self, fullname):
        source = self.mutant.mutate(Path(self.path).read_text())
        return compile(source, self.path, "exec")


class _MutantFinder(MetaPathFinder):
    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant

    def find_spec(self, fullname, path, target=None):
        if fullname != self.mutant.module:
            return None
        spec = PathFinder.find_spec(fullname, path)
        loader = _MutantLoader(fullname, spec.origin, self.mutant)
        return importlib.util.spec_from_file_location(fullname, spec.origin, loader=loader)


def plant(name: str | None) -> None:
    """Plant a bug by name; nothing without one."""
    if name:
        assert MUTANTS[name].module not in sys.modules, "planted too late"
        sys.meta_path.insert(0, _MutantFinder(MUTANTS[name]))
