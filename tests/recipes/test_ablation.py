"""ablation.py: one option at a time, everything else as tuning had it."""

from __future__ import annotations

import ablation
import pytest
from methods import Setting
from test_compare import CountedRecipe

from hf_dpkfc import DPKFCConfig


@pytest.mark.parametrize("variant", ablation.VARIANTS, ids=ablation.title_of)
def test_a_variant_differs_from_the_defaults_in_one_option_and_the_sides(variant, tmp_path):
    base = {"output_dir": str(tmp_path), "target_epsilon": 1.0, "target_delta": 1e-5}
    defaults, varied = DPKFCConfig(**base), DPKFCConfig(**base, **variant)
    assert len(variant.keys() - {"kfac_sides"}) <= 1
    assert all(getattr(defaults, name) != getattr(varied, name) for name in variant)


def test_a_trial_gets_the_variant_and_the_setting_that_tuning_chose(monkeypatch):
    seen = {}

    def run_trial(task, method, epsilon, setting, seed):
        seen.update(options=task.options, method=method, setting=setting, seed=seed)

    monkeypatch.setattr(ablation, "run_trial", run_trial)
    monkeypatch.setattr(ablation, "tuned_setting", lambda *_: Setting(0.5, 2.0))
    ablation.work(CountedRecipe(), 1.0, {"damping": 3.0}, 7)
    expected = {"options": {"damping": 3.0}, "method": "synthetic", "seed": 7}
    assert seen == expected | {"setting": Setting(0.5, 2.0)}


def test_the_table_shows_the_distance_from_the_defaults_with_its_error():
    rows = {"defaults": [80.0, 82.0], "rank=16": [78.0, 80.0]}
    table = ablation.markdown(rows, "Caption.")
    assert "| defaults | 81.0 ± 1.4 |  |" in table
    # Variances 2 and 2, two runs each: √((2 + 2)/2) = 1.4.
    assert "| rank=16 | 79.0 ± 1.4 | -2.0 ± 1.4 |" in table


def test_variants_measured_under_other_conditions_are_not_kept(tmp_path):
    path, conditions = tmp_path / "found.json", {"learning_rate": 0.1}
    assert ablation.known_rows(path, conditions) == {}
    path.write_text('{"learning_rate": 0.1, "accuracies": {"defaults": [1.0]}}')
    assert ablation.known_rows(path, conditions) == {"defaults": [1.0]}
    assert ablation.known_rows(path, {"learning_rate": 0.2}) == {}
