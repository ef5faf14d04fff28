"""Stochastic Lanczos Quadrature: the density of a Hessian's eigenvalues from products H·v alone.

Reference: Ghorbani, Krishnan, Xiao 2019, "An Investigation into Neural Net Optimization via Hessian
Eigenvalue Density", section 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf_dpkfc.curvature.fit import inputs_like, probing
from hf_dpkfc.curvature.probes import Probe
from hf_dpkfc.layers.capture import PerExampleLoss
from hf_dpkfc.losses import TaskLoss, task_of

# v -> H v, both flat.
Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class SpectralDensity:
    """Quadrature nodes and weights, one row for each start vector; every row's weights sum to 1.

    Attributes:
        nodes: Ritz values, [start, step].
        weights: [start, step].
        dim: Width of H.
    """

    nodes: Tensor
    weights: Tensor
    dim: int

    def moment(self, power: int) -> float:
        """Estimate of tr(H^power)/dim; for one start v exactly vᵀH^power v/‖v‖².

        Exact in the second sense for powers up to 2·steps − 1 (Golub & Meurant).
        """
        return float((self.weights * self.nodes.pow(power)).sum(1).mean())

    def density(self, grid: Tensor, width: float) -> Tensor:
        """The density on a grid, each node widened to a Gaussian of that standard deviation."""
        z = (grid.view(-1, 1) - self.nodes.view(1, -1)) / width
        bumps = torch.exp(-z.square() / 2) / (width * math.sqrt(2 * math.pi))
        return bumps @ self.weights.flatten() / len(self.nodes)

    def sorted_eigenvalues(self, ranks: Tensor) -> Tensor:
        """Estimate of the eigenvalues at 1-based ranks in descending order: the quantiles."""
        nodes, order = self.nodes.flatten().sort(descending=True)
        above = self.weights.flatten()[order].cumsum(0) / len(self.nodes) * self.dim
        at = torch.searchsorted(above, ranks.to(above.dtype) - 0.5).clamp(max=len(nodes) - 1)
        return nodes[at]


def lanczos_density(product: Product, starts: Tensor, num_steps: int) -> SpectralDensity:
    """The density of a symmetric H.

    Args:
        product: v -> H v.
        starts: Start vectors, [start, dim]; Gaussian or ±1 entries make moments unbiased.
        num_steps: Lanczos steps; breaking down early only means that the rest is exact already.
    """
    rows = [_quadrature(product, start, num_steps) for start in starts]
    width = max(len(nodes) for nodes, _ in rows)
    # A row that ended early is padded with nodes of weight zero.
    nodes, weights = (
        torch.stack([torch.nn.functional.pad(row[i], (0, width - len(row[i]))) for row in rows])
        for i in (0, 1)
    )
    return SpectralDensity(nodes, weights, starts.shape[1])


def _quadrature(product: Product, start: Tensor, num_steps: int) -> tuple[Tensor, Tensor]:
    alphas, betas = _tridiagonal(product, start, num_steps)
    T = torch.diag(alphas) + torch.diag(betas, 1) + torch.diag(betas, -1)
    nodes, vectors = torch.linalg.eigh(T)
    return nodes, vectors[0].square()


def _tridiagonal(product: Product, start: Tensor, num_steps: int) -> tuple[Tensor, Tensor]:
    """Diagonal and off-diagonal of QᵀHQ, with Q orthogonalised twice against all before it."""
    v = start / start.norm()
    basis = v.unsqueeze(0)
    alphas: list[Tensor] = []
    betas: list[Tensor] = []
    for _ in range(min(num_steps, len(start))):
        w = product(v)
        alphas.append(w @ v)
        scale = w.norm()
        for _ in range(2):
            w = w - basis.mT @ (basis @ w)
        if w.norm() <= scale * len(start) ** 0.5 * torch.finfo(w.dtype).eps * 8:
            break
        betas.append(w.norm())
        v = w / betas[-1]
        basis = torch.cat([basis, v.unsqueeze(0)])
    return _vector(alphas), _vector(betas[: len(alphas) - 1])


def _vector(numbers: list[Tensor]) -> Tensor:
    return torch.tensor([float(x) for x in numbers], dtype=torch.float64)


def gaussian_starts(count: int, dim: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Start vectors from public randomness, [count, dim]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, dim, generator=generator, dtype=dtype)


def hessian_product(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    per_example_loss: PerExampleLoss | None = None,
) -> tuple[Product, int]:
    """Products H v for the mean loss over the batches, and the number of trainable parameters.

    Where the batches hold private records, so does every number that comes out: whoever passes
    them names the result ``unsafe``.
    """
    held = [inputs_like(model, batch) for batch in batches]
    loss = per_example_loss or TaskLoss(task_of(model))
    parameters = [p for p in model.parameters() if p.requires_grad]
    count = sum(len(next(iter(batch.values()))) for batch in held)

    def product(v: Tensor) -> Tensor:
        parts = v.split([p.numel() for p in parameters])
        directions = [part.view_as(p) for part, p in zip(parts, parameters, strict=True)]
        total = torch.zeros_like(v)
        # Fused attention kernels have no second derivative.
        with probing(model), sdpa_kernel(SDPBackend.MATH):
            for batch in held:
                value = loss(model, batch).sum() / count
                total += _second_derivative(value, parameters, directions)
        return total

    return product, sum(p.numel() for p in parameters)


def _second_derivative(
    loss: Tensor, parameters: list[nn.Parameter], directions: list[Tensor]
) -> Tensor:
    """∂⟨∇loss, direction⟩, flat; zero where a parameter doesn't enter."""
    first = torch.autograd.grad(
        loss, parameters, create_graph=True, allow_unused=True, materialize_grads=True
    )
    products = [(g * d).sum() for g, d in zip(first, directions, strict=True)]
    along = torch.stack(products).sum()
    second = torch.autograd.grad(along, parameters, allow_unused=True, materialize_grads=True)
    return torch.cat([g.detach().flatten() for g in second])


def probe_density(
    model: nn.Module,
    probe: Probe,
    *,
    num_steps: int = 30,
    num_starts: int = 2,
    batch_size: int = 64,
    num_batches: int = 1,
    seed: int = 0,
) -> SpectralDensity:
    """The Hessian density of the loss on probes: free of private data where the probe is."""
    batches = probe.batches(num_batches, batch_size, torch.Generator().manual_seed(seed))
    return _density(model, batches, num_steps, num_starts, seed)


def unsafe_density(
    model: nn.Module,
    private_batches: Iterable[Mapping[str, Any]],
    *,
    num_steps: int = 30,
    num_starts: int = 2,
    seed: int = 0,
) -> SpectralDensity:
    """The Hessian density of the loss on private records: not covered by any guarantee."""
    return _density(model, private_batches, num_steps, num_starts, seed)


def _density(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    num_steps: int,
    num_starts: int,
    seed: int,
) -> SpectralDensity:
    dtype = next(model.parameters()).dtype
    product, dim = hessian_product(model, batches)
    return lanczos_density(product, gaussian_starts(num_starts, dim, seed, dtype), num_steps)
