from __future__ import annotations

import json
import math

import models
import optuna
import pytest
import settings
import tokenizers_zoo

from hf_dpkfc import DPKFCConfig, PinkNoiseProbe, PrivacyPlan, ZipfTokenProbe, search_space
from hf_dpkfc.privacy.accounting import composed_epsilon
from hf_dpkfc.tuning import TuningCost, exponent_of


def plan(sigma=1.0, delta=1e-5):
    return PrivacyPlan(
        noise_multiplier=sigma,
        clip_norm=1.0,
        expected_batch_size=10,
        dataset_size=100,
        steps=5,
        delta=delta,
    )


@pytest.mark.parametrize("exponent", ["pink_alpha", "zipf_exponent", None])
def test_every_suggestion_is_a_legal_option(tmp_path, exponent):
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    for _ in range(20):
        options = search_space(study.ask(), exponent=exponent)
        config = DPKFCConfig(output_dir=str(tmp_path), target_epsilon=1.0, use_cpu=True, **options)
        assert config.damping == options["damping"]
    assert (exponent in options) == (exponent is not None)


def test_alpha_belongs_to_the_probe():
    bert, cnn = models.build("bert"), models.build("cnn")
    text = ZipfTokenProbe.for_model(bert, tokenizers_zoo.build("bert"))
    assert exponent_of(text) == "zipf_exponent"
    assert exponent_of(PinkNoiseProbe.for_model(cnn)) == "pink_alpha"
    assert exponent_of(None) is None


def test_costs_compose_over_trials_with_different_noise():
    cost = TuningCost.of([plan(1.0), plan(2.0, delta=1e-4)])
    assert cost.epsilon == pytest.approx(composed_epsilon([(1.0, 0.1, 5), (2.0, 0.1, 5)], 1e-4))
    assert cost.num_trials == 2
    assert cost.delta == 1e-4


def test_a_trial_without_noise_costs_everything(tmp_path):
    cost = TuningCost.of([plan(), plan(0.0)])
    assert cost.epsilon == math.inf
    assert TuningCost.of([plan()], claims_privacy=False).epsilon == math.inf
    cost.save(tmp_path / "cost.json")
    assert json.loads((tmp_path / "cost.json").read_text())["epsilon"] == "infinite"


@pytest.fixture
def searching(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_dpkfc.trainer.search_space", _tiny_space)
    return settings.trainer(
        tmp_path,
        model_init=lambda: settings.bert(),
        eval_dataset=settings.text_data(10, seed=3),
        max_steps=2,
    )


def _tiny_space(trial, *, exponent):
    space = search_space(trial, exponent=exponent)
    return space | {"num_probe_batches": min(2, space["num_probe_batches"])}


def test_a_search_without_a_space_uses_ours_and_writes_its_cost(searching, tmp_path):
    best = searching.hyperparameter_search(
        backend="optuna", n_trials=2, compute_objective=lambda metrics: metrics["eval_loss"]
    )
    assert set(best.hyperparameters) == {
        "learning_rate",
        "clip_norm",
        "damping",
        "num_probe_batches",
        "zipf_exponent",
    }
    cost = json.loads((tmp_path / "privacy_tuning.json").read_text())
    assert cost["num_trials"] == 2
    assert cost["epsilon"] == pytest.approx(TuningCost.of(searching._spent).epsilon)
    assert cost["epsilon"] > searching._spent[0].epsilon
    assert {plan.clip_norm for plan in searching._spent} != {1.0}


def test_a_search_that_breaks_off_still_states_what_it_spent(searching, tmp_path):
    def fails(metrics):
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        searching.hyperparameter_search(backend="optuna", n_trials=2, compute_objective=fails)
    assert json.loads((tmp_path / "privacy_tuning.json").read_text())["num_trials"] == 1
