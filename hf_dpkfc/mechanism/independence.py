"""One check before training: is an example's gradient its own, and do we have all of it?

A batch of probes is run together and one example at a time. What our rules sum up over the batch
must be autograd's gradient, or a parameter is used in a way that no rule covers; each example's
loss and gradient must be the same among others and alone, or examples depend on their neighbours;
buffers must stay, or statistics of private records would be kept.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hf_dpkfc.errors import NeighbourError, UnsupportedLayerError
from hf_dpkfc.layers.capture import Captured, PerExampleLoss, capture
from hf_dpkfc.layers.layout import accumulation_dtype
from hf_dpkfc.layers.routes import RouteTable

logger = logging.getLogger(__name__)


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
        NeighbourError: If a loss or gradient depends on the neighbours, or a buffer changes.
        UnsupportedLayerError: If a parameter's captured gradient isn't autograd's.
    """
    dtype = next(model.parameters()).dtype
    if dtype != accumulation_dtype(dtype):
        # bf16's rounding would hide that a quarter of a gradient is the neighbours'.
        dtype = accumulation_dtype(dtype)
        model = copy.deepcopy(model).to(dtype)
        together, alone = _cast(together, dtype), [_cast(inputs, dtype) for inputs in alone]
    tolerances = _tolerances(dtype)
    try:
        _check(model, table, per_example_loss, together, alone, tolerances)
    except (NeighbourError, UnsupportedLayerError) as doubt:
        if dtype == torch.float64:
            raise
        # Rounding at saturated weights, or a true dependence? To the same tolerance in float64,
        # only the latter is left.
        wide = copy.deepcopy(model).double()
        try:
            singles = [_cast(inputs, torch.float64) for inputs in alone]
            whole = _cast(together, torch.float64)
            _check(wide, table, per_example_loss, whole, singles, tolerances)
        except Exception:  # also where model, loss or device know no float64: the doubt stands
            raise doubt from None


def _cast(inputs: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {
        name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }


def _check(
    model: nn.Module,
    table: RouteTable,
    per_example_loss: PerExampleLoss,
    together: Mapping[str, Any],
    alone: Sequence[Mapping[str, Any]],
    tolerances: tuple[float, float],
) -> None:
    loss_tolerance, gradient_tolerance = tolerances
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    captured = capture(model, table, per_example_loss, together, len(alone))
    everyone = torch.ones_like(captured.losses).to(accumulation_dtype(captured.losses.dtype))
    whole = _gradients(model, table, per_example_loss(model, together))
    _require_covered(_captured_sum(captured, table, everyone), whole, gradient_tolerance)
    for i, inputs in enumerate(alone):
        losses = per_example_loss(model, inputs)
        own = _gradients(model, table, losses)
        only_i = torch.zeros_like(everyone)
        only_i[i] = 1
        _require_own_loss(i, captured.losses[i], losses.detach()[0], loss_tolerance)
        ours = _captured_sum(captured, table, only_i)
        name, difference = _largest_difference(ours, own)
        if difference > gradient_tolerance:
            among_others = _gradients(model, table, per_example_loss(model, together)[i : i + 1])
            is_its_own = _largest_difference(among_others, own)[1] <= gradient_tolerance
            raise _shared(name, i) if is_its_own else _depends(_gradient(name, difference), i)
    with _training_without_dropout(model), torch.no_grad():
        _check_losses(model, per_example_loss, together, alone, loss_tolerance)
    _require_same_buffers(model, buffers)


def _check_losses(
    model: nn.Module,
    per_example_loss: PerExampleLoss,
    together: Mapping[str, Any],
    alone: Sequence[Mapping[str, Any]],
    tolerance: float,
) -> None:
    """A model may mix examples, or keep statistics of them, only while it trains."""
    losses = per_example_loss(model, together)
    if not torch.equal(losses, per_example_loss(model, together)):
        logger.warning(
            "The model draws at random while it trains, other than by dropout, so the "
            "neighbour check saw it in eval mode only."
        )
        return
    for i, inputs in enumerate(alone):
        _require_own_loss(i, losses[i], per_example_loss(model, inputs)[0], tolerance)


@contextmanager
def _training_without_dropout(model: nn.Module) -> Iterator[None]:
    """Train mode, but for what draws at random; eval mode afterwards."""
    with torch.random.fork_rng(), _NoDropout():
        model.train()
        try:
            yield
        finally:
            model.eval()


class _NoDropout(TorchFunctionMode):
    """Dropout at rate zero wherever it is called: by modules, or inside fused attention."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


_DROPOUTS = (
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
    torch.dropout,
)


def _tolerances(dtype: torch.dtype) -> tuple[float, float]:
    """Of losses and of gradients: another padding changes only the order of sums."""
    eps = torch.finfo(dtype).eps
    return 2.0**7 * eps, min(0.25, 2.0**13 * eps)


def _gradients(model: nn.Module, table: RouteTable, losses: Tensor) -> dict[str, Tensor]:
    """Autograd's own, by parameter name; zero where the loss doesn't depend on a parameter."""
    parameters = dict(model.named_parameters())
    names = [name for block in table for name in block.parameters]
    grads = torch.autograd.grad(losses.sum(), [parameters[n] for n in names], allow_unused=True)
    return {
        name: torch.zeros_like(parameters[name]) if grad is None else grad
        for name, grad in zip(names, grads, strict=True)
    }


def _captured_sum(captured: Captured, table: RouteTable, weights: Tensor) -> dict[str, Tensor]:
    """Our rules' weighted sum, by parameter name; blocks that weren't reached are left out."""
    parts: dict[str, Tensor] = {}
    for block in table:
        gradient = captured.gradient(block)
        if gradient is not None:
            parts |= block.split(gradient.weighted_sum(weights))
    return parts


def _largest_difference(
    ours: Mapping[str, Tensor], autograds: Mapping[str, Tensor]
) -> tuple[str, float]:
    """The parameter with the largest difference, relative to its own gradient's norm.

    Norms below 2^-13 of the whole gradient's count as that much: a key's bias, whose gradient is
    zero but for rounding, has no direction to compare.
    """
    norms = {name: float(grad.double().norm()) for name, grad in autograds.items()}
    floor = max(1e-9, 2.0**-13 * sum(norm**2 for norm in norms.values()) ** 0.5)
    relative = {
        name: float((ours[name] - grad).double().norm() if name in ours else norms[name])
        / max(norms[name], floor)
        for name, grad in autograds.items()
    }
    worst = max(relative, key=lambda name: relative[name])
    return worst, relative[worst]


def _require_covered(
    ours: Mapping[str, Tensor], autograds: Mapping[str, Tensor], tolerance: float
) -> None:
    name, difference = _largest_difference(ours, autograds)
    if difference > tolerance:
        raise UnsupportedLayerError(
            f"The gradient of {name} by our rule differs from autograd's by {difference:.2g}.",
            why="the parameter is used somewhere that the rule doesn't see, so part of its "
            "gradient would escape the clip norm.",
            way_out="freeze it with requires_grad_(False), or register a rule with "
            "opacus.grad_sample.register_grad_sampler.",
        )


def _require_own_loss(i: int, in_batch: Tensor, alone: Tensor, tolerance: float) -> None:
    if (in_batch - alone).abs() > tolerance * alone.abs().clamp(min=1.0):
        raise _depends(f"loss {in_batch:.6g} among others and {alone:.6g} alone", i)


def _gradient(name: str, difference: float) -> str:
    return f"a gradient of {name} that differs by {difference:.2g} among others"


def _shared(name: str, i: int) -> UnsupportedLayerError:
    return UnsupportedLayerError(
        f"The rule for {name} gives example {i} of a probe batch a share of the others' gradients.",
        why="the module's output isn't one row per example (a table of relative positions, for "
        "instance), so gradients can't be told apart by example.",
        way_out="freeze it with requires_grad_(False).",
    )


def _depends(what: str, i: int) -> NeighbourError:
    return NeighbourError(
        f"Example {i} of a probe batch has {what}.",
        why="clipping one example's gradient bounds its influence only if it has none on the "
        "others'.",
        way_out="use a loss, collator and model that treat examples separately: no packing, "
        "mixup or in-batch negatives; with left padding, position_ids from the mask.",
    )


def _require_same_buffers(model: nn.Module, before: Mapping[str, Tensor]) -> None:
    for name, buffer in model.named_buffers():
        if name in before and not torch.equal(before[name], buffer):
            raise NeighbourError(
                f"The buffer {name} changes during a forward pass.",
                why="it would keep a statistic of private records without noise.",
                way_out="replace the module by one without running statistics.",
            )
