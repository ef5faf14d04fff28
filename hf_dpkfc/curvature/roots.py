"""Damped inverse square roots U = (C/c̄ + damping·I)^-1/2 of covariance factors, c̄ = trace(C)/d.

Damping is relative to the mean eigenvalue, so it means the same for every layer and the scale of
the loss drops out. All decompositions are in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

# Above this width the top of an explicit covariance is found by subspace iteration: a full
# eigenproblem of a 3072-wide factor costs many training steps.
MAX_EXACT_EIGENPROBLEM = 1024
SUBSPACE_OVERSAMPLING = 16
SUBSPACE_ITERATIONS = 6


class Root(Protocol):
    """A symmetric positive map on one side of a gradient."""

    @property
    def dim(self) -> int:
        """Width of the side."""
        ...

    def apply(self, x: Tensor) -> Tensor:
        """X U for x of shape [..., dim]."""
        ...

    def apply_split(self, main: Tensor, ones: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The same for [main, ones] kept apart, so that no bias column must be appended."""
        ...

    def eigenvalue_range(self) -> tuple[float, float]:
        """Smallest and largest eigenvalue of U."""
        ...

    def to(self, device: torch.device, dtype: torch.dtype) -> Root:
        """The same map for other tensors."""
        ...

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What it is made of, by name."""
        ...


@dataclass(frozen=True)
class LowRankRoot:
    """U = s·I + Q (R − s·I) Qᵀ: exact where few probes span the factor, else its best rank-k form.

    Attributes:
        s: Eigenvalue of U on the complement of Q.
        basis: Q, orthonormal [dim, rank].
        values: Diagonal of R, the eigenvalues of U on Q.
    """

    s: float
    basis: Tensor
    values: Tensor

    @property
    def dim(self) -> int:
        """Width of the side."""
        return len(self.basis)

    def apply(self, x: Tensor) -> Tensor:
        """X U for x of shape [..., dim]."""
        return self.apply_split(x, None)[0]

    def apply_split(self, main: Tensor, ones: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """s·v + ((vQ)(R − s))Qᵀ.

        Forming the vector loses at most s/min(R) in relative precision. The norm's short form,
        s²vvᵀ + (vQ)(R² − s²)(vQ)ᵀ, would lose the square of that.
        """
        width = main.shape[-1]
        basis = self.basis[:width]
        coordinates = main.reshape(-1, width) @ basis
        if ones is not None:
            coordinates.addmm_(ones.reshape(-1, 1), self.basis[width:])
        coordinates.mul_(self.values - self.s)
        moved = torch.addmm(main.reshape(-1, width), coordinates, basis.mT, beta=self.s)
        if ones is None:
            return moved.view(main.shape), None
        moved_ones = torch.addmm(
            ones.reshape(-1, 1), coordinates, self.basis[width:].mT, beta=self.s
        )
        return moved.view(main.shape), moved_ones.view(ones.shape)

    def eigenvalue_range(self) -> tuple[float, float]:
        """Smallest and largest eigenvalue of U."""
        values = self.values.tolist() + ([self.s] if self.basis.shape[1] < self.dim else [])
        return min(values), max(values)

    def to(self, device: torch.device, dtype: torch.dtype) -> LowRankRoot:
        """The same map for other tensors."""
        return LowRankRoot(
            self.s, self.basis.to(device, dtype).contiguous(), self.values.to(device, dtype)
        )

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What it is made of, by name."""
        yield "s", torch.tensor(self.s, dtype=torch.float64)
        yield "basis", self.basis
        yield "values", self.values


@dataclass(frozen=True)
class DenseRoot:
    """U as an explicit symmetric matrix, where its rank leaves nothing to save.

    Attributes:
        matrix: U.
        extremes: Its smallest and largest eigenvalue.
    """

    matrix: Tensor
    extremes: tuple[float, float]

    @property
    def dim(self) -> int:
        """Width of the side."""
        return len(self.matrix)

    def apply(self, x: Tensor) -> Tensor:
        """X U for x of shape [..., dim]."""
        return x @ self.matrix

    def apply_split(self, main: Tensor, ones: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """[main, ones] U in two parts."""
        if ones is None:
            return self.apply(main), None
        width = main.shape[-1]
        moved = main @ self.matrix[:width, :width] + ones * self.matrix[width, :width]
        moved_ones = main @ self.matrix[:width, width:] + ones * self.matrix[width, width]
        return moved, moved_ones

    def eigenvalue_range(self) -> tuple[float, float]:
        """Smallest and largest eigenvalue of U."""
        return self.extremes

    def to(self, device: torch.device, dtype: torch.dtype) -> DenseRoot:
        """The same map for other tensors."""
        return DenseRoot(self.matrix.to(device, dtype), self.extremes)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What it is made of, by name."""
        yield "matrix", self.matrix
        yield "extremes", torch.tensor(self.extremes, dtype=torch.float64)


def identity_root(dim: int) -> LowRankRoot:
    """The map that changes nothing."""
    empty = torch.zeros(dim, 0, dtype=torch.float64)
    return LowRankRoot(1.0, empty, empty[0])


def root_of_rows(rows: Tensor, damping: float, rank: int | None) -> Root:
    """The root of C = XᵀX/n for n rows X; through the n×n Gram matrix where n < d.

    Args:
        rows: X, [n, d].
        damping: Relative to the mean eigenvalue of C.
        rank: Eigendirections kept; all, which is exact, for None and from min(n, d) on.
    """
    X = rows.double().cpu()
    n, d = X.shape
    if n >= d:
        return root_of_covariance(X.mT @ X / n, damping, rank)
    eigenvalues, V = torch.linalg.eigh(X @ X.mT / n)
    eigenvalues, V = _significant(eigenvalues, V)
    Q = X.mT @ V / (n * eigenvalues).sqrt()
    return _assemble(eigenvalues, Q, float(X.square().sum() / n), damping, rank)


def root_of_covariance(C: Tensor, damping: float, rank: int | None) -> Root:
    """The root of an explicit covariance C, [d, d]."""
    C = C.double().cpu()
    trace = float(C.diagonal().sum())
    if rank is not None and rank < len(C) and len(C) > MAX_EXACT_EIGENPROBLEM:
        eigenvalues, Q = _top_eigenpairs(C, rank)
    else:
        eigenvalues, Q = torch.linalg.eigh(C)
    return _assemble(*_significant(eigenvalues, Q), trace, damping, rank)


def _significant(eigenvalues: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Without the directions that are only rounding error."""
    floor = eigenvalues[-1] * len(eigenvalues) * torch.finfo(eigenvalues.dtype).eps
    keep = eigenvalues > floor
    return eigenvalues[keep], vectors[:, keep]


def _assemble(
    eigenvalues: Tensor, Q: Tensor, trace: float, damping: float, rank: int | None
) -> Root:
    """U from ascending eigenpairs; what isn't kept is replaced by its mean eigenvalue."""
    d = len(Q)
    kept = len(eigenvalues) if rank is None or rank >= d else min(rank, len(eigenvalues))
    top, Q = eigenvalues[-kept:], Q[:, -kept:]
    mean = trace / d
    residual = max(0.0, trace - float(top.sum())) / max(1, d - kept)
    s = (residual / mean + damping) ** -0.5
    root = LowRankRoot(s, Q, (top / mean + damping).rsqrt())
    # Applying the factored form costs 4·d·k per vector, the dense one 2·d².
    return _dense(root) if 2 * kept > d else root


def _dense(root: LowRankRoot) -> DenseRoot:
    matrix = (root.basis * (root.values - root.s)) @ root.basis.mT
    matrix.diagonal().add_(root.s)
    return DenseRoot(matrix, root.eigenvalue_range())


def _top_eigenpairs(C: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The leading eigenpairs by subspace iteration from a fixed start (Halko et al. 2011, 4.5)."""
    generator = torch.Generator().manual_seed(0)
    width = min(len(C), rank + SUBSPACE_OVERSAMPLING)
    Q = torch.randn(len(C), width, generator=generator, dtype=C.dtype)
    for _ in range(SUBSPACE_ITERATIONS):
        Q, _ = torch.linalg.qr(C @ Q)
    eigenvalues, V = torch.linalg.eigh(Q.mT @ C @ Q)
    return eigenvalues[-rank:], (Q @ V)[:, -rank:]
