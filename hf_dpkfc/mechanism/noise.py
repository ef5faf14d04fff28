"""The Gaussian mechanism: the only place that draws noise."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from hf_dpkfc.mechanism.clipping import ClippedSum
from hf_dpkfc.mechanism.randomness import StepRandomness


def privatize(
    clipped_sum: ClippedSum,
    noise_multiplier: float,
    expected_batch_size: float,
    randomness: StepRandomness,
) -> dict[str, Tensor]:
    """(Σ_i clip_C(U g_i) + N(0, σ²C²·I)) / B, by parameter name.

    Guarantees: every coordinate gets its own draw of standard deviation σ·C; one call draws each
    step's noise once and whole. What is returned may be logged, saved and released.

    Args:
        clipped_sum: The sum over the whole logical batch, over all processes.
        noise_multiplier: σ.
        expected_batch_size: B, the public constant.
        randomness: The step's secret stream.
    """
    noise = _gaussian(clipped_sum.values, randomness)
    standard_deviation = noise_multiplier * clipped_sum.sensitivity
    noisy_mean: dict[str, Tensor] = {}
    for name, value in clipped_sum.values.items():
        # In place on the fresh noise, which is as large as the model, and in its precision: what
        # is finer than the sum's is rounded once, at the end.
        noisy_sum = noise[name].to(value.device).mul_(standard_deviation).add_(value)
        # Divide by the public constant, not by the batch: the size of a Poisson draw is private.
        noisy_mean[name] = noisy_sum.div_(expected_batch_size).to(value.dtype)
    return noisy_mean


def _gaussian(like: Mapping[str, Tensor], randomness: StepRandomness) -> dict[str, Tensor]:
    """Standard normals in the shapes of a dictionary, in the order of its names.

    As fine as its finest sums: coarser noise would leave their low bits bare.
    """
    names = sorted(like)
    sizes = [math.prod(like[name].shape) for name in names]
    is_fine = any(value.dtype == torch.float64 for value in like.values())
    numbers = randomness.stream("noise").normal(sum(sizes), np.float64 if is_fine else np.float32)
    drawn = torch.from_numpy(numbers).split(sizes)
    return {n: part.view(like[n].shape) for n, part in zip(names, drawn, strict=True)}
