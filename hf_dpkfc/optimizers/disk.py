"""DiSK's simplified Kalman filter: it sees noisy means and released weights, nothing else.

Reference: Zhang et al., "DiSK: Differentially Private Optimizer with Simplified Kalman Filter for
Noise Reduction", ICLR 2025, Alg. 1:

    ĝ_t = (1 − κ)·ĝ_{t−1} + κ·noisy_mean_t,    d_t = x_{t+1} − x_t,

and ĝ_t is the gradient that the user's own optimizer gets. The pair of gradients behind the noisy
mean is formed in :mod:`hf_dpkfc.mechanism.lookahead`.

Where the authors' code and their formula differ, this is the formula: their code weighs the new
mean with 1 − κ. As in their code, the filter starts at the first noisy mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_dpkfc.mechanism.lookahead import Lookahead


@dataclass
class KalmanFilter:
    """State of DiSK between two steps.

    It stands beside the optimizer: the last update is read off the weights themselves, so it
    works with any optimizer, learning-rate schedule and weight decay.

    Attributes:
        kappa: κ, the weight of a new noisy mean.
        gamma: γ, how far the look-ahead goes along the last update.
        estimate: ĝ_{t−1}, by parameter name; empty before the first step.
        previous: x_{t−1}, the weights before the last update.
    """

    kappa: float
    gamma: float
    estimate: Mapping[str, Tensor] = field(default_factory=dict)
    previous: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def weight(self) -> float:
        """The look-ahead gradient's share, w."""
        return lookahead_weight(self.kappa, self.gamma)

    def lookahead(self, weights: Mapping[str, Tensor]) -> Lookahead | None:
        """x_t + γ(x_t − x_{t−1}); None where one gradient is enough (first step, or w = 0).

        Args:
            weights: x_t, the parameters that train.
        """
        if not self.previous or self.weight == 0:
            return None
        point = {
            name: torch.add(x.detach(), x.detach() - self.previous[name], alpha=self.gamma)
            for name, x in weights.items()
        }
        return Lookahead(self.weight, point)

    @torch.no_grad()
    def update(
        self, noisy_mean: Mapping[str, Tensor], weights: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """ĝ_t, and remember x_t for the next step's displacement.

        Args:
            noisy_mean: The step's release.
            weights: x_t, before the optimizer's step.
        """
        self.estimate = {
            name: torch.lerp(self.estimate[name], mean, self.kappa) if self.estimate else mean
            for name, mean in noisy_mean.items()
        }
        self.previous = {name: x.detach().clone() for name, x in weights.items()}
        # Copies: an optimizer may do as it likes with its gradients.
        return {name: value.clone() for name, value in self.estimate.items()}

    def determinants(self) -> Iterator[tuple[str, Tensor]]:
        """What the next query depends on through the filter; ĝ shows one step later, in x."""
        yield "kappa gamma", torch.tensor([self.kappa, self.gamma], dtype=torch.float64)
        yield from sorted(self.previous.items())

    def save(self, path: Path) -> None:
        """Into a checkpoint; noisy means and released weights, so nothing private."""
        tensors = {f"estimate.{name}": value for name, value in self.estimate.items()}
        tensors |= {f"previous.{name}": value for name, value in self.previous.items()}
        save_file({name: value.contiguous() for name, value in tensors.items()}, path)

    def restore(self, path: Path, device: torch.device) -> None:
        """Bit for bit as it was saved."""
        tensors = load_file(path, device=str(device))
        self.estimate = _below("estimate.", tensors)
        self.previous = _below("previous.", tensors)


def lookahead_weight(kappa: float, gamma: float) -> float:
    """The share w = (1 − κ)/(κγ) of the gradient at the look-ahead point.

    γ = (1 − κ)/κ gives 1 whatever its rounding: then the look-ahead gradient is all that's needed.
    """
    weight = (1 - kappa) / (kappa * gamma)
    return 1.0 if math.isclose(weight, 1.0) else weight


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
