"""X1: one example's gradient is its own, and all of it is known."""

from __future__ import annotations

import models
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hf_dpkfc.errors import NeighbourError, UnsupportedLayerError
from hf_dpkfc.layers.routes import inspect_model
from hf_dpkfc.losses import TaskLoss, task_of
from hf_dpkfc.mechanism.independence import check_independence


def check(model, inputs, loss):
    table = inspect_model(model)
    check_independence(model, table, loss, inputs, models.singles(inputs))


@pytest.mark.parametrize("name", models.NAMES)
def test_sound_models_pass(name):
    model = models.build(name)
    check(model, models.inputs_for(name), TaskLoss(task_of(model)))


def test_a_batch_normalised_lm_loss_is_caught():
    model, inputs = models.build("gpt2"), models.inputs_for("gpt2")

    def batch_normalised(m, i):
        logits = m(input_ids=i["input_ids"], attention_mask=i["attention_mask"]).logits[:, :-1]
        labels = i["labels"][:, 1:]
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return losses.view(labels.shape).sum(1) / (labels != -100).sum() * len(labels)

    with pytest.raises(NeighbourError, match="among others"):
        check(model, inputs, batch_normalised)


class Peeks(nn.Module):
    """Uses its weight behind the rule's back."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return self.linear(x) + x @ self.linear.weight


def test_a_weight_used_behind_the_rules_back_is_caught():
    torch.manual_seed(0)
    loss = lambda m, i: m(i["x"]).square().sum(1)  # noqa: E731
    with pytest.raises(UnsupportedLayerError, match=r"linear\.weight[\s\S]*escape the clip norm"):
        check(Peeks().double(), {"x": torch.randn(3, 3).double()}, loss)


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen = self.seen + x.detach().sum()
        return self.linear(x)


class CountsInTraining(Counts):
    def forward(self, x):
        if self.training:
            self.seen = self.seen + x.detach().sum()
        return self.linear(x)


def test_a_buffer_that_changes_only_in_training_is_caught():
    model = CountsInTraining().double().eval()
    with pytest.raises(NeighbourError, match="buffer seen"):
        check(model, {"x": torch.ones(2, 3).double()}, lambda m, i: m(i["x"]).sum(1))


def test_a_buffer_that_changes_is_caught():
    with pytest.raises(NeighbourError, match="buffer seen"):
        check(Counts().double(), {"x": torch.ones(2, 3).double()}, lambda m, i: m(i["x"]).sum(1))
