from __future__ import annotations

import itertools

import models
import pytest
import reference
import torch
from torch import nn

from hf_dpkfc.curvature import fit
from hf_dpkfc.curvature.factors import ExpandedFactor, ReducedFactor, position_weights
from hf_dpkfc.curvature.fit import CurvatureOptions, fit_preconditioner
from hf_dpkfc.curvature.preconditioner import KroneckerMap, ScalarMap
from hf_dpkfc.layers.capture import capture
from hf_dpkfc.layers.gradients import OuterGradient
from hf_dpkfc.layers.routes import inspect_model
from hf_dpkfc.losses import TaskLoss, task_of


class Fixed:
    """A probe that always gives the same batch."""

    is_data_free = True
    labels = None

    def __init__(self, batch):
        self.batch = batch

    def batches(self, num_batches, batch_size, generator):
        return iter([self.batch] * num_batches)


def fit_on(model, batch, loss=None, **options):
    settings = CurvatureOptions(num_batches=1, **({"rank": None} | options))
    return fit_preconditioner(model, Fixed(batch), settings, per_example_loss=loss)


def captured_gradient(model, inputs, name):
    table = inspect_model(model)
    loss = TaskLoss(task_of(model))
    captured = capture(model, table, loss, inputs, len(inputs["labels"]))
    return captured.gradient(next(b for b in table if b.name == name))


def test_reduced_rows_are_mean_of_a_and_sum_of_delta_over_unmasked_positions():
    inputs = models.inputs_for("bert")
    gradient = captured_gradient(models.build("bert"), inputs, "bert.encoder.layer.0.output.dense")
    weights = position_weights(gradient, inputs["attention_mask"])
    A, G = ReducedFactor(averages=True), ReducedFactor(averages=False)
    A.add(gradient.augmented_a(), weights)
    G.add(gradient.delta, weights)
    lengths = inputs["attention_mask"].sum(1)
    expected_a = torch.stack(
        [gradient.augmented_a()[i, :n].mean(0) for i, n in enumerate(lengths.tolist())]
    )
    expected_g = torch.stack([gradient.delta[i, :n].sum(0) for i, n in enumerate(lengths.tolist())])
    torch.testing.assert_close(A.covariance(), expected_a.mT @ expected_a / len(lengths))
    torch.testing.assert_close(G.covariance(), expected_g.mT @ expected_g / len(lengths))
    assert (expected_a[:, -1] == 1).all()


def test_expanded_rows_are_all_unmasked_positions():
    inputs = models.inputs_for("bert")
    gradient = captured_gradient(models.build("bert"), inputs, "bert.encoder.layer.0.output.dense")
    factor = ExpandedFactor()
    factor.add(gradient.augmented_a(), position_weights(gradient, inputs["attention_mask"]))
    rows = gradient.augmented_a()[inputs["attention_mask"].bool()]
    torch.testing.assert_close(factor.covariance(), rows.mT @ rows / len(rows))


@pytest.mark.parametrize("approx", ["reduce", "expand"])
@pytest.mark.parametrize("index", [0, 3, 5])
def test_convolution_factors_equal_a_brute_force_estimate(approx, index):
    """im2col by hand: every patch is cut out of the padded image, group by group."""
    model, inputs = models.build("cnn"), models.inputs_for("cnn")
    seen = {}
    module = model.body[index]
    module.register_forward_hook(lambda m, a, o: seen.update(x=a[0], y=o))
    loss = TaskLoss(task_of(model))(model, inputs).sum()
    (delta,) = torch.autograd.grad(loss, [seen["y"]]) if index == 5 else (None,)
    if delta is None:  # an in-place ReLU follows: take δ from the captured pass
        delta = _delta_of(model, inputs, f"body.{index}", seen["y"].shape)
    patches, deltas = _brute_force_rows(module, seen["x"].detach(), delta)
    if approx == "reduce":
        patches, deltas = patches.mean(1, keepdim=True), deltas.sum(1, keepdim=True)
    rows_a, rows_g = patches.flatten(0, 1), deltas.flatten(0, 1)
    preconditioner = fit_on(model, inputs, approx=approx)
    linear = preconditioner[f"body.{index}"]
    for root, rows in ((linear.root_A, rows_a), (linear.root_G, rows_g)):
        expected = reference.inverse_root(rows.mT @ rows / len(rows), 1.0)
        torch.testing.assert_close(reference.explicit_root(root), expected)


def _delta_of(model, inputs, name, shape):
    gradient = captured_gradient(model, inputs, name)
    batch = shape[0]
    channels = gradient.delta.mT.reshape(batch, shape[1], *shape[2:])
    return channels


def _brute_force_rows(module, x, delta):
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    pad = [2, 2, 2, 2] if module.padding == "same" else [module.padding[0]] * 4
    x = torch.nn.functional.pad(x, pad, mode=mode)
    batch, channels = x.shape[:2]
    per_group = channels // module.groups
    out_per_group = delta.shape[1] // module.groups
    patches, deltas = [], []
    for b, g in itertools.product(range(batch), range(module.groups)):
        rows, sends = [], []
        for i, j in itertools.product(range(delta.shape[2]), range(delta.shape[3])):
            cut = [
                x[
                    b,
                    g * per_group + c,
                    i * module.stride[0] + di * module.dilation[0],
                    j * module.stride[1] + dj * module.dilation[1],
                ]
                for c in range(per_group)
                for di in range(module.kernel_size[0])
                for dj in range(module.kernel_size[1])
            ]
            rows.append(
                torch.stack(
                    [*cut, *([torch.ones((), dtype=x.dtype)] if module.bias is not None else [])]
                )
            )
            sends.append(delta[b, g * out_per_group : (g + 1) * out_per_group, i, j])
        patches.append(torch.stack(rows))
        deltas.append(torch.stack(sends))
    return torch.stack(patches), torch.stack(deltas)


@pytest.mark.parametrize("approx", ["reduce", "expand"])
@pytest.mark.parametrize("factor", [1 / 64, 1000.0])
def test_the_reduction_of_the_loss_does_not_change_the_preconditioner(approx, factor):
    model, inputs = models.build("bert"), models.inputs_for("bert")
    plain = TaskLoss(task_of(model))
    one = fit_on(model, inputs, plain, approx=approx)
    two = fit_on(model, inputs, lambda m, i: factor * plain(m, i), approx=approx)
    for name, linear in one.maps.items():
        M = torch.randn(_shape_of(linear), dtype=torch.float64)
        torch.testing.assert_close(
            reference.transform(linear, M), reference.transform(two[name], M)
        )


def _shape_of(linear):
    return (linear.root_G.dim, linear.root_A.dim) if isinstance(linear, KroneckerMap) else (3, 3)


def test_a_key_projections_reduced_factor_is_seen_to_be_rounding_error():
    """Softmax ignores a shift common to all keys, so the δ of a key add up to zero."""
    model, inputs = models.build("bert").float(), models.inputs_for("bert")
    reduced = fit_on(model, inputs)
    keys = {name for name in reduced.maps if name.endswith("self.key")}
    assert {n for n, linear in reduced.maps.items() if linear == ScalarMap()} == keys
    assert len(reduced.notes) == len(keys) == 2
    assert not fit_on(model, inputs, approx="expand").notes


def test_a_bias_column_stands_only_where_a_bias_trains():
    model = models.build("llama")
    preconditioner = fit_on(model, models.inputs_for("llama"))
    assert preconditioner["model.layers.0.mlp.up_proj"].root_A.dim == 16
    bert = models.build("bert")
    with_bias = fit_on(bert, models.inputs_for("bert"))
    bert.classifier.bias.requires_grad_(False)
    without = fit_on(bert, models.inputs_for("bert"))
    assert with_bias["classifier"].root_A.dim == 17
    assert without["classifier"].root_A.dim == 16


class DeepLinear(nn.Module):
    """y = W₂ pool(W₁ x): the deep linear nets for which K-FAC is exact."""

    def __init__(self, pools):
        super().__init__()
        self.first = nn.Linear(3, 4, bias=False)
        self.second = nn.Linear(4, 2, bias=False)
        self.pools = pools

    def forward(self, x):
        hidden = self.first(x)
        return self.second(hidden.mean(1, keepdim=True) if self.pools else hidden)


@pytest.mark.parametrize("approx", ["reduce", "expand"])
def test_kfac_is_exact_on_deep_linear_nets(approx):
    """Every input meets every residual ±√2·e_j, so a and δ are exactly independent.

    Reduce is exact where positions are pooled, expand where each position has a loss of its own
    (Eschenhagen et al. 2023, sections 3.2 and 3.3).
    """
    torch.manual_seed(1)
    pools = approx == "reduce"
    model = DeepLinear(pools).double()
    positions = 3 if pools else 1
    xs = torch.randn(5, positions, 3).double()
    residuals = torch.tensor([[2.0, 0], [0, 2.0]]).double().sqrt()
    pairs = [(x, sign * r) for x in xs for r in residuals for sign in (1, -1)]
    batch = {"x": torch.stack([x for x, _ in pairs]), "r": torch.stack([r for _, r in pairs])}

    def loss(m, inputs):
        y = m(inputs["x"])
        target = (y + inputs["r"][:, None]).detach()
        return (y - target).square().sum((1, 2)) / 2

    for name in ("first", "second"):
        names = [f"{name}.weight"]
        grads = reference.per_sample_gradients(model, names, loss, models.singles(batch))
        flat = torch.stack([g[names[0]].flatten() for g in grads])
        fisher = flat.mT @ flat / len(flat)
        options = CurvatureOptions(approx=approx, num_batches=1)
        factors = fit.estimate_factors(model, Fixed(batch), options, per_example_loss=loss)
        pair = factors.pairs[name]
        kronecker = torch.kron(pair.G.covariance(), pair.A.covariance())
        torch.testing.assert_close(kronecker, fisher)


def test_positions_without_a_mask_all_count():
    gradient = OuterGradient(torch.randn(2, 3, 4), torch.randn(2, 3, 5))
    assert position_weights(gradient, None).sum() == 6
    assert position_weights(gradient, torch.ones(2, 7)).sum() == 6
