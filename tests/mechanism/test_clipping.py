"""The claims of hf_dpkfc.mechanism.clipping, each by name."""

from __future__ import annotations

import weakref

import models
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.overrides import TorchFunctionMode

from hf_dpkfc.curvature import fit
from hf_dpkfc.curvature.fit import CurvatureOptions, fit_preconditioner
from hf_dpkfc.curvature.preconditioner import (
    ElementwiseMap,
    KroneckerMap,
    Preconditioner,
    ScalarMap,
)
from hf_dpkfc.curvature.probes import PinkNoiseProbe
from hf_dpkfc.curvature.roots import root_of_rows
from hf_dpkfc.errors import ConfigurationError, UnsupportedLayerError
from hf_dpkfc.layers.gradients import DenseGradient, OuterGradient, RowGradient
from hf_dpkfc.layers.routes import inspect_model
from hf_dpkfc.losses import TaskLoss, task_of
from hf_dpkfc.mechanism import clipping
from hf_dpkfc.mechanism.clipping import ClippedSum, Clipper


def clipper_of(name, clip_norm=0.1, kind="kfac", dtype=torch.float64):
    model = models.build(name).to(dtype)
    options = CurvatureOptions(kind=kind, rank=3, damping=0.05, num_batches=2, batch_size=8)
    probe = PinkNoiseProbe.for_model(model)
    preconditioner = fit_preconditioner(model, probe, options)
    return Clipper(model, inspect_model(model), preconditioner, TaskLoss(task_of(model)), clip_norm)


CLIPPERS = {
    (kind, dtype): clipper_of("cnn", kind=kind, dtype=dtype)
    for kind in ("none", "kfac", "diagonal")
    for dtype in (torch.float32, torch.float64)
}


def subset(inputs, keep):
    return {k: v[keep] for k, v in inputs.items()}


def norm(values):
    return float(sum(v.double().square().sum() for v in values.values()).sqrt())


def difference(one, two):
    return {n: one.values[n].double() - two.values[n].double() for n in one.values}


SPOILERS = st.sampled_from(
    [1.0, 1e-30, 1e6, 1e30, 3e38, float("nan"), float("inf"), -float("inf"), 0.0]
)


CASES = {
    "size": st.integers(1, 5),
    "seed": st.integers(0, 10**6),
    "scale": SPOILERS,
    "kind": st.sampled_from(["none", "kfac", "diagonal"]),
    "dtype": st.sampled_from([torch.float32, torch.float64]),
}


@settings(max_examples=330, deadline=None, derandomize=True)
@given(**CASES)
def test_one_example_moves_the_sum_by_at_most_its_sensitivity(size, seed, scale, kind, dtype):
    assert_bounded(size, seed, scale, kind, dtype)


@pytest.mark.slow
def test_one_example_moves_the_sum_by_at_most_its_sensitivity_in_2000_cases(figure):
    cases = []

    @settings(max_examples=2000, deadline=None, database=None)
    @given(**CASES)
    def check(**case):
        cases.append(assert_bounded(**case))

    check()
    figure(f"{len(cases):,} cases, largest ‖Δ sum‖/C = {max(cases):.7f}")
    assert len(cases) >= 2000


def assert_bounded(size, seed, scale, kind, dtype):
    """The share of C by which the last of ``size`` examples moves the sum."""
    clipper = CLIPPERS[kind, dtype]
    inputs = models.inputs_for("cnn", batch=size, seed=seed)
    inputs["pixel_values"] = inputs["pixel_values"].to(dtype)
    inputs["pixel_values"][-1] *= scale
    without = clipper.sum_of([(subset(inputs, slice(0, size - 1)), size - 1)])
    with_it = clipper.sum_of([(inputs, size)])
    moved = norm(difference(with_it, without))
    assert all(torch.isfinite(v).all() for v in with_it.values.values())
    assert moved <= with_it.sensitivity * (1 + (1e-6 if dtype == torch.float64 else 0))
    return moved / with_it.sensitivity


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 3e38])
def test_a_non_finite_example_contributes_zero_and_leaves_the_others_unchanged(poison):
    clipper = clipper_of("vit", dtype=torch.float32)
    inputs = {
        k: v.float() if v.is_floating_point() else v for k, v in models.inputs_for("vit").items()
    }
    clean = clipper.sum_of([(subset(inputs, [0, 1, 3]), 3)])
    inputs["pixel_values"][2] = poison
    spoiled = clipper.sum_of([(inputs, 4)])
    assert norm(difference(clean, spoiled)) <= 1e-5 * norm(clean.values)


def test_an_empty_batch_gives_zeros():
    clipper = CLIPPERS["kfac", torch.float32]
    empty = clipper.sum_of([])
    assert norm(empty.values) == 0
    names = {n for n, p in clipper.model.named_parameters() if p.requires_grad}
    assert set(empty.values) == names
    assert norm(clipper.sum_of([({}, 0)]).values) == 0


@pytest.mark.parametrize("micro", [1, 2, 3, 7])
def test_micro_batches_add_up_to_the_same_sum(micro):
    clipper = CLIPPERS["kfac", torch.float64]
    inputs = models.inputs_for("cnn", batch=7)
    whole = clipper.sum_of([(inputs, 7)])
    parts = [subset(inputs, slice(i, i + micro)) for i in range(0, 7, micro)]
    split = clipper.sum_of([(part, len(part["labels"])) for part in parts])
    assert norm(difference(whole, split)) < 1e-12


def test_sums_of_two_processes_add():
    clipper = CLIPPERS["kfac", torch.float64]
    inputs = models.inputs_for("cnn", batch=6)
    whole = clipper.sum_of([(inputs, 6)])
    halves = [clipper.sum_of([(subset(inputs, slice(r, 6, 2)), 3)]) for r in (0, 1)]
    assert norm(difference(whole, halves[0] + halves[1])) < 1e-12


def test_sums_of_different_sensitivity_do_not_add():
    with pytest.raises(ConfigurationError, match="sensitivity"):
        ClippedSum({}, 1.0) + ClippedSum({}, 2.0)


def test_norms_and_sums_are_float32_under_bfloat16():
    clipper = clipper_of("vit", dtype=torch.bfloat16)
    inputs = models.inputs_for("vit")
    inputs["pixel_values"] = inputs["pixel_values"].bfloat16()
    total = clipper.sum_of([(inputs, 4)])
    assert {v.dtype for v in total.values.values()} == {torch.float32}
    assert norm(total.values) <= 4 * clipper.clip_norm


def test_small_gradients_are_not_touched():
    clipper = clipper_of("cnn", clip_norm=1e6, kind="none")
    inputs = models.inputs_for("cnn")
    total = clipper.sum_of([(inputs, 4)])
    loss = clipper.per_example_loss(clipper.model, inputs).sum()
    names = list(total.values)
    parameters = dict(clipper.model.named_parameters())
    grads = torch.autograd.grad(loss, [parameters[n] for n in names])
    for name, grad in zip(names, grads, strict=True):
        torch.testing.assert_close(total.values[name], grad)


def test_state_of_one_pass_does_not_reach_the_next():
    """A layer skipped in the second pass has no norm there (Opacus' ghost kept the last)."""

    class Skips(nn.Module):
        def __init__(self):
            super().__init__()
            self.always = nn.Linear(3, 3)
            self.sometimes = nn.Linear(3, 3)

        def forward(self, x, skip):
            return self.always(x) + (0 if skip else self.sometimes(x))

    torch.manual_seed(0)
    model = Skips()
    loss = lambda m, i: m(i["x"], i["skip"]).square().sum(1)  # noqa: E731
    clipper = Clipper(model, inspect_model(model), Preconditioner.identity(), loss, 1e9)
    x = torch.randn(2, 3)
    clipper.sum_of([({"x": 100 * x, "skip": False}, 2)])
    second = clipper.sum_of([({"x": x, "skip": True}, 2)])
    assert second.values["sometimes.weight"].abs().max() == 0
    assert second.values["always.weight"].abs().max() > 0


def _only_one_pass_at_a_time(module, monkeypatch):
    """The number of passes made by a module; each must be gone when the next one begins."""
    passes = []
    capture = module.capture

    def checked(*args):
        assert not any(earlier() for earlier in passes)
        captured = capture(*args)
        passes.append(weakref.ref(captured))
        return captured

    monkeypatch.setattr(module, "capture", checked)
    return passes


def test_a_pass_is_gone_before_the_next_one_is_made(monkeypatch):
    passes = _only_one_pass_at_a_time(clipping, monkeypatch)
    inputs = models.inputs_for("cnn", batch=6)
    CLIPPERS["kfac", torch.float64].sum_of((subset(inputs, [i]), 1) for i in range(6))
    assert len(passes) == 6


@pytest.mark.parametrize("kind", ["kfac", "diagonal"])
def test_a_probe_pass_is_gone_before_the_next_one_is_made(kind, monkeypatch):
    passes = _only_one_pass_at_a_time(fit, monkeypatch)
    clipper_of("cnn", kind=kind)
    assert len(passes) == 3  # two batches for the factors, one for the balance


@pytest.mark.parametrize("clip_norm", [0.0, -1.0, float("inf"), float("nan")])
def test_a_clip_norm_without_bound_is_refused(clip_norm):
    with pytest.raises(ConfigurationError, match="clip_norm"):
        Clipper(
            models.build("cnn"),
            inspect_model(models.build("cnn")),
            Preconditioner(),
            None,
            clip_norm,
        )


def test_no_full_per_sample_tensor_is_ever_formed():
    """[batch, d_out, d_in] would be 64·512·512 floats; nothing near it is allocated."""
    model = nn.Linear(512, 512)
    loss = lambda m, i: m(i["x"]).square().sum((1, 2))  # noqa: E731
    clipper = Clipper(model, inspect_model(model), Preconditioner.identity(), loss, 1.0)
    with torch.profiler.profile(profile_memory=True) as profile:
        clipper.sum_of([({"x": torch.randn(64, 4, 512)}, 64)])
    largest = max(
        event.self_cpu_memory_usage / max(1, event.count) for event in profile.key_averages()
    )
    assert largest < 64 * 512 * 512 * 4 / 8


@pytest.mark.parametrize("linear", [ScalarMap(), ElementwiseMap(torch.ones(40, 30))], ids=str)
@pytest.mark.parametrize("sides", [(2e18, 1e-23), (1e-23, 2e18)])
def test_a_huge_side_cannot_hide_behind_a_tiny_one(linear, sides):
    """In float32 the tiny side's squares are zero: the norm would be 0 and the gradient isn't."""
    gradient = OuterGradient(torch.full((2, 1, 30), sides[0]), torch.full((2, 1, 40), sides[1]))
    true_norm = float(gradient.delta[0, 0].double().norm() * gradient.a[0, 0].double().norm())
    assert true_norm > 5e-4
    assert (linear.sq_norms(gradient, {}).sqrt() > 0.999 * true_norm).all()


def cancelling(size, positions=280, width=384):
    """Records of which the first one's positions cancel but for one; T is past the Gram route."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, positions, width, generator=generator)
    v = 1e-3 * torch.randn(8, positions, width, generator=generator)
    half = positions // 2
    x[0, half:] = x[0, :half]
    v[0, :half] = size * torch.randn(half, width, generator=generator)
    v[0, half:] = -v[0, :half]
    v[0, 0] += torch.randn(width, generator=generator)
    return {"x": x, "v": v}


@pytest.mark.parametrize("size", [1e2, 1e5, 1e6])
@pytest.mark.parametrize("kind", ["none", "diagonal"])
def test_positions_that_cancel_do_not_hide_a_gradient(kind, size, monkeypatch):
    monkeypatch.setattr("hf_dpkfc.layers.gradients.MAX_KEPT_ELEMENTS", 0)  # as in a large batch
    model = nn.Linear(384, 384, bias=False)
    maps = {"": ElementwiseMap(torch.rand(384, 384) + 0.5)} if kind == "diagonal" else {}
    loss = lambda m, i: (m(i["x"]) * i["v"]).sum((1, 2))  # noqa: E731
    clipper = Clipper(model, inspect_model(model), Preconditioner(maps), loss, 1.0)
    inputs = cancelling(size)
    moved = difference(
        clipper.sum_of([(inputs, 8)]), clipper.sum_of([(subset(inputs, slice(1, 8)), 7)])
    )
    assert norm(moved) <= 1.0


def test_rows_that_cancel_do_not_hide_a_gradient():
    delta = torch.randn(1, 40, 16, generator=torch.Generator().manual_seed(0)) * 1e6
    delta[:, 20:] = -delta[:, :20]
    delta[:, 0] += 1
    gradient = RowGradient(torch.zeros(1, 40, dtype=torch.long), delta, 3)
    weights = 1 / gradient.sq_norms().sqrt()
    orders = [torch.randperm(40, generator=torch.Generator().manual_seed(s)) for s in range(20)]
    sums = [RowGradient(gradient.ids, delta[:, order], 3).weighted_sum(weights) for order in orders]
    assert max(float(total.norm()) for total in sums) <= 1.0


def aligned_map(damping, width=256):
    """A map from nearly rank-one factors, and the direction that it shrinks most."""
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(width, generator=generator, dtype=torch.float64)
    rows = direction * torch.randn(64, 1, generator=generator, dtype=torch.float64)
    rows = rows + 1e-6 * torch.randn(64, width, generator=generator, dtype=torch.float64)
    root = root_of_rows(rows, damping, 8)
    linear = KroneckerMap(root, root).to(torch.device("cpu"), torch.float32)
    return linear, (direction / direction.norm()).float()


def aligned_clipper(damping):
    linear, direction = aligned_map(damping)
    model = nn.Linear(256, 256, bias=False)
    loss = lambda m, i: (m(i["x"]) * i["v"]).sum((1, 2))  # noqa: E731
    table = inspect_model(model)
    return Clipper(model, table, Preconditioner({"": linear}), loss, 1.0), direction


@pytest.mark.parametrize("damping", [1.0, 0.1, 0.01])
def test_a_gradient_where_both_roots_are_smallest_stays_below_c(damping):
    clipper, direction = aligned_clipper(damping)
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        x, v = (direction * torch.randn(1, 4, 1, generator=generator) for _ in range(2))
        assert norm(clipper.sum_of([({"x": x, "v": 1e6 * v}, 1)]).values) <= 1.0


class _TensorFloat32(TorchFunctionMode):
    """Products as a GPU makes them where TF32 is allowed: operands keep ten bits."""

    PRODUCTS = ("matmul", "__matmul__", "mm", "bmm", "addmm", "baddbmm", "addmm_")

    def __torch_function__(self, func, types, args=(), kwargs=None):
        allowed = torch.backends.cuda.matmul.fp32_precision == "tf32"
        if allowed and func.__name__ in self.PRODUCTS:
            args = [
                self._rounded(a) if torch.is_tensor(a) and a.dtype.itemsize == 4 else a
                for a in args
            ]
        return func(*args, **(kwargs or {}))

    def _rounded(self, x):
        bits = x.contiguous().view(torch.int32)
        return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


@pytest.fixture
def _tf32_allowed():
    before = torch.backends.fp32_precision
    torch.backends.fp32_precision = "tf32"
    yield
    torch.backends.fp32_precision = before


@pytest.mark.usefixtures("_tf32_allowed")
@pytest.mark.parametrize("damping", [1.0, 0.1, 0.01])
def test_tf32_does_not_carry_an_example_over_c(damping):
    """Ten bits would, at each of these dampings."""
    with _TensorFloat32():
        test_a_gradient_where_both_roots_are_smallest_stays_below_c(damping)
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"  # elsewhere it is the user's


def test_autocast_around_a_step_does_not_reach_norms_and_sums():
    clipper, _ = aligned_clipper(1.0)
    x, v = torch.randn(2, 6, 4, 256, generator=torch.Generator().manual_seed(0))
    plain = clipper.sum_of([({"x": x, "v": v}, 6)])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = clipper.sum_of([({"x": x, "v": v}, 6)])
    # The output gradient v is bf16's: nothing else may be.
    rounded = clipper.sum_of([({"x": x, "v": v.bfloat16().float()}, 6)])
    assert norm(difference(rounded, inside)) == 0
    assert norm(difference(plain, inside)) > 0


def test_a_condition_beyond_the_precision_is_refused():
    """At 1e-4 the same gradient came out at 1.56 C under the capped margin."""
    clipper, _ = aligned_clipper(1e-4)
    with pytest.raises(ConfigurationError, match="condition number"):
        clipper.sum_of([])


def test_parts_of_an_example_are_not_clipped_one_by_one(monkeypatch):
    """Whatever a rule gives: two norms for an example would let it move the sum by 2C."""
    whole = DenseGradient.sq_norms
    monkeypatch.setattr(
        DenseGradient, "sq_norms", lambda self: whole(self).repeat_interleave(2) / 2
    )
    model = models.build("vit")
    identity, loss = Preconditioner.identity(), TaskLoss(task_of(model))
    clipper = Clipper(model, inspect_model(model), identity, loss, 1.0)
    with pytest.raises(UnsupportedLayerError, match="norms of shape"):
        clipper.sum_of([(models.inputs_for("vit"), models.BATCH)])
