"""Signal against noise, layer by layer, in the space in which gradients are clipped and noised.

The noise has the same standard deviation σ·C/B on every coordinate of the noisy mean, so a layer's
noise norm is that times √d, whatever the preconditioner. What differs is how much of the clip norm
its signal gets.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_dpkfc.curvature.fit import inputs_like, probing
from hf_dpkfc.curvature.preconditioner import GramCache, Preconditioner
from hf_dpkfc.curvature.probes import Probe
from hf_dpkfc.layers.capture import Captured, PerExampleLoss, capture
from hf_dpkfc.layers.layout import accumulation_dtype
from hf_dpkfc.layers.routes import Block, RouteTable, inspect_model
from hf_dpkfc.losses import TaskLoss, task_of


@dataclass(frozen=True)
class LayerSignal:
    """What one block's clipped, preconditioned gradients ĝ_i look like over a sample.

    Attributes:
        name: Of the block.
        num_parameters: d.
        mean_norm: ‖E ĝ_i‖, what survives averaging.
        rms_norm: √E‖ĝ_i‖², what one example brings; labels drawn at random don't cancel in it.
        share: Mean share of the block in ‖U g_i‖², what clipping looks at.
    """

    name: str
    num_parameters: int
    mean_norm: float
    rms_norm: float
    share: float

    def snr(self, noise_std: float) -> float:
        """‖E ĝ_i‖ against the norm of the noise."""
        return self.mean_norm / (noise_std * math.sqrt(self.num_parameters))

    def snr_per_example(self, noise_std: float) -> float:
        """√E‖ĝ_i‖² against the norm of the noise: the measure for probes with random labels."""
        return self.rms_norm / (noise_std * math.sqrt(self.num_parameters))


def probe_signals(
    model: nn.Module,
    probe: Probe,
    preconditioner: Preconditioner,
    clip_norm: float,
    *,
    num_batches: int = 2,
    batch_size: int = 64,
    seed: int = 0,
    per_example_loss: PerExampleLoss | None = None,
    table: RouteTable | None = None,
) -> list[LayerSignal]:
    """Signals on probes: free of private data where the probe is."""
    generator = torch.Generator().manual_seed(seed)
    batches = probe.batches(num_batches, batch_size, generator)
    return _signals(model, batches, preconditioner, clip_norm, per_example_loss, table)


def unsafe_signals(
    model: nn.Module,
    private_batches: Iterable[Mapping[str, Any]],
    preconditioner: Preconditioner,
    clip_norm: float,
    *,
    per_example_loss: PerExampleLoss | None = None,
    table: RouteTable | None = None,
) -> list[LayerSignal]:
    """Signals on private records, un-noised: not covered by any guarantee."""
    return _signals(model, private_batches, preconditioner, clip_norm, per_example_loss, table)


@dataclass
class _Sums:
    """Running sums of one block over a sample."""

    total: Tensor | None = None
    squares: float = 0.0
    shares: float = 0.0

    def signal(self, block: Block, count: int) -> LayerSignal:
        """The means over that many examples."""
        return LayerSignal(
            block.name,
            sum(math.prod(shape) for shape in block.parameters.values()),
            0.0 if self.total is None else float(self.total.norm()) / count,
            math.sqrt(self.squares / count),
            self.shares / count,
        )


def _signals(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    preconditioner: Preconditioner,
    clip_norm: float,
    per_example_loss: PerExampleLoss | None,
    table: RouteTable | None,
) -> list[LayerSignal]:
    table = (table or inspect_model(model)).require_covered()
    loss = per_example_loss or TaskLoss(task_of(model))
    sums = {block.name: _Sums() for block in table}
    count = 0
    with probing(model):
        for batch in batches:
            inputs = inputs_like(model, batch)
            size = len(next(iter(inputs.values())))
            captured = capture(model, table, loss, inputs, size)
            _accumulate(sums, captured, table, preconditioner, clip_norm)
            del captured  # it is large: gone before the next one is made
            count += size
    return [sums[block.name].signal(block, count) for block in table]


def _accumulate(
    sums: Mapping[str, _Sums],
    captured: Captured,
    table: RouteTable,
    preconditioner: Preconditioner,
    clip_norm: float,
) -> None:
    """Add one batch's clipped gradients, block by block."""
    pairs = ((block, captured.gradient(block)) for block in table)
    gradients = [(block, gradient) for block, gradient in pairs if gradient is not None]
    grams: GramCache = {}
    dtype = accumulation_dtype(captured.losses.dtype)
    sq_norms = {
        block.name: preconditioner[block.name].sq_norms(gradient, grams).to(dtype)
        for block, gradient in gradients
    }
    whole = torch.stack(list(sq_norms.values())).sum(0).clamp(min=torch.finfo(dtype).tiny)
    weights = (clip_norm / whole.sqrt()).clamp(max=1.0)
    for block, gradient in gradients:
        mine, squared = sums[block.name], sq_norms[block.name]
        part = preconditioner[block.name].apply(gradient.weighted_sum(weights)).double()
        mine.total = part if mine.total is None else mine.total + part
        mine.squares += float((squared * weights.square()).double().sum())
        mine.shares += float((squared / whole).double().sum())
