"""From a model and a probe to a preconditioner: the whole data-free stream in one call (Alg. 1)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_dpkfc.curvature.factors import (
    ExpandedFactor,
    Factor,
    FactorPair,
    IdentityFactor,
    ReducedFactor,
)
from hf_dpkfc.curvature.preconditioner import (
    ElementwiseMap,
    GramCache,
    KroneckerMap,
    LinearMap,
    Preconditioner,
    ScalarMap,
)
from hf_dpkfc.curvature.probes import Probe
from hf_dpkfc.curvature.roots import Root
from hf_dpkfc.errors import ConfigurationError, ProbeError
from hf_dpkfc.layers.capture import Captured, PerExampleLoss, capture
from hf_dpkfc.layers.gradients import OuterGradient, PerSampleGradient
from hf_dpkfc.layers.layout import accumulation_dtype
from hf_dpkfc.layers.routes import Block, Form, RouteTable, inspect_model
from hf_dpkfc.losses import TaskLoss, task_of

KINDS = ("kfac", "diagonal", "none")
APPROXIMATIONS = ("reduce", "expand")
SIDES = ("both", "inputs")
LABELS = ("uniform", "model")


@dataclass(frozen=True)
class CurvatureOptions:
    """How factors become a preconditioner. Utility only: none of it can change the guarantee.

    Attributes:
        kind: "kfac", "diagonal" (AdaDPS) or "none".
        approx: K-FAC's treatment of positions, "reduce" or "expand".
        sides: "both", U_G g U_A; or "inputs", g U_A, which doesn't age with the head (after FOOF,
            Benzing 2022, which takes A's whole inverse).
        damping: Added to the factors, relative to their mean eigenvalue.
        rank: Eigendirections kept per factor; None, or as many as it has, is exact.
        max_factor_dim: Wider factors fall back to low rank, with a note.
        layer_balance: How preconditioned layers share the clip norm: 1 as their raw gradients do,
            0 equally.
        labels: "uniform", or "model" for labels from the model's own predictions.
        num_batches: Probe batches per fit.
        batch_size: Probes per batch.
    """

    kind: str = "kfac"
    approx: str = "reduce"
    sides: str = "both"
    damping: float = 1.0
    rank: int | None = 64
    max_factor_dim: int = 4096
    layer_balance: float = 1.0
    labels: str = "uniform"
    num_batches: int = 10
    batch_size: int = 64

    def __post_init__(self) -> None:
        _require_one_of("preconditioner", self.kind, KINDS)
        _require_one_of("kfac_approx", self.approx, APPROXIMATIONS)
        _require_one_of("kfac_sides", self.sides, SIDES)
        _require_one_of("probe_labels", self.labels, LABELS)
        if not self.damping > 0:
            raise ConfigurationError(
                f"damping={self.damping}.",
                why="a factor has directions without any signal, and their inverse root needs a "
                "positive floor.",
                way_out="choose damping > 0; 1.0 adds the factor's mean eigenvalue.",
            )
        if not 0 <= self.layer_balance <= 1:
            raise ConfigurationError(
                f"layer_balance={self.layer_balance}.",
                why="it goes from equal shares of the clip norm to those of the raw gradients.",
                way_out="choose 0 ≤ layer_balance ≤ 1; 1.0 is the default.",
            )
        for name in ("rank", "max_factor_dim", "num_batches", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigurationError(
                    f"{name}={value}.",
                    why="it counts things of which at least one is needed.",
                    way_out=f"choose {name} ≥ 1"
                    + (", or None for exact roots." if name == "rank" else "."),
                )


def _require_one_of(name: str, value: str, legal: tuple[str, ...]) -> None:
    if value not in legal:
        raise ConfigurationError(
            f"{name}={value!r}.",
            why="there is no such choice.",
            way_out=f"choose one of {', '.join(legal)}.",
        )


def fit_preconditioner(
    model: nn.Module,
    probe: Probe,
    options: CurvatureOptions | None = None,
    *,
    seed: int = 0,
    per_example_loss: PerExampleLoss | None = None,
    table: RouteTable | None = None,
) -> Preconditioner:
    """The preconditioner of a model at its present weights, from synthetic inputs alone.

    Args:
        model: Probed in eval mode; its modes, gradients and the global random state are left as
            they were.
        probe: Where inputs and labels come from.
        options: How factors become maps.
        seed: Public randomness: the same seed and weights give bit-identical maps.
        per_example_loss: (model, inputs) -> [batch]; by default that of the model's task.
        table: The table of routes, if the caller has it.

    Raises:
        ProbeError: If probing gives non-finite factors.
    """
    options = options or CurvatureOptions()
    if options.kind == "none":
        return Preconditioner.identity()
    table = (table or inspect_model(model)).require_covered()
    passes = _Passes(
        model, table, probe, options, seed, per_example_loss or TaskLoss(task_of(model))
    )
    with probing(model):
        fit = _fit_diagonal if options.kind == "diagonal" else _fit_kronecker
        maps, notes = fit(passes)
        maps = _balanced(maps, passes)
    fitted = Preconditioner(
        maps, options.kind, probe.is_data_free, tuple(notes), any(_AWAITS in n for n in notes)
    )
    return fitted.to(passes.device, passes.dtype)


@dataclass(frozen=True)
class Factors:
    """Kronecker factors of a model at one set of weights.

    Attributes:
        pairs: A and G by block name, for every block that K-FAC covers and the loss reaches.
        noise_floor: The signal at or below which a factor holds only rounding error.
        is_data_free: Whether they came from probes that hold no record.
    """

    pairs: Mapping[str, FactorPair]
    noise_floor: float
    is_data_free: bool = True

    def why_without(self, name: str) -> str | None:
        """Why a block's factors can't be used; None if they can.

        Raises:
            ProbeError: If they aren't finite.
        """
        pair = self.pairs[name]
        if not math.isfinite(pair.A.trace() + pair.G.trace()):
            raise _not_finite(name)
        signal = min(pair.A.signal(), pair.G.signal())
        if signal > self.noise_floor:
            return None
        return _AWAITS if signal == 0 else _CANCELS


def estimate_factors(
    model: nn.Module,
    probe: Probe,
    options: CurvatureOptions | None = None,
    *,
    seed: int = 0,
    per_example_loss: PerExampleLoss | None = None,
    table: RouteTable | None = None,
) -> Factors:
    """The factors that :func:`fit_preconditioner` would invert, with the same arguments."""
    table = (table or inspect_model(model)).require_covered()
    loss = per_example_loss or TaskLoss(task_of(model))
    with probing(model):
        return _estimate_factors(
            _Passes(model, table, probe, options or CurvatureOptions(), seed, loss)
        )


@contextmanager
def probing(model: nn.Module) -> Iterator[None]:
    """Eval mode with global random state protected; every module's mode is put back."""
    modes = [(module, module.training) for module in model.modules()]
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        model.eval()
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode


def inputs_like(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A batch on the model's device, floats in its dtype."""
    like = next(model.parameters())
    return {
        name: value.to(like.device, like.dtype if value.is_floating_point() else value.dtype)
        for name, value in batch.items()
    }


@dataclass(frozen=True)
class _Passes:
    """Captured passes over probe batches."""

    model: nn.Module
    table: RouteTable
    probe: Probe
    options: CurvatureOptions
    seed: int
    per_example_loss: PerExampleLoss

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return accumulation_dtype(next(self.model.parameters()).dtype)

    def for_factors(self) -> Iterator[dict[str, Tensor]]:
        """Inputs of every probe batch; :meth:`captured` runs one."""
        generator = torch.Generator().manual_seed(self.seed)
        yield from self._inputs(self.options.num_batches, generator)

    def for_balance(self) -> Captured:
        """One more batch, of mixed lengths, on which layers are balanced."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        return self.captured(next(self._inputs(1, generator)))

    def captured(self, inputs: Mapping[str, Tensor]) -> Captured:
        """The pass over one batch. It is large: let go of it before the next one."""
        size = len(next(iter(inputs.values())))
        return capture(self.model, self.table, self.per_example_loss, inputs, size)

    def _inputs(self, num_batches: int, generator: torch.Generator) -> Iterator[dict[str, Tensor]]:
        for batch in self.probe.batches(num_batches, self.options.batch_size, generator):
            inputs = inputs_like(self.model, batch)
            if self.options.labels == "model":
                inputs |= self._model_labels(inputs, generator)
            yield inputs

    def _model_labels(
        self, inputs: Mapping[str, Tensor], generator: torch.Generator
    ) -> dict[str, Tensor]:
        if self.probe.labels is None:
            return {}
        targets = {"labels", "start_positions", "end_positions"}
        with torch.no_grad():
            outputs = self.model(**{k: v for k, v in inputs.items() if k not in targets})
        drawn = self.probe.labels.draw_from_model(outputs, inputs, generator)
        return inputs_like(self.model, drawn)


def _fit_kronecker(passes: _Passes) -> tuple[dict[str, LinearMap], list[str]]:
    factors = _estimate_factors(passes)
    notes: list[str] = []
    roots: dict[int, Root] = {}
    maps: dict[str, LinearMap] = {}
    for name, pair in factors.pairs.items():
        reason = factors.why_without(name)
        if reason is not None:
            notes.append(f"{name}: identity, {reason}")
            maps[name] = ScalarMap()
            continue
        for factor in (pair.A, pair.G):
            if passes.options.approx == "expand" and isinstance(factor, ReducedFactor):
                notes.append(f"{name}: reduced, {_too_wide(factor, passes.options)}")
            if id(factor) not in roots:
                roots[id(factor)] = _root(name, factor, passes.options, notes)
        maps[name] = KroneckerMap(roots[id(pair.A)], roots[id(pair.G)])
    return maps, notes


def _estimate_factors(passes: _Passes) -> Factors:
    pairs: dict[str, FactorPair] = {}
    eps = 0.0
    for inputs in passes.for_factors():
        mask = inputs.get("attention_mask")
        eps = max(eps, _add_pass(pairs, passes, passes.captured(inputs), mask))
    return Factors(pairs, min(2.0**-5, 2.0**10 * eps), passes.probe.is_data_free)


def _add_pass(
    pairs: dict[str, FactorPair], passes: _Passes, captured: Captured, mask: Tensor | None
) -> float:
    """Add one pass to the factors, new ones where there are none yet; returns its rounding."""
    # Each with its tensor: while that is held, its address can't be another tensor's.
    inputs: dict[tuple[Any, ...], tuple[Tensor, Factor]] = {}
    for block in passes.table:
        gradient = captured.gradient(block) if block.treatment == "kfac" else None
        if not isinstance(gradient, OuterGradient):
            continue
        if block.name not in pairs:
            pairs[block.name] = _new_pair(gradient, inputs, passes.options)
        pairs[block.name].add(gradient, mask)
    return captured.eps


def _new_pair(
    gradient: OuterGradient,
    inputs: dict[tuple[Any, ...], tuple[Tensor, Factor]],
    options: CurvatureOptions,
) -> FactorPair:
    """Factors for a block; layers that read the same tensor share A."""
    a = gradient.a
    key = (a.data_ptr(), a.shape, gradient.ones is None)
    d_out = gradient.delta.shape[-1]
    both = options.sides == "both"
    G = _new_factor(d_out, options, averages=False) if both else IdentityFactor(d_out)
    is_shared = a.numel() > 0 and key in inputs
    if not is_shared:
        inputs[key] = (a, _new_factor(gradient.d_in, options, averages=True))
    return FactorPair(inputs[key][1], G, shares_A=is_shared)


def _new_factor(width: int, options: CurvatureOptions, *, averages: bool) -> Factor:
    if options.approx == "expand" and width <= options.max_factor_dim:
        return ExpandedFactor()
    return ReducedFactor(averages)


def _root(name: str, factor: Factor, options: CurvatureOptions, notes: list[str]) -> Root:
    rank = options.rank
    width = _width(factor)
    if width > options.max_factor_dim and (rank is None or rank >= width):
        rank = CurvatureOptions.rank
        notes.append(f"{name}: rank {rank}, {_too_wide(factor, options)}")
    return factor.root(options.damping, rank)


def _too_wide(factor: Factor, options: CurvatureOptions) -> str:
    return f"its factor of width {_width(factor)} is above max_factor_dim={options.max_factor_dim}"


def _width(factor: Factor) -> int:
    """How many directions it may have; an identity that stands in has none of its own."""
    if isinstance(factor, IdentityFactor):
        return 0
    if isinstance(factor, ReducedFactor):
        return factor.rows[0].shape[-1]
    assert isinstance(factor, ExpandedFactor)
    assert factor.total is not None
    return len(factor.total)


# LoRA's B starts at zero, so A gets no gradient; a zero-initialised head silences a backbone.
_AWAITS = "no gradient reaches it yet"
# Softmax ignores a shift common to all keys, so the δ of a key projection sum to zero.
_CANCELS = (
    "its gradients cancel over positions (kfac_approx='expand' sees them, kfac_sides='inputs' "
    "doesn't need them)"
)


def _not_finite(name: str) -> ProbeError:
    return ProbeError(
        f"The probes gave non-finite factors at {name}.",
        why="the preconditioner would turn every gradient into NaN.",
        way_out="check that the weights are finite and that the model runs in this dtype.",
    )


def _fit_diagonal(passes: _Passes) -> tuple[dict[str, LinearMap], list[str]]:
    """Second moments of per-sample probe gradients, elementwise (AdaDPS)."""
    moments: dict[str, Tensor] = {}
    for inputs in passes.for_factors():
        _add_squares(moments, passes.table, passes.captured(inputs))
    notes = []
    maps: dict[str, LinearMap] = {}
    for name, moment in moments.items():
        mean = float(moment.mean())
        if not torch.isfinite(moment).all():
            raise _not_finite(name)
        if mean == 0.0:
            notes.append(f"{name}: identity, {_AWAITS}")
            maps[name] = ScalarMap()
        else:
            maps[name] = ElementwiseMap((moment / mean + passes.options.damping).rsqrt())
    return maps, notes


def _add_squares(moments: dict[str, Tensor], table: RouteTable, captured: Captured) -> None:
    for block in table:
        if block.form not in (Form.OUTER, Form.DENSE) or _is_vocabulary(block):
            continue
        gradient = captured.gradient(block)
        if gradient is None:
            continue
        squares = _sum_of_squares(gradient)
        moments[block.name] = moments.get(block.name, torch.zeros_like(squares)) + squares


def _sum_of_squares(gradient: PerSampleGradient) -> Tensor:
    """Σ_i g_i∘g_i; the square of a single outer product is the outer product of squares."""
    if isinstance(gradient, OuterGradient) and gradient.delta.shape[1] == gradient.groups == 1:
        delta, a = gradient.delta.squeeze(1), gradient.augmented_a().squeeze(1)
        return delta.double().square().mT @ a.double().square()
    return torch.stack([c.double().square().sum(0) for _, c in gradient.dense_chunks()]).sum(0)


def _is_vocabulary(block: Block) -> bool:
    return block.form is Form.OUTER and block.treatment != "kfac"


def _balanced(maps: Mapping[str, LinearMap], passes: _Passes) -> dict[str, LinearMap]:
    """Each map scaled so that its layer has its share of the probe gradients' mean squared norm.

    Without this a layer's share in the common clip norm would depend on the arbitrary scale of
    its root. Together they keep their mean squared norm; a layer that keeps the identity keeps its
    own.
    """
    sizes = _sizes(maps, passes)
    total = sum(before for before, _ in sizes.values())
    shares = {name: before**passes.options.layer_balance for name, (before, _) in sizes.items()}
    unit = total / sum(shares.values()) if shares else 1.0
    scales = {name: (shares[name] * unit / after) ** 0.5 for name, (_, after) in sizes.items()}
    return {name: linear.scaled(scales.get(name, 1.0)) for name, linear in maps.items()}


def _sizes(maps: Mapping[str, LinearMap], passes: _Passes) -> dict[str, tuple[float, float]]:
    """Mean squared norms of a block's probe gradients, raw and mapped, where there are any."""
    captured = passes.for_balance()
    mapped = {name for name, linear in maps.items() if not isinstance(linear, ScalarMap)}
    moved = Preconditioner(maps).to(passes.device, passes.dtype)
    sizes = {}
    for block in passes.table:
        gradient = captured.gradient(block) if block.name in mapped else None
        if gradient is None:
            continue
        grams: GramCache = {}
        before = float(gradient.sq_norms().double().mean())
        after = float(moved[block.name].sq_norms(gradient, grams).double().mean())
        if before > 0 and after > 0:
            sizes[block.name] = (before, after)
    return sizes
