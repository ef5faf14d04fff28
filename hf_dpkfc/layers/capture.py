"""One forward and one backward pass that keep (a, δ) of every block, and no weight gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from opacus.grad_sample import GradSampleModule
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from hf_dpkfc.errors import RecordError, UnsupportedLayerError
from hf_dpkfc.layers.gradients import (
    DenseGradient,
    OuterGradient,
    PerSampleGradient,
    RowGradient,
    TiedGradient,
)
from hf_dpkfc.layers.layout import (
    accumulation_dtype,
    conv_input_patches,
    conv_output_positions,
    ids_to_positions,
    to_positions,
)
from hf_dpkfc.layers.routes import Block, Form, Kind, RouteTable, Use

# (model, inputs) -> the loss of each example, [batch].
PerExampleLoss = Callable[[nn.Module, Mapping[str, Any]], Tensor]


@dataclass(frozen=True)
class Call:
    """One call of a module: what it saw and, after the backward pass, what came back."""

    a: Tensor
    delta: Tensor

    def scaled(self, factor: float) -> Call:
        """The call of a loss multiplied by a number."""
        return Call(self.a, self.delta.to(accumulation_dtype(self.delta.dtype)) * factor)


_Part = TypeVar("_Part", Tensor, list[Call])


@dataclass(frozen=True)
class Captured:
    """A pass over one micro-batch: the losses, and a gradient for each block that was reached.

    ``losses`` is a private quantity: nothing but clipping may look at it.

    Passes over the same examples form linear combinations (``scaled``, ``+``), whose per-sample
    gradients are those of the combined loss; see :meth:`resolved` where weights differ.

    Attributes:
        losses: Of each example.
        calls: By module, or by block for bare parameters.
        model: Whose modules were called.
        explicit: Gradients [batch, numel] that are formed already, by block.
    """

    losses: Tensor
    calls: Mapping[str, list[Call]]
    model: nn.Module
    explicit: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def batch_size(self) -> int:
        """Number of examples in the pass."""
        return len(self.losses)

    @property
    def eps(self) -> float:
        """Rounding of the coarsest δ, which autocast may make coarser than the parameters."""
        dtypes = {call.delta.dtype for calls in self.calls.values() for call in calls}
        return max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)

    def gradient(self, block: Block) -> PerSampleGradient | None:
        """The block's per-sample gradients; None if the loss doesn't depend on the block."""
        if block.name in self.explicit:
            return DenseGradient(self.explicit[block.name])
        parts = [
            (use, self.model.get_submodule(use.module), call)
            for use in block.uses
            for call in self.calls.get(_key(use, block), [])
        ]
        if not parts:
            return None
        return _FORMS[block.form](block, parts, self.batch_size)

    def resolved(self, table: RouteTable) -> Captured:
        """The same pass with small gradients formed now, while the weights are still its own.

        Their rules may read the module's parameters; all others need (a, δ) only.
        """
        dense = ((b.name, self.gradient(b)) for b in table if b.form is Form.DENSE)
        explicit = {n: g.per_sample for n, g in dense if isinstance(g, DenseGradient)}
        return replace(self, explicit=explicit)

    def scaled(self, factor: float) -> Captured:
        """The pass of the loss multiplied by a number."""
        return replace(
            self,
            losses=self.losses * factor,
            calls={key: [c.scaled(factor) for c in calls] for key, calls in self.calls.items()},
            explicit={name: value * factor for name, value in self.explicit.items()},
        )

    def __add__(self, other: Captured) -> Captured:
        """The pass of the sum of two losses: calls of one module are further positions."""
        return replace(
            self,
            losses=self.losses + other.losses,
            calls=_united(self.calls, other.calls),
            explicit=_united(self.explicit, other.explicit),
        )


def _united(one: Mapping[str, _Part], two: Mapping[str, _Part]) -> dict[str, _Part]:
    """Both mappings; where a name is in both, the sum."""
    return {**one, **{n: one[n] + part if n in one else part for n, part in two.items()}}


def capture(
    model: nn.Module,
    table: RouteTable,
    per_example_loss: PerExampleLoss,
    inputs: Mapping[str, Any],
    batch_size: int,
) -> Captured:
    """Run the model on one micro-batch and keep (a, δ) for every block of the table.

    Weight gradients aren't computed: autograd is only asked for the gradients at the modules'
    outputs. No ``.grad`` is touched and no hook stays behind.
    """
    recorder = _Recorder(model, table, batch_size)
    with recorder.attached():
        losses = per_example_loss(model, inputs)
    return Captured(losses.detach(), recorder.backward(losses), model)


def _key(use: Use, block: Block) -> str:
    """Where a use's calls are kept; a bare parameter has a place of its own."""
    return block.name if use.kind is Kind.BROADCAST else use.module


@dataclass(frozen=True)
class _Seen:
    """A call during the forward pass: its input as it was then, and where its δ will come from.

    Attributes:
        key: The module's, or the bare parameter's.
        a: The input.
        version: Of the input, which must still be the same when δ has come back.
        edge: The output's.
        problem: Why its gradient couldn't be told apart by example, if the loss depends on it.
    """

    key: str
    a: Tensor
    version: int
    edge: GradientEdge
    problem: UnsupportedLayerError | None


class _Recorder:
    """Hooks for one pass. State lives here and dies with the pass, never on the model."""

    def __init__(self, model: nn.Module, table: RouteTable, batch_size: int) -> None:
        self.model = model
        self.batch_size = batch_size
        self.uses = {_key(use, block): (use, block) for block in table.blocks for use in block.uses}
        self.seen: list[_Seen] = []
        self.swapped: list[tuple[nn.Module, str, Any]] = []

    @contextmanager
    def attached(self) -> Iterator[None]:
        handles = [
            h for key, (use, block) in self.uses.items() for h in self._hook(key, use, block)
        ]
        try:
            yield
        except (RecordError, RuntimeError) as error:
            if self.swapped and not isinstance(error, torch.OutOfMemoryError):
                # It failed inside a module that owns a bare parameter.
                raise _uncopied([name for _, name, _ in self.swapped], error) from error
            raise
        finally:
            for handle in handles:
                handle.remove()
            self._restore()

    def _hook(self, key: str, use: Use, block: Block) -> list[RemovableHandle]:
        module = self.model.get_submodule(use.module)
        if use.kind is Kind.BROADCAST:
            attribute = next(iter(block.parameters)).rpartition(".")[2]
            before = module.register_forward_pre_hook(
                lambda owner, _: self._swap(key, owner, attribute)
            )
            return [before, module.register_forward_hook(lambda owner, *_: self._restore(owner))]
        after = module.register_forward_hook(
            lambda m, args, kwargs, output: self._record(key, m, args, kwargs, output),
            with_kwargs=True,
        )
        if use.kind is not Kind.EMBEDDING:
            return [after]
        return [module.register_forward_pre_hook(self._expand_ids), after]

    def _swap(self, key: str, owner: nn.Module, attribute: str) -> None:
        """Give every example its own copy of a bare parameter, so that δ comes back per example."""
        parameter = owner._parameters[attribute]
        assert parameter is not None
        expanded = parameter.expand(self.batch_size, *parameter.shape[1:])
        self.swapped.append((owner, attribute, parameter))
        owner._parameters[attribute] = expanded  # type: ignore[assignment]
        self._see(key, parameter, expanded)

    def _restore(self, only: nn.Module | None = None) -> None:
        """Put bare parameters back: one owner's when its forward ends, all when the pass does."""
        for owner, attribute, parameter in self.swapped:
            if only is None or owner is only:
                owner._parameters[attribute] = parameter
        kept = [] if only is None else [entry for entry in self.swapped if entry[0] is not only]
        self.swapped = kept

    def _expand_ids(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Position ids often come as [1, T] and are broadcast; per example they must be [B, T].

        Where an example has several sequences (multiple choice), as many as the other ids.
        """
        others = [len(seen.a) for seen in self.seen if not seen.a.is_floating_point()]
        rows = max([self.batch_size, *others])
        if args and args[0].dim() > 1 and len(args[0]) == 1 < rows:
            return (args[0].expand(rows, *args[0].shape[1:]), *args[1:])
        return None

    def _record(
        self,
        key: str,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        output: Any,
    ) -> None:
        a = args[0] if args else next(iter(kwargs.values()))
        if not torch.is_grad_enabled():
            return
        kind = self.uses[key][0].kind
        given = [value for value in (*args, *kwargs.values()) if value is not None]
        if kind in (Kind.VJP, Kind.SAMPLER) and len(given) > 1:
            raise _several_arguments(key, module)
        if not isinstance(output, Tensor):
            raise _unbatched(key, module, type(output).__name__, self.batch_size)
        # A call that the loss doesn't depend on may have any shape, so it is judged afterwards.
        problem = None
        if not self._has_a_row_per_example(kind, a, output):
            problem = _unbatched(key, module, tuple(output.shape), self.batch_size)
        self._see(key, a, output, problem)

    def _has_a_row_per_example(self, kind: Kind, a: Tensor, output: Tensor) -> bool:
        if kind is Kind.EMBEDDING and a.dim() == 1 and len(a) != self.batch_size:
            return False
        if kind in (Kind.VJP, Kind.SAMPLER) and len(a) != len(output):
            return False
        return output.dim() > 0 and len(output) > 0 and len(output) % self.batch_size == 0

    def _see(
        self, key: str, a: Tensor, output: Tensor, problem: UnsupportedLayerError | None = None
    ) -> None:
        edge = get_gradient_edge(output)
        self.seen.append(_Seen(key, a.detach(), a._version, edge, problem))

    def backward(self, losses: Tensor) -> dict[str, list[Call]]:
        """δ for every recorded call, from one backward pass of the summed losses."""
        if losses.shape != (self.batch_size,):
            raise UnsupportedLayerError(
                f"The per-example loss has shape {tuple(losses.shape)}, not ({self.batch_size},).",
                why="clipping bounds each example's own loss gradient; a mean or a sum over the "
                "batch can't be taken apart again.",
                way_out="return one loss per example from per_example_loss(outputs, inputs).",
            )
        # The sum, not the mean: δ must be that of each example's own loss.
        edges = [seen.edge for seen in self.seen]
        deltas = torch.autograd.grad(losses.sum(), edges, allow_unused=True)
        calls: dict[str, list[Call]] = defaultdict(list)
        wide: dict[tuple[object, ...], Tensor] = {}
        for seen, delta in zip(self.seen, deltas, strict=True):
            if seen.a._version != seen.version:
                raise _overwritten(seen.key)
            if delta is None:
                continue
            if seen.problem is not None:
                raise seen.problem
            calls[seen.key].append(Call(_widened(seen.a, wide), delta))
        self.seen.clear()
        return calls


def _widened(a: Tensor, known: dict[tuple[object, ...], Tensor]) -> Tensor:
    """An input in the precision of norms, once for all modules that read it."""
    if not a.is_floating_point() or a.dtype == accumulation_dtype(a.dtype):
        return a
    place = (a.data_ptr(), a.shape, a.stride())
    if place not in known:
        known[place] = a.to(accumulation_dtype(a.dtype))
    return known[place]


def _several_arguments(key: str, module: nn.Module) -> UnsupportedLayerError:
    return UnsupportedLayerError(
        f"{key} ({type(module).__name__}) was called with several arguments.",
        why="its rule differentiates it with respect to one input, so the others' share of the "
        "gradient would be wrong.",
        way_out="freeze it with requires_grad_(False), or give the module one input.",
    )


def _unbatched(
    key: str, module: nn.Module, shape: object, batch_size: int
) -> UnsupportedLayerError:
    return UnsupportedLayerError(
        f"{key} ({type(module).__name__}) gave an output of {shape} in a batch of {batch_size}.",
        why="its first dimension isn't the batch, so gradients can't be told apart by example.",
        way_out="freeze the module with requires_grad_(False).",
    )


def _uncopied(names: list[str], error: Exception) -> UnsupportedLayerError:
    return UnsupportedLayerError(
        f"The model failed while every example had its own copy of {', '.join(names)}.",
        why=f"a gradient per example needs a copy per example ({error.__cause__ or error}).",
        way_out="freeze the parameter with requires_grad_(False); if the model can't take these "
        "records on its own either, mend the records.",
    )


def _overwritten(key: str) -> UnsupportedLayerError:
    return UnsupportedLayerError(
        f"The input of {key} was overwritten in place after the module had read it.",
        why="its per-sample gradient would be computed from the wrong values.",
        way_out="use the out-of-place form of the operation (inplace=False).",
    )


_Parts = list[tuple[Use, nn.Module, Call]]


def _outer(block: Block, parts: _Parts, batch_size: int) -> OuterGradient:
    """Calls of one matrix are positions of one sequence: cross terms come for free."""
    use, first, _ = parts[0]
    groups = first.groups if isinstance(first, nn.Conv2d) else 1
    inputs, deltas = zip(*(_outer_pair(m, call, batch_size) for _, m, call in parts), strict=True)
    delta = deltas[0] if len(deltas) == 1 else torch.cat(deltas, dim=1)
    if use.covers_weight:
        a = inputs[0] if len(inputs) == 1 else torch.cat(inputs, dim=1)
    else:
        a = delta.new_empty(*delta.shape[:2], 0)
    ones = delta.new_ones(1, 1, 1).expand(*delta.shape[:2], 1) if use.covers_bias else None
    return OuterGradient(a, delta, ones, groups)


def _outer_pair(module: nn.Module, call: Call, batch_size: int) -> tuple[Tensor, Tensor]:
    if isinstance(module, nn.Conv2d):
        return (
            conv_input_patches(module, call.a, batch_size),
            conv_output_positions(module, call.delta, batch_size),
        )
    return to_positions(call.a, batch_size), to_positions(call.delta, batch_size)


def _rows(block: Block, parts: _Parts, batch_size: int) -> RowGradient:
    ids, deltas = [], []
    for _, module, call in parts:
        assert isinstance(module, nn.Embedding)
        ids.append(ids_to_positions(call.a, batch_size))
        delta = to_positions(call.delta, batch_size)
        if module.padding_idx is not None:  # torch gives this row no gradient
            delta = delta.masked_fill((ids[-1] == module.padding_idx).unsqueeze(-1), 0)
        deltas.append(delta)
    num_rows = next(iter(block.parameters.values()))[0]
    return RowGradient(torch.cat(ids, dim=1), torch.cat(deltas, dim=1), num_rows)


def _tied(block: Block, parts: _Parts, batch_size: int) -> PerSampleGradient:
    embedded = [part for part in parts if part[0].kind is Kind.EMBEDDING]
    projected = [part for part in parts if part[0].kind is not Kind.EMBEDDING]
    if not projected:
        return _rows(block, embedded, batch_size)
    if not embedded:
        return _outer(block, projected, batch_size)
    return TiedGradient(_rows(block, embedded, batch_size), _outer(block, projected, batch_size))


def _dense(block: Block, parts: _Parts, batch_size: int) -> DenseGradient:
    """Small parameters, explicitly; several calls add up."""
    total: Tensor | None = None
    for use, module, call in parts:
        # An example may have several rows (a video's frames): its gradient is their sum.
        grads = [g.reshape(batch_size, -1, g[0].numel()).sum(1) for g in _by_row(use, module, call)]
        flat = torch.cat(grads, dim=1)
        total = flat if total is None else total + flat
    assert total is not None
    return DenseGradient(total)


def _by_row(use: Use, module: nn.Module, call: Call) -> list[Tensor]:
    """Each parameter's gradients [batch·k, ...], one for each row of the module's output."""
    dtype = accumulation_dtype(call.delta.dtype)
    delta = call.delta.to(dtype)
    if use.kind is Kind.BROADCAST:
        return [delta]
    a = call.a.to(dtype) if call.a.is_floating_point() else call.a
    trainable = [p for p in module.parameters(recurse=False) if p.requires_grad]
    if use.kind is Kind.SAMPLER:
        sampler = GradSampleModule.GRAD_SAMPLERS[type(module)]
        grads = sampler(module, [a], delta)
        return [grads[p].to(dtype) for p in trainable]
    return _vjp_by_row(module, a, delta)


def _vjp_by_row(module: nn.Module, a: Tensor, delta: Tensor) -> list[Tensor]:
    """The module's own forward, differentiated for one row at a time by vmap."""
    parameters = {
        name: p.detach().to(delta.dtype)
        for name, p in module.named_parameters(recurse=False)
        if p.requires_grad
    }

    def one(a_i: Tensor, delta_i: Tensor) -> dict[str, Tensor]:
        def forward(values: dict[str, Tensor]) -> Tensor:
            return torch.func.functional_call(module, values, (a_i.unsqueeze(0),))

        pull_back = torch.func.vjp(forward, parameters)[1]
        return pull_back(delta_i.unsqueeze(0))[0]

    return list(torch.func.vmap(one)(a, delta).values())


_FORMS: Mapping[Form, Callable[[Block, _Parts, int], PerSampleGradient]] = {
    Form.OUTER: _outer,
    Form.ROWS: _rows,
    Form.TIED: _tied,
    Form.DENSE: _dense,
}
