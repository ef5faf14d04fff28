"""DiSK's pair: exact, clipped as one gradient, and the weights come back untouched."""

from __future__ import annotations

import copy

import models
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_reference import OPTIONS, relative_error, setting
from torch import nn

from hf_dpkfc.curvature.preconditioner import Preconditioner
from hf_dpkfc.errors import RecordError
from hf_dpkfc.layers.routes import inspect_model
from hf_dpkfc.losses import TaskLoss, task_of
from hf_dpkfc.mechanism.clipping import Clipper
from hf_dpkfc.mechanism.lookahead import Lookahead
from hf_dpkfc.optimizers.disk import KalmanFilter

KAPPA, GAMMA = 0.7, 0.5


def weights_of(model):
    return {n: p for n, p in model.named_parameters() if p.requires_grad}


def earlier(model, distance=0.05):
    """Weights of a step before, a random update away."""
    generator = torch.Generator().manual_seed(3)
    noise = lambda p: torch.randn(p.shape, generator=generator).to(p.dtype)  # noqa: E731
    return {n: p.detach() - distance * noise(p) for n, p in weights_of(model).items()}


def lookahead_of(model, kappa=KAPPA, gamma=GAMMA, distance=0.05):
    return KalmanFilter(kappa, gamma, previous=earlier(model, distance)).lookahead(
        weights_of(model)
    )


@pytest.mark.parametrize(("kappa", "gamma"), [(0.7, 0.5), (0.5, 1.0), (0.4, 0.3), (0.9, 2.0)])
@pytest.mark.parametrize("option", ["none", "diagonal", "reduce-rank"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "cnn"])
def test_the_pairs_clipped_sum_equals_the_textbook_loop(name, option, kappa, gamma):
    model, table, loss, preconditioner = setting(name, "full", OPTIONS[option])
    clipper = Clipper(model, table, preconditioner, loss, 0.05)
    lookahead = lookahead_of(model, kappa, gamma)
    inputs = models.inputs_for(name)
    fast = clipper.sum_of([(inputs, models.BATCH)], lookahead)
    slow = reference.disk_clipped_sum(
        model,
        table,
        preconditioner,
        loss,
        models.singles(inputs),
        clipper.bound(lookahead),
        previous=earlier(model),
        kappa=kappa,
        gamma=gamma,
    )
    assert set(fast.values) == set(slow)
    assert relative_error(fast.values, slow) < 1e-9


def test_an_unclipped_pair_is_the_sum_of_the_pairs():
    """With C = 1e6 nothing is clipped: w·G(x + γd) + (1 − w)·G(x), by autograd on the batch."""
    model, table, loss, _ = setting("cnn", "full", OPTIONS["none"])
    clipper = Clipper(model, table, Preconditioner.identity(), loss, 1e6)
    lookahead = lookahead_of(model, 0.4, 0.3)
    inputs = models.inputs_for("cnn")
    ahead = copy.deepcopy(model)
    ahead.load_state_dict(ahead.state_dict() | dict(lookahead.point))
    total = clipper.sum_of([(inputs, models.BATCH)], lookahead).values
    for name, value in total.items():
        there, here = (
            torch.autograd.grad(loss(m, inputs).sum(), m.get_parameter(name))[0]
            for m in (ahead, model)
        )
        expected = lookahead.weight * there + (1 - lookahead.weight) * here
        torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-12)


class Curved(nn.Module):
    """A leaf whose gradient depends on its own parameter: exp(s)·x."""

    def __init__(self):
        super().__init__()
        self.s = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return self.s.exp() * x


def test_small_modules_are_differentiated_at_the_point_of_their_pass():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), Curved()).double()
    loss = lambda m, i: m(i["x"]).square().sum(1)  # noqa: E731
    table = inspect_model(model).require_covered()
    clipper = Clipper(model, table, Preconditioner.identity(), loss, 1.0)
    inputs = {"x": torch.randn(4, 3).double()}
    lookahead = lookahead_of(model, distance=0.5)
    fast = clipper.sum_of([(inputs, 4)], lookahead)
    slow = reference.disk_clipped_sum(
        model,
        table,
        Preconditioner.identity(),
        loss,
        models.singles(inputs),
        clipper.bound(lookahead),
        previous=earlier(model, 0.5),
        kappa=KAPPA,
        gamma=GAMMA,
    )
    assert relative_error(fast.values, slow) < 1e-9


def cnn_clipper(dtype):
    model, table, loss, preconditioner = setting("cnn", "full", OPTIONS["reduce-rank"], dtype)
    return Clipper(model, table, preconditioner, loss, 0.1)


CLIPPERS = {dtype: cnn_clipper(dtype) for dtype in (torch.float32, torch.float64)}
SPOILERS = st.sampled_from([1.0, 1e-30, 1e6, 3e38, float("nan"), float("inf")])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    size=st.integers(1, 4),
    seed=st.integers(0, 10**6),
    scale=SPOILERS,
    pair=st.sampled_from([(0.7, 0.5), (0.5, 1.0), (0.1, 0.15)]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_one_example_moves_the_sum_of_pairs_by_at_most_its_sensitivity(
    size, seed, scale, pair, dtype
):
    clipper = CLIPPERS[dtype]
    lookahead = lookahead_of(clipper.model, *pair)
    inputs = models.inputs_for("cnn", batch=size, seed=seed)
    inputs["pixel_values"] = inputs["pixel_values"].to(dtype)
    inputs["pixel_values"][-1] *= scale
    fewer = {k: v[: size - 1] for k, v in inputs.items()}
    without = clipper.sum_of([(fewer, size - 1)], lookahead).values
    with_it = clipper.sum_of([(inputs, size)], lookahead)
    moved = sum(
        (v.double() - without[n].double()).square().sum() for n, v in with_it.values.items()
    )
    assert all(torch.isfinite(v).all() for v in with_it.values.values())
    assert moved.sqrt() <= with_it.sensitivity * (1 + (1e-6 if dtype == torch.float64 else 0))


def test_an_example_that_breaks_at_the_lookahead_point_only_contributes_zero():
    model = nn.Linear(2, 1, bias=False).double()
    loss = lambda m, i: m(i["x"]).log().sum(1)  # noqa: E731
    clipper = Clipper(model, inspect_model(model), Preconditioner.identity(), loss, 1.0)
    model.weight.data.fill_(1.0)
    lookahead = Lookahead(0.5, {"weight": torch.tensor([[1.0, -1.0]]).double()})
    fine, broken = torch.tensor([[2.0, 1.0]]).double(), torch.tensor([[1.0, 2.0]]).double()
    alone = clipper.sum_of([({"x": fine}, 1)], lookahead).values["weight"]
    both = clipper.sum_of([({"x": torch.cat([fine, broken])}, 2)], lookahead).values["weight"]
    assert alone.abs().max() > 0
    torch.testing.assert_close(alone, both, rtol=0, atol=1e-15)


def test_the_weights_come_back_bit_for_bit():
    model, table, loss, _ = setting("bert", "full", OPTIONS["none"], torch.float32)
    before = {n: (p.data_ptr(), p.detach().clone()) for n, p in model.named_parameters()}

    def unchanged():
        now = dict(model.named_parameters())
        return all(
            now[n].data_ptr() == address and torch.equal(now[n], value)
            for n, (address, value) in before.items()
        )

    clipper = Clipper(model, table, Preconditioner.identity(), loss, 1.0)
    inputs = models.inputs_for("bert")
    clipper.sum_of([(inputs, models.BATCH)], lookahead_of(model))
    assert unchanged()
    with pytest.raises(RecordError):
        clipper.sum_of([(inputs | {"labels": inputs["labels"] + 99}, 4)], lookahead_of(model))
    assert unchanged()


def test_both_passes_draw_the_same_dropout_masks():
    """At d = 0 the pair of one example is its single gradient, if the masks agree."""
    model = models.build("bert").train()
    loss = TaskLoss(task_of(model))
    table = inspect_model(model).require_covered()
    clipper = Clipper(model, table, Preconditioner.identity(), loss, 1e6)
    here = {n: p.detach().clone() for n, p in weights_of(model).items()}
    inputs = models.inputs_for("bert")
    sums = []
    for lookahead in (None, Lookahead(3.0, here)):
        torch.manual_seed(5)
        sums.append(clipper.sum_of([(inputs, models.BATCH)], lookahead).values)
    assert relative_error(sums[1], sums[0]) < 1e-12


def test_a_weight_of_one_evaluates_the_lookahead_point_only():
    model, table, _, _ = setting("cnn", "full", OPTIONS["none"])
    task = TaskLoss(task_of(model))
    seen = []

    def counted(m, i):
        seen.append(next(m.parameters()).detach().clone())
        return task(m, i)

    clipper = Clipper(model, table, Preconditioner.identity(), counted, 1.0)
    lookahead = lookahead_of(model, 0.7, 0.3 / 0.7)
    clipper.sum_of([(models.inputs_for("cnn"), models.BATCH)], lookahead)
    assert lookahead.weight == 1.0
    assert len(seen) == 1
    assert torch.equal(seen[0], next(iter(lookahead.point.values())))


def test_the_margin_grows_with_the_rounding_of_the_pair():
    clipper = CLIPPERS[torch.float32]
    moderate, strong = (lookahead_of(clipper.model, *pair) for pair in ((0.7, 0.5), (0.1, 0.15)))
    assert clipper.bound(moderate) == pytest.approx(clipper.bound(), rel=1e-9)
    assert clipper.bound(strong) < clipper.bound()
