"""Per-sample gradients in the form in which they are cheap, never as a full [batch, *weight].

One layout for everything: ``[batch, position, feature]``. A form knows three things about the
gradients of a batch: their squared norms, their weighted sum, and how to show them densely, a
bounded number of examples at a time.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

# Largest number of elements formed at once where per-sample gradients must be explicit
# (2^24 floats are 64 MiB).
MAX_DENSE_ELEMENTS = 2**24

# Largest number of elements of one block's explicit gradients that are kept between norm and sum
# (16 MiB of floats; every block of a model has its own).
MAX_KEPT_ELEMENTS = 2**22


def cancellation_floor(dtype: torch.dtype) -> float:
    """Smallest share of Σ_t ‖a_t‖²‖δ_t‖² that a squared norm is taken to be.

    The Gram form sums T² products of rounded dot products; where they cancel almost completely
    only rounding error is left. With products off by at most 4 ulp of ‖a_t‖²‖δ_t‖², a norm above
    this floor is right to 2^-14 (float32), which the clipping margin covers, and one below it is
    over-estimated: such an example is clipped more, the safe side.
    """
    return 2.0**15 * torch.finfo(dtype).eps


def largest_sq_norm(dtype: torch.dtype) -> float:
    """Largest ‖a_t‖² or ‖δ_t‖² whose product with the other one's can be trusted.

    A side beyond it counts as overflow: the other may have underflowed to zero in its own squares
    and hide a gradient of any size. Below it, what underflow hides is smaller than 1e-12 (float32).
    """
    return torch.finfo(dtype).max ** 0.5


class PerSampleGradient(Protocol):
    """The gradients of one block of parameters, one for each example of a batch."""

    def sq_norms(self) -> Tensor:
        """Squared Frobenius norm of each example's gradient, [batch]."""
        ...

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Σ_i weights_i · g_i as a matrix or flat vector."""
        ...

    def dense_chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Explicit gradients [chunk, ...] for consecutive slices of the batch."""
        ...

    def without(self, examples: Tensor) -> PerSampleGradient:
        """The same gradients with those of the marked examples ([batch], bool) set to zero."""
        ...


def _zero_rows(x: Tensor, examples: Tensor) -> Tensor:
    """A copy of x with the marked leading rows zero, whatever they held (NaN·0 is NaN)."""
    return x.masked_fill(examples.view(-1, *[1] * (x.dim() - 1)), 0)


def _diagonal(matrices: Tensor) -> Tensor:
    return matrices.diagonal(dim1=1, dim2=2)


def _chunks(num_rows: int, elements_per_row: int) -> Iterator[slice]:
    size = max(1, MAX_DENSE_ELEMENTS // max(1, elements_per_row))
    for start in range(0, max(1, num_rows), size):  # an empty batch is one empty slice
        yield slice(start, min(start + size, num_rows))


@dataclass(frozen=True)
class OuterGradient:
    """g_i = Σ_t δ_it [a_it, 1]ᵀ: Linear, Conv1D, Conv2d (positions are patches).

    Attributes:
        a: Inputs [batch·groups, position, d_in]; d_in is 0 where only the bias trains.
        delta: Output gradients [batch·groups, position, d_out].
        ones: The bias column [batch·groups, position, 1], or None where no bias trains.
        groups: Groups of a grouped convolution; each is an outer product of its own and the
            weighted sum stacks them along d_out.
    """

    a: Tensor
    delta: Tensor
    ones: Tensor | None = None
    groups: int = 1

    @property
    def d_in(self) -> int:
        """Width of the input side, the bias column included."""
        return self.a.shape[-1] + (self.ones is not None)

    @property
    def prefers_gram(self) -> bool:
        """Two T×T Gram matrices are smaller than one explicit gradient."""
        num_positions, d_out = self.delta.shape[1:]
        return 2 * num_positions**2 <= self.d_in * d_out

    def sq_norms(self, input_gram: Tensor | None = None) -> Tensor:
        """By T×T Gram matrices, or by small explicit matrices where sequences are long.

        Args:
            input_gram: :meth:`input_gram`, where the caller has it already.
        """
        if self.prefers_gram:
            return self._gram_sq_norms(input_gram).view(-1, self.groups).sum(1)
        return torch.cat([g.square().sum((1, 2)) for _, g in self.dense_chunks()])

    def input_gram(self) -> Tensor:
        """⟨a_s, a_t⟩ for all pairs of positions, [batch·groups, position, position]."""
        gram = torch.bmm(self.a, self.a.mT)
        return gram if self.ones is None else torch.baddbmm(gram, self.ones, self.ones.mT)

    def _gram_sq_norms(self, input_gram: Tensor | None) -> Tensor:
        # ‖Σ_t δ_t a_tᵀ‖² = Σ_{s,t} (δ_s·δ_t)(a_s·a_t)
        input_gram = self.input_gram() if input_gram is None else input_gram
        delta_gram = torch.bmm(self.delta, self.delta.mT)
        largest = torch.maximum(_diagonal(input_gram).amax(1), _diagonal(delta_gram).amax(1))
        products = delta_gram.mul_(input_gram)
        floor = cancellation_floor(products.dtype) * _diagonal(products).sum(1)
        sq_norms = torch.maximum(products.sum((1, 2)), floor)
        return sq_norms.masked_fill(~(largest <= largest_sq_norm(products.dtype)), torch.inf)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """[d_out·groups, d_in]; the bias is the last column."""
        if not self.prefers_gram:
            # The very matrices that gave the norm: where positions cancel, another order of sums
            # would leave another, perhaps larger, rest.
            chunks = (weights[at] @ matrices.flatten(1) for at, matrices in self.dense_chunks())
            return functools.reduce(torch.add, chunks).view(-1, self.d_in)
        if self.groups == 1:
            scaled = (self.delta * weights.view(-1, 1, 1)).flatten(0, 1)
            matrix = scaled.mT @ self.a.flatten(0, 1)
            return matrix if self.ones is None else self._append_bias(matrix, scaled)
        by_group = [
            dataclasses.replace(
                self,
                a=self.a[g :: self.groups],
                delta=self.delta[g :: self.groups],
                ones=None if self.ones is None else self.ones[g :: self.groups],
                groups=1,
            ).weighted_sum(weights)
            for g in range(self.groups)
        ]
        return torch.cat(by_group)

    def _append_bias(self, matrix: Tensor, scaled: Tensor) -> Tensor:
        assert self.ones is not None
        return torch.cat([matrix, scaled.mT @ self.ones.flatten(0, 1)], dim=1)

    def augmented_a(self) -> Tensor:
        """[a, 1] as one tensor, for the data-free stream and for tests."""
        return self.a if self.ones is None else torch.cat([self.a, self.ones], dim=-1)

    def dense_chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """[chunk, d_out·groups, d_in], bias last."""
        d_out = self.delta.shape[-1] * self.groups
        for examples in _chunks(len(self.delta) // self.groups, d_out * self.d_in):
            rows = slice(examples.start * self.groups, examples.stop * self.groups)
            delta = self.delta[rows].mT
            matrix = torch.bmm(delta, self.a[rows])
            if self.ones is not None:
                matrix = torch.cat([matrix, torch.bmm(delta, self.ones[rows])], dim=2)
            yield examples, matrix.reshape(-1, d_out, self.d_in)

    def without(self, examples: Tensor) -> OuterGradient:
        """Zero gradients for the marked examples, of all their groups."""
        rows = examples.repeat_interleave(self.groups)
        return dataclasses.replace(
            self, a=_zero_rows(self.a, rows), delta=_zero_rows(self.delta, rows)
        )


@dataclass(frozen=True)
class RowGradient:
    """g_i[ids_it] += δ_it: Embedding, without a one-hot matrix.

    Attributes:
        ids: Row numbers [batch, position].
        delta: Output gradients [batch, position, width], zero at the padding row.
        num_rows: Height of the table.
    """

    ids: Tensor
    delta: Tensor
    num_rows: int

    def sq_norms(self) -> Tensor:
        """Rows met twice in an example are added before they are squared."""
        batch = len(self.ids)
        example = torch.arange(batch, device=self.ids.device).unsqueeze(1)
        keys, inverse = torch.unique(example * self.num_rows + self.ids, return_inverse=True)
        width = self.delta.shape[-1]
        rows = self.delta.new_zeros(len(keys), width)
        rows.index_add_(0, inverse.flatten(), self.delta.reshape(-1, width))
        sums = rows.new_zeros(batch).index_add_(0, keys // self.num_rows, rows.square().sum(1))
        # Where a row's positions cancel, the sum over the batch may leave more than this order did.
        return torch.maximum(sums, cancellation_floor(sums.dtype) * self.delta.square().sum((1, 2)))

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """[num_rows, width]."""
        width = self.delta.shape[-1]
        scaled = (self.delta * weights.view(-1, 1, 1)).reshape(-1, width)
        return scaled.new_zeros(self.num_rows, width).index_add_(0, self.ids.flatten(), scaled)

    def dense_chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """[chunk, num_rows, width]."""
        width = self.delta.shape[-1]
        for rows in _chunks(len(self.ids), self.num_rows * width):
            ids = self.ids[rows].unsqueeze(-1).expand(-1, -1, width)
            table = self.delta.new_zeros(len(ids), self.num_rows, width)
            yield rows, table.scatter_add_(1, ids, self.delta[rows])

    def without(self, examples: Tensor) -> RowGradient:
        """Zero gradients for the marked examples."""
        return dataclasses.replace(self, delta=_zero_rows(self.delta, examples))


@dataclass(frozen=True)
class TiedGradient:
    """One matrix used as embedding (rows) and as output projection (outer).

    The gradient is the sum of both uses, so the norm has a cross term; leaving it out is how a
    tied model escapes its clip norm.
    """

    rows: RowGradient
    outer: OuterGradient

    def sq_norms(self) -> Tensor:
        """‖R + O‖² = ‖R‖² + ‖O‖² + 2⟨R, O⟩."""
        # ⟨R, O⟩ = Σ_{t,s} (row gradient at t · a_s) δ_s[ids_t]
        num_outer = self.outer.delta.shape[1]
        picked = self.outer.delta.gather(2, self.rows.ids.unsqueeze(1).expand(-1, num_outer, -1))
        cross = torch.bmm(self.outer.a, self.rows.delta.mT).mul_(picked).sum((1, 2))
        parts = self.rows.sq_norms() + self.outer.sq_norms()
        return torch.maximum(parts + 2 * cross, cancellation_floor(parts.dtype) * parts)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """[num_rows, width]."""
        return self.rows.weighted_sum(weights).add_(self.outer.weighted_sum(weights))

    def dense_chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """[chunk, num_rows, width]."""
        for (at, rows), (_, outer) in zip(
            self.rows.dense_chunks(), self.outer.dense_chunks(), strict=True
        ):
            yield at, rows + outer

    def without(self, examples: Tensor) -> TiedGradient:
        """Zero gradients for the marked examples."""
        return TiedGradient(self.rows.without(examples), self.outer.without(examples))


@dataclass(frozen=True)
class DenseGradient:
    """Explicit gradients [batch, ...]: norms' scales, biases, cls tokens, small matrices."""

    per_sample: Tensor

    def sq_norms(self) -> Tensor:
        """[batch]."""
        return self.per_sample.flatten(1).square().sum(1)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """In the shape of one example's gradient."""
        return (weights @ self.per_sample.flatten(1)).view(self.per_sample.shape[1:])

    def dense_chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """All of them: they exist already."""
        yield slice(0, len(self.per_sample)), self.per_sample

    def without(self, examples: Tensor) -> DenseGradient:
        """Zero gradients for the marked examples."""
        return DenseGradient(_zero_rows(self.per_sample, examples))


def compacted(gradient: PerSampleGradient) -> PerSampleGradient:
    """Small explicit matrices where sequences are long against them, else the gradient itself.

    Convolutions and LoRA's thin layers: norm and sum both need the matrices, which hold fewer
    numbers than the inputs and output gradients that they are made of.
    """
    if not isinstance(gradient, OuterGradient) or gradient.prefers_gram:
        return gradient
    if len(gradient.delta) * gradient.delta.shape[-1] * gradient.d_in > MAX_KEPT_ELEMENTS:
        return gradient
    return DenseGradient(torch.cat([matrices for _, matrices in gradient.dense_chunks()]))
