"""The preconditioner: one frozen linear map per block, and what is needed to apply it.

The maps are made from probes alone. They are applied to per-sample gradients before clipping, so
their size can't change the sensitivity; their conditioning only enters the rounding margin.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from hf_dpkfc.curvature.roots import DenseRoot, LowRankRoot, Root
from hf_dpkfc.errors import ConfigurationError
from hf_dpkfc.layers.gradients import (
    OuterGradient,
    PerSampleGradient,
    cancellation_floor,
    largest_sq_norm,
)

# Gram matrices of inputs that several layers read (query, key and value read one tensor), each
# with its input: while that is held, its address can't be another tensor's.
GramCache = dict[tuple[object, ...], tuple[Tensor, Tensor]]


class LinearMap(Protocol):
    """A linear map on one block's gradient."""

    def sq_norms(self, gradient: PerSampleGradient, grams: GramCache) -> Tensor:
        """‖U g_i‖² for each example, [batch]."""
        ...

    def apply(self, total: Tensor) -> Tensor:
        """U applied once to a sum of gradients, in the gradient's own shape."""
        ...

    def condition(self) -> float:
        """How much relative rounding error the map can amplify."""
        ...

    def to(self, device: torch.device, dtype: torch.dtype) -> LinearMap:
        """The same map for other tensors."""
        ...

    def scaled(self, factor: float) -> LinearMap:
        """The map times a number."""
        ...


@dataclass(frozen=True)
class ScalarMap:
    """g ↦ scale·g."""

    scale: float = 1.0

    def sq_norms(self, gradient: PerSampleGradient, grams: GramCache) -> Tensor:
        """scale²·‖g_i‖²."""
        if isinstance(gradient, OuterGradient):
            return gradient.sq_norms(_input_gram(gradient, None, grams)) * self.scale**2
        return gradient.sq_norms() * self.scale**2

    def apply(self, total: Tensor) -> Tensor:
        """scale·total."""
        return total if self.scale == 1.0 else total * self.scale

    def condition(self) -> float:
        """A scalar amplifies nothing."""
        return 1.0

    def to(self, device: torch.device, dtype: torch.dtype) -> ScalarMap:
        """Numbers have no device."""
        return self

    def scaled(self, factor: float) -> ScalarMap:
        """The map times a number."""
        return ScalarMap(self.scale * factor)


@dataclass(frozen=True)
class ElementwiseMap:
    """g ↦ D ∘ g, the diagonal preconditioner (AdaDPS)."""

    diagonal: Tensor

    def sq_norms(self, gradient: PerSampleGradient, grams: GramCache) -> Tensor:
        """Explicitly, a bounded number of examples at a time: D doesn't factor.

        A single outer product needs no matrix: ‖D∘δaᵀ‖² = (δ∘δ)ᵀ (D∘D) (a∘a).
        """
        if isinstance(gradient, OuterGradient) and gradient.delta.shape[1] == gradient.groups == 1:
            sq_delta, sq_a = gradient.delta[:, 0].square(), gradient.augmented_a()[:, 0].square()
            sq_norms = (sq_delta @ self.diagonal.square()).mul_(sq_a).sum(1)
            largest = torch.maximum(sq_delta.sum(1), sq_a.sum(1))
            return sq_norms.masked_fill(~(largest <= largest_sq_norm(sq_a.dtype)), torch.inf)
        norms = [(g * self.diagonal).flatten(1).square().sum(1) for _, g in gradient.dense_chunks()]
        return torch.maximum(torch.cat(norms), self._floor(gradient))

    def _floor(self, gradient: PerSampleGradient) -> Tensor:
        """Below it positions cancel, and sums in another order may be larger than the norm."""
        if not isinstance(gradient, OuterGradient):
            return self.diagonal.new_zeros(())
        by_group = self.diagonal.square().view(gradient.groups, -1, gradient.d_in)
        sq_delta = gradient.delta.square().unflatten(0, (-1, gradient.groups))
        sq_a = gradient.augmented_a().square().unflatten(0, (-1, gradient.groups))
        products = (sq_delta @ by_group).mul_(sq_a).sum((1, 2, 3))
        return products.mul_(cancellation_floor(products.dtype))

    def apply(self, total: Tensor) -> Tensor:
        """D ∘ total."""
        return total * self.diagonal

    def condition(self) -> float:
        """Elementwise products keep relative precision."""
        return 1.0

    def to(self, device: torch.device, dtype: torch.dtype) -> ElementwiseMap:
        """The same map for other tensors."""
        return ElementwiseMap(self.diagonal.to(device, dtype))

    def scaled(self, factor: float) -> ElementwiseMap:
        """The map times a number."""
        return ElementwiseMap(self.diagonal * factor)


@dataclass(frozen=True)
class KroneckerMap:
    """g ↦ scale·U_G g U_A (Alg. 2, "Transform")."""

    root_A: Root
    root_G: Root
    scale: float = 1.0

    def sq_norms(self, gradient: PerSampleGradient, grams: GramCache) -> Tensor:
        """From â = U_A a and δ̂ = U_G δ, or from small matrices where sequences are long."""
        if not isinstance(gradient, OuterGradient) or not gradient.prefers_gram:
            # Fewer rows and columns than positions: move the matrices, not the vectors.
            matrices = (self.apply(g) for _, g in gradient.dense_chunks())
            return torch.cat([m.square().sum((1, 2)) for m in matrices])
        moved = replace(gradient, delta=self.root_G.apply(gradient.delta))
        return moved.sq_norms(_input_gram(gradient, self.root_A, grams)) * self.scale**2

    def apply(self, total: Tensor) -> Tensor:
        """U_G M U_A for M of shape [..., d_out·groups, d_in]."""
        grouped = total.reshape(-1, self.root_G.dim, total.shape[-1])
        moved = self.root_G.apply(self.root_A.apply(grouped).mT).mT
        return moved.reshape(total.shape) * self.scale

    def condition(self) -> float:
        """The product of both sides' condition numbers.

        A gradient that lies where both roots are smallest is summed up with rounding errors in all
        directions, and both roots then magnify those where they are largest.
        """
        ranges = [self.root_A.eigenvalue_range(), self.root_G.eigenvalue_range()]
        return math.prod(high / low for low, high in ranges)

    def to(self, device: torch.device, dtype: torch.dtype) -> KroneckerMap:
        """The same map for other tensors."""
        return KroneckerMap(
            self.root_A.to(device, dtype), self.root_G.to(device, dtype), self.scale
        )

    def scaled(self, factor: float) -> KroneckerMap:
        """The map times a number."""
        return replace(self, scale=self.scale * factor)


def _with_inputs_moved(gradient: OuterGradient, root: Root) -> OuterGradient:
    a, ones = root.apply_split(gradient.a, gradient.ones)
    return replace(gradient, a=a, ones=ones)


def _input_gram(gradient: OuterGradient, root: Root | None, grams: GramCache) -> Tensor | None:
    """⟨â_s, â_t⟩, computed once for all layers that read the same tensor through the same root."""
    if not gradient.prefers_gram:
        return None
    a = gradient.a
    key = (a.data_ptr(), a.shape, a.stride(), gradient.ones is None, id(root))
    if a.numel() == 0 or key not in grams:
        moved = gradient if root is None else _with_inputs_moved(gradient, root)
        grams[key] = (a, moved.input_gram())
    return grams[key][1]


@dataclass(frozen=True)
class Preconditioner:
    """One linear map per block; a block without one keeps the identity.

    Attributes:
        maps: By block name.
        kind: "kfac", "diagonal" or "none".
        is_data_free: Whether every number in it came from probes that hold no record.
        notes: What fell back to something simpler, block by block.
        awaits_signal: A layer got no gradient at all yet, as LoRA's A while B is zero.
    """

    maps: Mapping[str, LinearMap] = field(default_factory=dict)
    kind: str = "none"
    is_data_free: bool = True
    notes: tuple[str, ...] = ()
    awaits_signal: bool = False

    @classmethod
    def identity(cls) -> Preconditioner:
        """Plain DP-SGD's geometry."""
        return cls()

    def __getitem__(self, block_name: str) -> LinearMap:
        return self.maps.get(block_name, _IDENTITY)

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Preconditioner:
        """The same maps for other tensors; shared roots stay shared."""
        device = torch.device(device)
        roots: dict[int, Root] = {}

        def moved(root: Root) -> Root:
            return roots.setdefault(id(root), root.to(device, dtype))

        maps: dict[str, LinearMap] = {}
        for name, linear in self.maps.items():
            if isinstance(linear, KroneckerMap):
                maps[name] = KroneckerMap(moved(linear.root_A), moved(linear.root_G), linear.scale)
            else:
                maps[name] = linear.to(device, dtype)
        return replace(self, maps=maps)

    def condition(self) -> float:
        """The worst block's amplification of rounding error."""
        return max((linear.condition() for linear in self.maps.values()), default=1.0)

    @property
    def fingerprint(self) -> str:
        """SHA-256 over every name, option and number."""
        tensors, description = self._flatten()
        digest = hashlib.sha256(json.dumps(description, sort_keys=True).encode())
        for name in sorted(tensors):
            digest.update(name.encode() + str(tensors[name].dtype).encode())
            digest.update(tensors[name].detach().cpu().contiguous().numpy().data)
        return digest.hexdigest()

    def save(self, path: str | Path) -> None:
        """Write one safetensors file."""
        tensors, description = self._flatten()
        own = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
        save_file(own, str(path), metadata={"preconditioner": json.dumps(description)})

    @classmethod
    def load(cls, path: str | Path) -> Preconditioner:
        """Read what :meth:`save` wrote."""
        with safe_open(str(path), framework="pt") as file:
            description = (file.metadata() or {}).get("preconditioner")
            if description is None:
                raise ConfigurationError(
                    f"{path} holds no preconditioner.",
                    why="a resumed run must use the very maps that it was interrupted with.",
                    way_out="point to the preconditioner.safetensors of a checkpoint.",
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        return cls._unflatten(tensors, json.loads(description))

    def _flatten(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors by name, and a description in JSON that puts them together again."""
        tensors: dict[str, Tensor] = {}
        numbers: dict[int, int] = {}
        maps: dict[str, Any] = {}
        for name, linear in self.maps.items():
            if isinstance(linear, KroneckerMap):
                sides = []
                for root in (linear.root_A, linear.root_G):
                    number = numbers.setdefault(id(root), len(numbers))
                    tensors |= {f"root.{number}.{key}": t for key, t in root.tensors()}
                    sides.append(number)
                maps[name] = {"roots": sides, "scale": linear.scale}
            elif isinstance(linear, ElementwiseMap):
                tensors[f"diagonal.{name}"] = linear.diagonal
                maps[name] = {}
            elif isinstance(linear, ScalarMap):
                maps[name] = {"scale": linear.scale}
        description = {
            "maps": maps,
            "kind": self.kind,
            "is_data_free": self.is_data_free,
            "notes": list(self.notes),
            "awaits_signal": self.awaits_signal,
        }
        return tensors, description

    @classmethod
    def _unflatten(cls, tensors: Mapping[str, Tensor], description: Any) -> Preconditioner:
        roots: dict[int, Root] = {}

        def root(number: int) -> Root:
            if number not in roots:
                roots[number] = _read_root(tensors, f"root.{number}.")
            return roots[number]

        maps: dict[str, LinearMap] = {}
        for name, entry in description["maps"].items():
            if "roots" in entry:
                sides = [root(number) for number in entry["roots"]]
                maps[name] = KroneckerMap(sides[0], sides[1], entry["scale"])
            elif f"diagonal.{name}" in tensors:
                maps[name] = ElementwiseMap(tensors[f"diagonal.{name}"])
            else:
                maps[name] = ScalarMap(entry["scale"])
        return cls(
            maps,
            description["kind"],
            description["is_data_free"],
            tuple(description["notes"]),
            description["awaits_signal"],
        )


_IDENTITY = ScalarMap()


def _read_root(tensors: Mapping[str, Tensor], prefix: str) -> Root:
    if f"{prefix}matrix" in tensors:
        low, high = tensors[f"{prefix}extremes"].tolist()
        return DenseRoot(tensors[f"{prefix}matrix"], (low, high))
    parts = (tensors[f"{prefix}{key}"] for key in ("s", "basis", "values"))
    s, basis, values = parts
    return LowRankRoot(float(s), basis, values)
