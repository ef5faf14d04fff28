"""How much two sources of factors agree: cosine and relative Frobenius error of A, G and A ⊗ G.

Sources are only comparable at the same weights: estimate both on one model, one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_dpkfc.curvature.factors import Factor, IdentityFactor, ReducedFactor
from hf_dpkfc.curvature.fit import CurvatureOptions, Factors, estimate_factors
from hf_dpkfc.curvature.probes import PublicDataProbe


@dataclass(frozen=True)
class Agreement:
    """Of an estimate with a reference.

    Attributes:
        cosine: ⟨C*, C⟩/(‖C*‖‖C‖): direction, whatever the scale.
        relative_error: ‖C* − C‖/‖C*‖: direction and scale.
    """

    cosine: float
    relative_error: float


@dataclass(frozen=True)
class LayerAlignment:
    """Agreement of one block's factors and of their Kronecker product F."""

    name: str
    A: Agreement
    G: Agreement
    F: Agreement


def inner(one: Factor, other: Factor) -> float:
    """⟨C₁, C₂⟩ = tr(C₁C₂); from rows where both are thin, so that no d×d matrix is formed."""
    if isinstance(one, IdentityFactor):
        return other.trace()
    if isinstance(one, ReducedFactor) and isinstance(other, ReducedFactor):
        X, Y = (torch.cat(factor.rows).double().cpu() for factor in (one, other))
        if max(len(X), len(Y)) < X.shape[1]:
            return float((X @ Y.mT).square().sum()) / (len(X) * len(Y))
    return float((one.covariance().cpu() * other.covariance().cpu()).sum())


def agreement(reference_sq: float, estimate_sq: float, cross: float) -> Agreement:
    """From ‖C*‖², ‖C‖² and ⟨C*, C⟩."""
    difference_sq = max(0.0, reference_sq + estimate_sq - 2 * cross)
    return Agreement(
        cross / math.sqrt(reference_sq * estimate_sq), math.sqrt(difference_sq / reference_sq)
    )


def align(reference: Factors, estimate: Factors) -> tuple[list[LayerAlignment], list[str]]:
    """Agreement of every block that has usable factors in both, and a note for each other block.

    For F = A ⊗ G all three inner products are products of A's and G's, so F isn't formed.
    """
    layers, notes = [], []
    for name, pair in reference.pairs.items():
        reason = _why_incomparable(name, reference, estimate)
        if reason is not None:
            notes.append(f"{name}: no alignment, {reason}")
            continue
        other = estimate.pairs[name]
        products = [
            (inner(mine, mine), inner(theirs, theirs), inner(mine, theirs))
            for mine, theirs in ((pair.A, other.A), (pair.G, other.G))
        ]
        of_F = [a * g for a, g in zip(*products, strict=True)]
        of_A, of_G = (agreement(*product) for product in products)
        layers.append(LayerAlignment(name, of_A, of_G, agreement(*of_F)))
    return layers, notes


def _why_incomparable(name: str, reference: Factors, estimate: Factors) -> str | None:
    if name not in estimate.pairs:
        return "the other source doesn't reach it"
    return reference.why_without(name) or estimate.why_without(name)


def unsafe_oracle_factors(
    model: nn.Module,
    private_records: Sequence[Any],
    collate: Callable[[list[Any]], Mapping[str, Tensor]],
    options: CurvatureOptions | None = None,
    *,
    seed: int = 0,
) -> Factors:
    """The factors of private records with their own labels, un-noised.

    Not covered by any guarantee: for studies on data that may be shown.
    """
    return estimate_factors(model, PublicDataProbe(private_records, collate), options, seed=seed)
