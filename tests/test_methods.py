"""Every method of the paper's tables is a set of options of one trainer."""

from __future__ import annotations

import json
import math

import models
import pytest
import settings
import torch
from transformers import DefaultDataCollator, TrainerCallback

from hf_dpkfc import engine
from hf_dpkfc.errors import ConfigurationError, PublishingError
from hf_dpkfc.optimizers.adambc import DPAdamBC

PUBLIC = {"probe": "public", "public_dataset": settings.text_data(30, seed=77)}
METHODS = {
    "DP-SGD": {"preconditioner": "none", "optim": "sgd"},
    "DP-Adam": {"preconditioner": "none"},
    "Synthetic DP-KFC": {},
    "Synthetic DP-KFC (words)": {"probe": "words"},
    "Synthetic DP-KFC, inputs only": {"kfac_sides": "inputs"},
    "Public DP-KFC": PUBLIC,
    "Oracle DP-KFC": {"probe": "oracle"},
    "AdaDPS (public)": {"preconditioner": "diagonal", **PUBLIC},
    "DP-AdamBC": {"preconditioner": "none", "dp_optimizer": "adambc"},
    "Synthetic DP-KFC + DP-AdamBC": {"dp_optimizer": "adambc"},
    "DiSK": {"preconditioner": "none", "dp_optimizer": "disk", "optim": "sgd"},
    "Synthetic DP-KFC + DiSK": {"dp_optimizer": "disk"},
}


@pytest.mark.parametrize("method", METHODS)
def test_a_method_is_a_set_of_options(tmp_path, method):
    trainer = settings.trainer(tmp_path, max_steps=3, **METHODS[method])
    before = settings.weights(trainer.model).clone()
    trainer.train()
    after = settings.weights(trainer.model)
    assert torch.isfinite(after).all()
    assert not torch.equal(before, after)
    kind = METHODS[method].get("preconditioner", "kfac")
    assert trainer.preconditioner.kind == kind
    assert trainer._num_releases == 3


def image_trainer(folder, **options):
    torch.manual_seed(0)
    data = [{"pixel_values": torch.randn(2, 10, 10), "labels": i % 3} for i in range(40)]
    model = models.build("cnn").float()
    return settings.trainer(folder, model, data, data_collator=DefaultDataCollator(), **options)


@pytest.mark.parametrize("dp_optimizer", [None, "adambc", "disk"])
@pytest.mark.parametrize("preconditioner", ["diagonal", "kfac"])
def test_pink_noise_serves_adadps_and_dp_kfc(tmp_path, preconditioner, dp_optimizer):
    trainer = image_trainer(
        tmp_path,
        preconditioner=preconditioner,
        probe="pink",
        dp_optimizer=dp_optimizer,
        max_steps=2,
    )
    trainer.train()
    assert trainer.preconditioner.kind == preconditioner
    assert trainer.preconditioner.is_data_free
    assert torch.isfinite(settings.weights(trainer.model)).all()


def test_an_oracle_claims_no_epsilon_anywhere(tmp_path):
    trainer = settings.trainer(tmp_path, probe="oracle", max_steps=2)
    trainer.train()
    assert trainer.epsilon_spent() == trainer.epsilon_spent("prv") == math.inf
    logged = [log["privacy/epsilon"] for log in trainer.state.log_history]
    assert set(logged) == {math.inf}
    statement = json.loads((tmp_path / "privacy_statement.json").read_text())
    assert statement["claims_privacy"] is False
    assert statement["epsilon"] is None
    for publish in (trainer.create_model_card, trainer.push_to_hub):
        with pytest.raises(PublishingError, match="oracle"):
            publish()
    assert not (tmp_path / "README.md").exists()


@pytest.fixture
def released(monkeypatch):
    """Everything that the Gaussian mechanism released, in order."""
    means = []

    def privatize(*args):
        means.append(original(*args))
        return {name: mean.clone() for name, mean in means[-1].items()}

    original = engine.privatize
    monkeypatch.setattr(engine, "privatize", privatize)
    return means


class Gradients(TrainerCallback):
    """What the optimizer is given."""

    def __init__(self):
        self.seen = []

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        self.seen.append({n: p.grad.clone() for n, p in model.named_parameters()})


NOISY = {"noise_multiplier": 3.0, "max_steps": 4, "lr_scheduler_type": "constant"}


@pytest.mark.parametrize("dp_optimizer", [None, "adambc"])
def test_an_optimizer_gets_exactly_the_noisy_mean(tmp_path, released, dp_optimizer):
    gradients = Gradients()
    settings.trainer(tmp_path, dp_optimizer=dp_optimizer, callbacks=[gradients], **NOISY).train()
    assert len(released) == len(gradients.seen) == 4
    for mean, gradient in zip(released, gradients.seen, strict=True):
        assert all(torch.equal(mean[n], gradient[n]) for n in mean)


def test_disk_gives_the_optimizer_a_filter_of_noisy_means_and_nothing_else(tmp_path, released):
    gradients = Gradients()
    settings.trainer(tmp_path, dp_optimizer="disk", callbacks=[gradients], **NOISY).train()
    estimate = released[0]
    for t, mean in enumerate(released):
        estimate = {n: 0.3 * estimate[n] + 0.7 * mean[n] for n in mean} if t else mean
        for name, value in estimate.items():
            torch.testing.assert_close(gradients.seen[t][name], value, rtol=1e-5, atol=1e-7)


def test_adambc_steps_by_its_formula_from_the_noisy_means_and_public_constants(tmp_path, released):
    """σ = 3, C = 0.5, B = 2·8 = 16, whatever was drawn."""
    options = {"clip_norm": 0.5, "gradient_accumulation_steps": 2, "adambc_floor": 1e-5}
    trainer = settings.trainer(
        tmp_path, dp_optimizer="adambc", adam_beta1=0.8, adam_beta2=0.9, **options, **NOISY
    )
    name = "classifier.weight"
    theta = trainer.model.get_parameter(name).detach().double().clone()
    trainer.train()
    m = v = torch.zeros_like(theta)
    for t, mean in enumerate(released, 1):
        m = 0.8 * m + 0.2 * mean[name].double()
        v = 0.9 * v + 0.1 * mean[name].double() ** 2
        v_hat = v / (1 - 0.9**t) - (3 * 0.5 / 16) ** 2
        theta -= 1e-3 * m / (1 - 0.8**t) / v_hat.clamp(min=1e-5).sqrt()
    torch.testing.assert_close(
        trainer.model.get_parameter(name).double(), theta, rtol=1e-4, atol=2e-5
    )


def test_adambc_keeps_hfs_groups_and_schedule(tmp_path):
    trainer = settings.trainer(
        tmp_path, dp_optimizer="adambc", weight_decay=0.1, lr_scheduler_type="linear"
    )
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    assert isinstance(optimizer, DPAdamBC)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    rates = [log["learning_rate"] for log in trainer.state.log_history if "learning_rate" in log]
    assert rates == pytest.approx([1e-3, 0.75e-3, 0.5e-3, 0.25e-3])


@pytest.mark.parametrize("dp_optimizer", [None, "disk"])
def test_an_optimizer_class_of_ones_own_steps(tmp_path, dp_optimizer):
    trainer = settings.trainer(
        tmp_path,
        dp_optimizer=dp_optimizer,
        preconditioner="none",
        optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    )
    trainer.train()
    assert isinstance(trainer.optimizer.optimizer, torch.optim.SGD)
    assert trainer.optimizer.optimizer.defaults["momentum"] == 0.9


@pytest.mark.parametrize("dp_optimizer", [None, "disk"])
def test_a_ready_optimizer_steps(tmp_path, dp_optimizer):
    model = settings.bert()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = settings.trainer(
        tmp_path, model, dp_optimizer=dp_optimizer, optimizers=(optimizer, None)
    )
    trainer.train()
    assert trainer.optimizer.optimizer is optimizer


def test_a_second_optimizer_beside_adambc_is_refused(tmp_path):
    model = settings.bert()
    ready = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigurationError, match="only one of them can step"):
        settings.trainer(tmp_path, model, dp_optimizer="adambc", optimizers=(ready, None))
    with pytest.raises(ConfigurationError, match="only one of them can step"):
        settings.trainer(
            tmp_path, dp_optimizer="adambc", optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 1})
        )


def test_disk_without_filtering_is_the_plain_optimizer(tmp_path):
    """κ = 1: w = 0 and the filter passes everything; σ = 0 and rate 1 leave nothing random."""
    options = {
        "noise_multiplier": 0.0,
        "per_device_train_batch_size": 60,
        "optim": "sgd",
        "learning_rate": 0.1,
    }
    finals = []
    for name, extra in (("a", {}), ("b", {"dp_optimizer": "disk", "disk_kappa": 1.0})):
        trainer = settings.trainer(tmp_path / name, settings.bert(dropout=0.0), **options, **extra)
        trainer.train()
        finals.append(settings.weights(trainer.model))
    assert torch.equal(*finals)


def test_the_statement_names_the_optimizer(tmp_path):
    settings.trainer(tmp_path, dp_optimizer="disk", disk_gamma=0.6, max_steps=1).train()
    statement = json.loads((tmp_path / "privacy_statement.json").read_text())
    assert statement["dp_optimizer"] == {"name": "disk", "kappa": 0.7, "gamma": 0.6}
