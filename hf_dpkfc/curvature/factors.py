"""Kronecker factors A and G of every K-FAC block, from captured probes (Alg. 1).

*Reduce*: each example is one row, the mean of its a and the sum of its δ over positions.
*Expand*: each position is its own row (Eschenhagen et al. 2023). The paper's formula is the latter
under the former's name; here both have their right names. Masked positions are in neither.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from hf_dpkfc.curvature.roots import Root, identity_root, root_of_covariance, root_of_rows
from hf_dpkfc.layers.gradients import OuterGradient


class Factor(Protocol):
    """One covariance factor in the making."""

    def add(self, x: Tensor, mask: Tensor) -> None:
        """Count in x [n, position, feature]; mask [n, position, 1] is 0 where nothing stands."""
        ...

    def trace(self) -> float:
        """Its trace."""
        ...

    def signal(self) -> float:
        """Root of its trace relative to the sizes of what was summed into its rows.

        0 where nothing arrived, and rounding error where the terms of each sum cancel: the δ of a
        key projection add up to zero over positions, since softmax ignores a common shift.
        """
        ...

    def covariance(self) -> Tensor:
        """C, [d, d] in float64."""
        ...

    def root(self, damping: float, rank: int | None) -> Root:
        """The damped inverse square root of C."""
        ...


@dataclass
class ReducedFactor:
    """One row per example; the factor stays thin and no d×d matrix is formed.

    Attributes:
        averages: Rows are means over positions (a), not sums (δ).
    """

    averages: bool
    rows: list[Tensor] = field(default_factory=list)
    size: float = 0.0

    def add(self, x: Tensor, mask: Tensor) -> None:
        """Count in one row per example."""
        count = mask.sum(1).clamp(min=1) if self.averages else torch.ones_like(mask[:, 0])
        self.rows.append((x * mask).sum(1) / count)
        sizes = (x.norm(dim=2, keepdim=True) * mask).sum(1) / count
        self.size += float(sizes.double().square().sum())

    def trace(self) -> float:
        """Its trace."""
        return sum(float(r.double().square().sum()) for r in self.rows) / self._count()

    def signal(self) -> float:
        """‖Σ_t x_t‖ against Σ_t ‖x_t‖, in the root mean square."""
        return (self.trace() * self._count() / self.size) ** 0.5 if self.size else 0.0

    def covariance(self) -> Tensor:
        """C = XᵀX/n."""
        X = torch.cat(self.rows).double().cpu()
        return X.mT @ X / len(X)

    def root(self, damping: float, rank: int | None) -> Root:
        """From the n×n Gram matrix where that is the smaller one."""
        return root_of_rows(torch.cat(self.rows), damping, rank)

    def _count(self) -> int:
        return max(1, sum(len(r) for r in self.rows))


@dataclass
class ExpandedFactor:
    """One row per unmasked position, summed into a d×d covariance as they come."""

    total: Tensor | None = None
    count: float = 0.0

    def add(self, x: Tensor, mask: Tensor) -> None:
        """Count in one row per position."""
        rows = (x * mask).flatten(0, 1)
        outer = (rows.mT @ rows).double()
        self.total = outer if self.total is None else self.total.add_(outer)
        self.count += float(mask.sum())

    def trace(self) -> float:
        """Its trace."""
        return 0.0 if self.total is None else float(self.total.diagonal().sum()) / self.count

    def signal(self) -> float:
        """Rows aren't summed before they are squared, so nothing cancels."""
        return float(self.trace() > 0)

    def covariance(self) -> Tensor:
        """C = XᵀX/n."""
        assert self.total is not None
        return self.total / self.count

    def root(self, damping: float, rank: int | None) -> Root:
        """From the covariance."""
        return root_of_covariance(self.covariance(), damping, rank)


@dataclass
class IdentityFactor:
    """Stands for a side that keeps its geometry; it only knows whether anything arrived.

    Attributes:
        width: Of the side.
    """

    width: int
    size: float = 0.0

    def add(self, x: Tensor, mask: Tensor) -> None:
        """Count in nothing but its size."""
        self.size += float((x * mask).double().square().sum())

    def trace(self) -> float:
        """That of the identity."""
        return float(self.width) if math.isfinite(self.size) else math.nan

    def signal(self) -> float:
        """Nothing is summed, so nothing cancels."""
        return float(self.size > 0)

    def covariance(self) -> Tensor:
        """The identity."""
        return torch.eye(self.width, dtype=torch.float64)

    def root(self, damping: float, rank: int | None) -> Root:
        """The identity: balance would undo any scale."""
        return identity_root(self.width)


@dataclass
class FactorPair:
    """A and G of one block; A may be another block's where both read the same tensor."""

    A: Factor
    G: Factor
    shares_A: bool = False

    def add(self, gradient: OuterGradient, mask: Tensor | None) -> None:
        """Count in the positions of one captured batch."""
        weights = position_weights(gradient, mask)
        if not self.shares_A:
            self.A.add(gradient.augmented_a(), weights)
        self.G.add(gradient.delta, weights)


def position_weights(gradient: OuterGradient, mask: Tensor | None) -> Tensor:
    """[batch·groups, position, 1]: the attention mask where positions are tokens, else ones."""
    rows, positions = gradient.delta.shape[:2]
    mask = None if mask is None else mask.flatten(1)  # several choices are one example's positions
    if mask is None or positions % mask.shape[1]:
        return gradient.delta.new_ones(rows, positions, 1)
    # A layer that is called several times has its calls' positions one after the other.
    calls = positions // mask.shape[1]
    weights = mask.to(gradient.delta.dtype).repeat(1, calls).unsqueeze(-1)
    return weights.repeat_interleave(gradient.groups, dim=0)
