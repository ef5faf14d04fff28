"""The preconditioned clipped sum, and the sensitivity that it is born with (Alg. 2).

Guarantees, each with a test of the same name:
- adding or removing one example moves the sum by at most its ``sensitivity``;
- a non-finite example contributes exactly zero and leaves the others unchanged;
- an empty batch gives zeros;
- micro-batches add up to the same sum as one batch;
- norms and sums are float32 at least, whatever the model's dtype, TF32 or autocast say.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from hf_dpkfc.curvature.preconditioner import GramCache, Preconditioner
from hf_dpkfc.errors import ConfigurationError, UnsupportedLayerError
from hf_dpkfc.layers.capture import Captured, PerExampleLoss, capture
from hf_dpkfc.layers.gradients import PerSampleGradient, compacted
from hf_dpkfc.layers.layout import accumulation_dtype, full_precision
from hf_dpkfc.layers.routes import Block, RouteTable
from hf_dpkfc.mechanism.lookahead import Lookahead

# Beyond it the first-order estimate of rounding no longer proves anything.
MAX_MARGIN = 0.5


@dataclass(frozen=True)
class UnsafeStatistics:
    """Un-noised facts about a batch. Not covered by the guarantee: for debugging on public data."""

    num_examples: int = 0
    num_clipped: int = 0
    total_loss: float = 0.0

    def __add__(self, other: UnsafeStatistics) -> UnsafeStatistics:
        return UnsafeStatistics(
            self.num_examples + other.num_examples,
            self.num_clipped + other.num_clipped,
            self.total_loss + other.total_loss,
        )


@dataclass(frozen=True)
class ClippedSum:
    """Σ_i clip_C(U g_i), by parameter name, together with its sensitivity C.

    A private quantity: it may only be passed on to :func:`hf_dpkfc.mechanism.noise.privatize`.
    """

    values: Mapping[str, Tensor]
    sensitivity: float
    unsafe: UnsafeStatistics = UnsafeStatistics()

    def __add__(self, other: ClippedSum) -> ClippedSum:
        if other.sensitivity != self.sensitivity:
            raise ConfigurationError(
                f"Sums of sensitivity {self.sensitivity} and {other.sensitivity} were added.",
                why="the noise is scaled to one clip norm.",
                way_out="clip all micro-batches of a step to the same norm.",
            )
        total = {name: value + other.values[name] for name, value in self.values.items()}
        return replace(self, values=total, unsafe=self.unsafe + other.unsafe)


@dataclass(frozen=True)
class Clipper:
    """Sums of clipped, preconditioned per-sample gradients of one model.

    Attributes:
        model: Unwrapped: no DDP around it.
        table: Its routes, all covered.
        preconditioner: Made without private data; on the model's device.
        per_example_loss: (model, inputs) -> [batch].
        clip_norm: C, the sensitivity of every sum.
    """

    model: nn.Module
    table: RouteTable
    preconditioner: Preconditioner
    per_example_loss: PerExampleLoss
    clip_norm: float

    def __post_init__(self) -> None:
        if not 0 < self.clip_norm < float("inf"):
            raise ConfigurationError(
                f"clip_norm={self.clip_norm}.",
                why="noise is scaled to it: without a positive, finite bound there is no "
                "guarantee.",
                way_out="choose clip_norm > 0, for instance 1.0.",
            )
        self.table.require_covered()

    @cached_property
    def margin(self) -> float:
        """Share of C kept free, so that rounding can't carry an example over it.

        2^10 ulp for norms above the cancellation floor (gradients.cancellation_floor), and 16
        ulp times the preconditioner's condition number for applying roots to vectors and to the
        sum.
        """
        eps = torch.finfo(self._dtype).eps
        return (2.0**10 + 16 * self.preconditioner.condition()) * eps

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def _dtype(self) -> torch.dtype:
        return accumulation_dtype(next(self.model.parameters()).dtype)

    def bound(self, lookahead: Lookahead | None = None) -> float:
        """C less the margin, which grows with the rounding of a pair of gradients."""
        margin = self.margin * (1.0 if lookahead is None else lookahead.amplification)
        if margin > MAX_MARGIN:
            raise ConfigurationError(
                f"The preconditioner's condition number is {self.preconditioner.condition():.2g}.",
                why=f"in {self._dtype}, rounding could carry an example beyond its clip norm.",
                way_out="raise damping (1.0 is the default), or train in float64.",
            )
        return self.clip_norm * (1 - margin)

    def sum_of(
        self,
        micro_batches: Iterable[tuple[Mapping[str, Any], int]],
        lookahead: Lookahead | None = None,
    ) -> ClippedSum:
        """The clipped sum over one logical batch.

        Args:
            micro_batches: Model inputs and number of examples of each; may be empty.
            lookahead: DiSK's second point; None for gradients at the present weights.
        """
        evaluate = capture if lookahead is None else lookahead.capture
        bound = self.bound(lookahead)
        totals: dict[str, Tensor] = {}
        unsafe = UnsafeStatistics()
        for inputs, size in micro_batches:
            if size > 0:
                # Without a name here: the pass must be gone before the next one is made.
                unsafe += self._accumulate(
                    totals,
                    evaluate(self.model, self.table, self.per_example_loss, inputs, size),
                    bound,
                )
        with full_precision(self._device):
            return ClippedSum(self._preconditioned(totals), self.clip_norm, unsafe)

    def _accumulate(
        self, totals: dict[str, Tensor], captured: Captured, bound: float
    ) -> UnsafeStatistics:
        """Add one micro-batch's weighted gradients, not yet preconditioned, by block name."""
        with full_precision(self._device):
            gradients = self._gradients(captured)
            weights, broken = self._clip_weights(captured, gradients, bound)
            for block, gradient in gradients:
                clean = gradient.without(broken) if broken.any() else gradient
                part = clean.weighted_sum(weights)
                totals[block.name] = totals[block.name].add_(part) if block.name in totals else part
        size = captured.batch_size
        return UnsafeStatistics(size, int((weights < 1).sum()), float(captured.losses.sum()))

    def _gradients(self, captured: Captured) -> list[tuple[Block, PerSampleGradient]]:
        pairs = ((block, captured.gradient(block)) for block in self.table)
        return [(block, compacted(gradient)) for block, gradient in pairs if gradient is not None]

    def _clip_weights(
        self,
        captured: Captured,
        gradients: list[tuple[Block, PerSampleGradient]],
        bound: float,
    ) -> tuple[Tensor, Tensor]:
        """min(1, C/‖U g_i‖) for each example, and which ones aren't finite."""
        grams: GramCache = {}
        sq_norms = captured.losses.new_zeros(captured.batch_size, dtype=self._dtype)
        for block, gradient in gradients:
            part = self.preconditioner[block.name].sq_norms(gradient, grams)
            if part.shape != sq_norms.shape:
                raise _not_by_example(block, tuple(part.shape), captured.batch_size)
            sq_norms = sq_norms + part
        broken = ~(torch.isfinite(sq_norms) & torch.isfinite(captured.losses))
        weights = (bound / sq_norms.sqrt()).clamp(max=1.0)
        return weights.masked_fill(broken, 0.0), broken

    def _preconditioned(self, totals: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """U applied once, to the sum: Σ c_i U g_i = U Σ c_i g_i."""
        values: dict[str, Tensor] = {}
        for block in self.table:
            if block.name in totals:
                moved = self.preconditioner[block.name].apply(totals[block.name])
                values |= block.split(moved)
            else:
                values |= {
                    name: torch.zeros(shape, dtype=self._dtype, device=self._device)
                    for name, shape in block.parameters.items()
                }
        return values


def _not_by_example(block: Block, shape: tuple[int, ...], batch_size: int) -> UnsupportedLayerError:
    return UnsupportedLayerError(
        f"{block.name} has norms of shape {shape} in a batch of {batch_size}.",
        why="each example must have one norm: parts that are clipped one by one add up to more "
        "than C.",
        way_out="freeze it with requires_grad_(False), or register a rule with "
        "opacus.grad_sample.register_grad_sampler that gives one gradient per row.",
    )
