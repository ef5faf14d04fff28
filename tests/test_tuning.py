from __future__ import annotations

import json
import math

import models
import optuna
import pytest
import settings
import tokenizers_zoo
from transformers import TrainerCallback

from hf_dpkfc import DPKFCConfig, PinkNoiseProbe, PrivacyPlan, ZipfTokenProbe, search_space
from hf_dpkfc.errors import LedgerError
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
    runs = [tuple(run) for run in cost["runs"]]
    assert cost["epsilon"] == pytest.approx(composed_epsilon(runs, 1e-4))
    assert cost["epsilon"] > composed_epsilon(runs[:1], 1e-4)


def test_searches_on_the_same_records_add_up(searching, tmp_path):
    for _ in range(2):
        searching.hyperparameter_search(
            backend="optuna", n_trials=1, compute_objective=lambda metrics: metrics["eval_loss"]
        )
    assert json.loads((tmp_path / "privacy_tuning.json").read_text())["num_trials"] == 2


class Look(TrainerCallback):
    """What a kill at the beginning of a step would leave."""

    def __init__(self, path):
        self.path, self.found = path, []

    def on_step_begin(self, args, state, control, **kwargs):
        self.found.append(json.loads(self.path.read_text())["num_trials"])


def test_a_trials_cost_is_on_disk_before_its_first_release(searching, tmp_path):
    look = Look(tmp_path / "privacy_tuning.json")
    searching.add_callback(look)
    searching.hyperparameter_search(
        backend="optuna", n_trials=2, compute_objective=lambda metrics: metrics["eval_loss"]
    )
    assert look.found == [1, 1, 2, 2]


def test_a_cost_that_cannot_be_read_is_not_forgotten(searching, tmp_path):
    (tmp_path / "privacy_tuning.json").write_text("{}")
    with pytest.raises(LedgerError, match="earlier searches"):
        searching.hyperparameter_search(backend="optuna", n_trials=1)


def test_an_oracle_trial_makes_the_whole_search_unclaimed():
    cost = TuningCost.of([plan()], claims_privacy=False) + TuningCost.of([plan()])
    assert cost.epsilon == math.inf


class Prune(TrainerCallback):
    def on_evaluate(self, args, state, control, **kwargs):
        raise optuna.TrialPruned


def test_a_pruned_trial_leaves_no_key(tmp_path):
    """Key and checkpoints together would give un-noised sums."""
    trainer = settings.trainer(
        tmp_path / "out",
        model_init=lambda: settings.bert(),
        eval_dataset=settings.text_data(10, seed=3),
        max_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        callbacks=[Prune()],
        privacy_key_path=str(tmp_path / "keys"),
    )
    with pytest.raises(ValueError, match="No trials are completed"):
        trainer.hyperparameter_search(_space, backend="optuna", n_trials=1)
    assert [p for p in (tmp_path / "keys").rglob("*") if p.is_file()] == []


def _space(trial):
    choices = [1, 2]
    return {
        "gradient_accumulation_steps": trial.suggest_categorical(
            "gradient_accumulation_steps", choices
        )
    }


def test_the_best_trials_batch_can_be_set_on_the_trainer(tmp_path):
    """HF's documented way: setattr on trainer.args, then train()."""
    trainer = settings.trainer(tmp_path, max_steps=1, gradient_accumulation_steps=2)
    assert trainer.plan.expected_batch_size == 16
    trainer.args.gradient_accumulation_steps = 1
    assert trainer.plan.expected_batch_size == 8
    trainer.train()
    assert trainer.plan.expected_batch_size == 8
    assert trainer.args.gradient_accumulation_steps == 1


def test_a_search_that_breaks_off_still_states_what_it_spent(searching, tmp_path):
    def fails(metrics):
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        searching.hyperparameter_search(backend="optuna", n_trials=2, compute_objective=fails)
    assert json.loads((tmp_path / "privacy_tuning.json").read_text())["num_trials"] == 1
