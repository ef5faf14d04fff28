"""X1: one example's gradient is its own, and all of it is known."""

from __future__ import annotations

import models
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hf_dpkfc.curvature.preconditioner import Preconditioner
from hf_dpkfc.errors import NeighbourError, UnsupportedLayerError
from hf_dpkfc.layers.routes import inspect_model
from hf_dpkfc.losses import TaskLoss, task_of
from hf_dpkfc.mechanism import independence
from hf_dpkfc.mechanism.clipping import Clipper
from hf_dpkfc.mechanism.independence import check_independence


def check(model, inputs, loss):
    table = inspect_model(model)
    check_independence(model, table, loss, inputs, models.singles(inputs))


@pytest.mark.parametrize("name", models.NAMES)
def test_sound_models_pass(name, caplog):
    """In train mode, too, with the dropout that their configurations have by default."""
    model = models.build(name)
    check(model, models.inputs_for(name), TaskLoss(task_of(model)))
    assert "in eval mode only" not in caplog.text


def test_a_batch_normalised_lm_loss_is_caught():
    model, inputs = models.build("gpt2"), models.inputs_for("gpt2")

    def batch_normalised(m, i):
        logits = m(input_ids=i["input_ids"], attention_mask=i["attention_mask"]).logits[:, :-1]
        labels = i["labels"][:, 1:]
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return losses.view(labels.shape).sum(1) / (labels != -100).sum() * len(labels)

    with pytest.raises(NeighbourError, match="among others"):
        check(model, inputs, batch_normalised)


def padded(inputs, extra, side):
    """The same examples with more padding, as longer neighbours would give them."""
    fill = {"attention_mask": 0, "labels": -100, "input_ids": 1}
    pad = (extra, 0) if side == "left" else (0, extra)
    return {
        name: F.pad(value, pad, value=fill[name]) if value.dim() == 2 else value
        for name, value in inputs.items()
    }


def right_to_left(inputs):
    """Padding moved from the right to the left."""
    shifts = (inputs["attention_mask"] == 0).sum(1).tolist()
    return {
        name: torch.stack([row.roll(n) for row, n in zip(value, shifts, strict=True)])
        if value.dim() == 2
        else value
        for name, value in inputs.items()
    }


# Encoders count positions from the left edge, so left padding would shift them: the check before
# training refuses that. Causal models get their positions from the mask.
PADDED = [(name, "right") for name in ("bert", "bert-mlm", "distilbert", "gpt2", "llama")]
PADDED += [("gpt2", "left"), ("llama", "left")]


@pytest.mark.parametrize(("name", "side"), PADDED)
def test_a_clipped_contribution_does_not_move_with_the_neighbours(name, side, figure):
    """Alone, or with one to three others of any lengths and labels, more or less padded."""
    model = models.build(name)
    loss = TaskLoss(task_of(model))
    clipper = Clipper(model, inspect_model(model), Preconditioner.identity(), loss, 0.1)
    worst = 0.0
    for seed in range(4):
        batch = models.inputs_for(name, batch=4, seed=seed)
        batch = right_to_left(batch) if side == "left" else batch
        own = {k: v[:1] for k, v in batch.items()}
        alone = flat(clipper.sum_of([(own, 1)]))
        for size, extra in ((2, 0), (3, 2), (4, 7)):
            many = padded({k: v[:size] for k, v in batch.items()}, extra, side)
            others = {k: v[1:] for k, v in many.items()}
            with_it, without = (
                clipper.sum_of([(inputs, n)]) for inputs, n in ((many, size), (others, size - 1))
            )
            moved = flat(with_it) - flat(without)
            worst = max(worst, float((moved - alone).norm() / alone.norm()))
    figure(f"{name}, {side}: {worst:.0e}")
    assert worst < 1e-6


def flat(total):
    return torch.cat([total.values[name].flatten() for name in sorted(total.values)])


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


def with_rounding(own):
    """A loss whose float32 rounding grows with the batch, on any machine; float64 has none to see.

    Saturated weights do the same where kernels sum in another order for another batch size.
    """

    def loss(model, inputs):
        shift = 1e6 * len(inputs["labels"])
        return (own(model, inputs) + shift) - shift

    return loss


def test_rounding_is_not_taken_for_a_dependence():
    model, inputs = models.build("bert").float(), models.inputs_for("bert")
    loss, table = with_rounding(TaskLoss(task_of(model))), inspect_model(model)
    tolerances = independence._tolerances(torch.float32)
    with pytest.raises(NeighbourError):
        independence._check(model, table, loss, inputs, models.singles(inputs), tolerances)
    check(model, inputs, loss)


def test_a_dependence_in_float32_is_one_in_float64_too():
    model, inputs = models.build("bert").float(), models.inputs_for("bert")
    own = TaskLoss(task_of(model))
    with pytest.raises(NeighbourError):
        check(model, inputs, lambda m, i: own(m, i) / len(i["labels"]))


def test_bf16_does_not_hide_a_small_dependence():
    """A tenth of the neighbours' losses is within bf16's rounding, not within float32's."""
    model = models.build("bert").to(torch.bfloat16)
    own = TaskLoss(task_of(model))

    def mixed(m, i):
        losses = own(m, i)
        return losses + 0.1 * losses.mean().detach() * losses

    with pytest.raises(NeighbourError, match="among others"):
        check(model, models.inputs_for("bert"), mixed)


class MixesWhileTraining(nn.Module):
    """Half of each example's logits are a neighbour's, in train mode only."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2).double()

    def forward(self, x):
        logits = self.linear(x)
        return (logits + logits.roll(1, 0)) / 2 if self.training else logits


def test_a_dependence_in_train_mode_only_is_caught():
    model = MixesWhileTraining().eval()
    inputs = {"x": torch.randn(3, 3, dtype=torch.float64), "labels": torch.tensor([0, 1, 1])}
    loss = lambda m, i: F.cross_entropy(m(i["x"]), i["labels"], reduction="none")  # noqa: E731
    with pytest.raises(NeighbourError, match="among others"):
        check(model, inputs, loss)


@pytest.mark.parametrize("name", ["bert", "gpt2", "vit"])
def test_attention_dropout_does_not_hide_a_dependence_in_train_mode(name):
    """Fused attention draws by itself, whatever its dropout module was told."""
    model = models.build(name)
    own = TaskLoss(task_of(model))

    def centred(m, inputs):
        losses = own(m, inputs)
        return losses - losses.mean() / 2 if m.training else losses

    with pytest.raises(NeighbourError, match="among others"):
        check(model, models.inputs_for(name), centred)


class RelativePositions(nn.Module):
    """Attention with a learned bias for each pair of positions, as T5 and MPNet have it."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Embedding(12, 1)
        self.head = nn.Linear(2, 2)

    def forward(self, x):
        at = torch.arange(x.shape[1])
        bias = self.bias(at[:, None] - at[None, :] + 6).squeeze(-1)
        return self.head(((x @ x.mT + bias).softmax(-1) @ x).mean(1))


def test_a_table_that_is_no_batch_is_named_and_neighbours_are_not_blamed():
    """Six positions are a multiple of three examples, so its shape alone doesn't tell."""
    torch.manual_seed(0)
    model, inputs = RelativePositions().double(), {"x": torch.randn(3, 6, 2).double()}
    loss = lambda m, i: m(i["x"]).square().sum(1)  # noqa: E731
    with pytest.raises(UnsupportedLayerError, match=r"bias\.weight[\s\S]*requires_grad_"):
        check(model, inputs, loss)
    model.bias.requires_grad_(False)
    check(model, inputs, loss)


def test_a_model_that_draws_while_training_is_said_to_be_unchecked_there(caplog):
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU()).double().eval()
    inputs = {"x": torch.randn(3, 3, dtype=torch.float64)}
    loss = lambda m, i: m(i["x"]).sum(1) + (torch.rand(3) if m.training else 0)  # noqa: E731
    check(model, inputs, loss)
    assert "in eval mode only" in caplog.text
