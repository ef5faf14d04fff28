"""One check before training: is an example's gradient its own, and do we have all of it?

A batch of probes is run together and one example at a time. Losses must agree, or examples depend
on their neighbours; gradient norms must agree with autograd's, or a parameter is used in a way
that no rule covers; buffers must stay, or statistics of private records would be kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_dpkfc.errors import NeighbourError, UnsupportedLayerError
from hf_dpkfc.layers.capture import PerExampleLoss, capture
from hf_dpkfc.layers.routes import Block, RouteTable

# Padding to another length changes the order of float32 sums; a dependence is far larger than this.
TOLERANCE = {torch.float64: 1e-6}
LOOSE_TOLERANCE = 1e-2


def check_independence(
    model: nn.Module,
    table: RouteTable,
    per_example_loss: PerExampleLoss,
    together: Mapping[str, Any],
    alone: Sequence[Mapping[str, Any]],
) -> None:
    """Raise unless every example's loss and gradient are its own and fully accounted for.

    Args:
        model: In eval mode, so that dropout doesn't hide a dependence.
        table: Its routes.
        per_example_loss: (model, inputs) -> [batch].
        together: Several examples of different lengths, as one batch.
        alone: The same examples, each as a batch of one.

    Raises:
        NeighbourError: If a loss depends on the neighbours, or a buffer changes.
        UnsupportedLayerError: If a parameter's captured gradient isn't autograd's.
    """
    tolerance = TOLERANCE.get(next(model.parameters()).dtype, LOOSE_TOLERANCE)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    captured = capture(model, table, per_example_loss, together, len(alone))
    norms = {
        block.name: gradient.sq_norms().sqrt()
        for block in table
        if (gradient := captured.gradient(block)) is not None
    }
    for i, inputs in enumerate(alone):
        loss = per_example_loss(model, inputs)
        _require_own_loss(i, captured.losses[i], loss.detach()[0], tolerance)
        _require_own_gradient(i, model, table, norms, loss, tolerance)
    _require_same_buffers(model, buffers)


def _require_own_loss(i: int, in_batch: Tensor, alone: Tensor, tolerance: float) -> None:
    if (in_batch - alone).abs() > tolerance * alone.abs().clamp(min=1.0):
        raise NeighbourError(
            f"Example {i} of a probe batch has loss {in_batch:.6g} among others and "
            f"{alone:.6g} alone.",
            why="clipping one example's gradient bounds its influence only if it has none on the "
            "others'.",
            way_out="use a loss, collator and model that treat examples separately: no packing, "
            "mixup or in-batch negatives; with left padding, position_ids from the mask.",
        )


def _require_own_gradient(
    i: int,
    model: nn.Module,
    table: RouteTable,
    norms: Mapping[str, Tensor],
    loss: Tensor,
    tolerance: float,
) -> None:
    parameters = dict(model.named_parameters())
    trainable = {n: parameters[n] for block in table for n in block.parameters}
    grads = torch.autograd.grad(loss.sum(), list(trainable.values()), allow_unused=True)
    by_name = dict(zip(trainable, grads, strict=True))
    expected = {block.name: _norm(block, by_name) for block in table}
    scale = sum(value**2 for value in expected.values()) ** 0.5
    for block in table:
        captured = float(norms[block.name][i]) if block.name in norms else 0.0
        if abs(captured - expected[block.name]) > tolerance * max(scale, 1e-6):
            raise UnsupportedLayerError(
                f"The gradient of {', '.join(block.parameters)} has norm {captured:.6g} by our "
                f"rule and {expected[block.name]:.6g} by autograd.",
                why="the parameter is used somewhere that the rule doesn't see, so part of its "
                "gradient would escape the clip norm.",
                way_out="freeze it with requires_grad_(False), or register a rule with "
                "opacus.grad_sample.register_grad_sampler.",
            )


def _norm(block: Block, grads: Mapping[str, Tensor | None]) -> float:
    squares = [g.double().square().sum() for n in block.parameters if (g := grads[n]) is not None]
    return float(sum(squares)) ** 0.5


def _require_same_buffers(model: nn.Module, before: Mapping[str, Tensor]) -> None:
    for name, buffer in model.named_buffers():
        if name in before and not torch.equal(before[name], buffer):
            raise NeighbourError(
                f"The buffer {name} changes during a forward pass.",
                why="it would keep a statistic of private records without noise.",
                way_out="replace the module by one without running statistics.",
            )
