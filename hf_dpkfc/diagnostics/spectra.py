"""Eigenvalues of A, G and of their Kronecker product, which is never formed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hf_dpkfc.curvature.factors import Factor, FactorPair, IdentityFactor, ReducedFactor
from hf_dpkfc.curvature.fit import Factors


def eigenvalues(factor: Factor) -> Tensor:
    """All d eigenvalues in descending order, float64; through the n×n Gram matrix where n < d.

    Directions that no probe spans have eigenvalue exactly zero.
    """
    if isinstance(factor, IdentityFactor):
        return torch.ones(factor.width, dtype=torch.float64)
    if not isinstance(factor, ReducedFactor):
        return torch.linalg.eigvalsh(factor.covariance().cpu()).flip(0).clamp(min=0)
    X = torch.cat(factor.rows).double().cpu()
    n, d = X.shape
    gram = X @ X.mT / n if n < d else X.mT @ X / n
    values = torch.linalg.eigvalsh(gram).flip(0).clamp(min=0)
    return torch.cat([values, values.new_zeros(d - len(values))])


def kronecker_eigenvalues(of_A: Tensor, of_G: Tensor) -> Tensor:
    """Eigenvalues of A ⊗ G in descending order: all products of one of A's and one of G's."""
    return torch.outer(of_A, of_G).flatten().sort(descending=True).values


@dataclass(frozen=True)
class Spectrum:
    """A factor's eigenvalues, descending, and what they mean for its inverse root.

    Attributes:
        values: Eigenvalues, [d].
        damping: As in the preconditioner, relative to the mean eigenvalue.
    """

    values: Tensor
    damping: float

    @cached_property
    def mean(self) -> float:
        """The mean eigenvalue c̄, to which damping is relative."""
        return float(self.values.mean())

    @property
    def effective_rank(self) -> float:
        """Exponential of the entropy of the normalised eigenvalues (Roy & Vetterli 2007)."""
        shares = self.values / self.values.sum()
        return math.exp(-float(torch.xlogy(shares, shares).sum()))

    @property
    def condition_number(self) -> float:
        """Of the damped factor C/c̄ + damping·I: 1 means that the root only rescales."""
        largest, smallest = float(self.values[0]), float(self.values[-1])
        return (largest / self.mean + self.damping) / (smallest / self.mean + self.damping)

    @property
    def damping_over_largest(self) -> float:
        """damping·c̄/λ_max: far above 1 the factor is drowned, far below 1 damping is idle."""
        return self.damping * self.mean / float(self.values[0])


@dataclass(frozen=True)
class LayerSpectra:
    """The spectra of one block's factors."""

    name: str
    A: Spectrum
    G: Spectrum

    @property
    def F(self) -> Tensor:
        """Eigenvalues of A ⊗ G, descending."""
        return kronecker_eigenvalues(self.A.values, self.G.values)


def layer_spectra(factors: Factors, damping: float) -> tuple[list[LayerSpectra], list[str]]:
    """Spectra of every block with usable factors, and a note for each block without.

    Args:
        factors: From :func:`hf_dpkfc.curvature.fit.estimate_factors`.
        damping: The preconditioner's.
    """
    spectra, notes = [], []
    shared: dict[int, Tensor] = {}
    for name, pair in factors.pairs.items():
        reason = factors.why_without(name)
        if reason is not None:
            notes.append(f"{name}: no spectrum, {reason}")
        else:
            spectra.append(_of_pair(name, pair, damping, shared))
    return spectra, notes


def _of_pair(
    name: str, pair: FactorPair, damping: float, shared: dict[int, Tensor]
) -> LayerSpectra:
    """Query, key and value read one tensor: their common A is decomposed once."""
    if id(pair.A) not in shared:
        shared[id(pair.A)] = eigenvalues(pair.A)
    return LayerSpectra(
        name, Spectrum(shared[id(pair.A)], damping), Spectrum(eigenvalues(pair.G), damping)
    )


def thinned(values: Tensor, count: int) -> list[tuple[int, float]]:
    """At most ``count`` (rank, eigenvalue) pairs, ranks from 1 spaced evenly in the logarithm."""
    ranks = torch.logspace(0, math.log10(len(values)), count, dtype=torch.float64).round().long()
    return [(int(r), float(values[r - 1])) for r in ranks.unique()]
