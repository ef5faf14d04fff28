"""The door: whatever a module saw and sent back becomes ``[batch, position, feature]`` here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Norms and sums are taken in float32 at least: bf16 norms come out up to 0.5 % short."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Matrix products in their operands' own precision, whatever is allowed elsewhere.

    TF32 and autocast are fine for a model's forward and backward pass. In norms and sums, their ten
    or seven bits would carry an example over its clip norm.
    """
    with torch.autocast(device.type, enabled=False):
        if not hasattr(torch.backends, "fp32_precision"):  # before torch 2.9
            allowed = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision("highest")
            try:
                yield
            finally:
                torch.set_float32_matmul_precision(allowed)
            return
        backends: tuple[Any, ...] = (
            torch.backends.cuda.matmul,
            torch.backends.mkldnn.matmul,  # type: ignore[attr-defined]
        )
        before = [backend.fp32_precision for backend in backends]
        try:
            for backend in backends:
                backend.fp32_precision = "ieee"
            yield
        finally:
            for backend, precision in zip(backends, before, strict=True):
                backend.fp32_precision = precision


def to_positions(x: Tensor, batch_size: int) -> Tensor:
    """[batch, ..., feature] or [batch·k, ..., feature] as [batch, position, feature]."""
    return x.to(accumulation_dtype(x.dtype)).reshape(batch_size, -1, x.shape[-1])


def ids_to_positions(ids: Tensor, batch_size: int) -> Tensor:
    """Row numbers of any shape as [batch, position]."""
    return ids.reshape(batch_size, -1)


def conv_input_patches(module: nn.Conv2d, x: Tensor, batch_size: int) -> Tensor:
    """im2col: [batch·k, channel, height, width] as [batch·groups, k·patch, channel/groups·kh·kw].

    An example may have several images (a video's frames): their patches are its positions.
    """
    x = x.to(accumulation_dtype(x.dtype))
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    windows = F.pad(x, _conv_padding(module), mode=mode)
    for axis, dim in enumerate((2, 3)):
        reach = module.dilation[axis] * (module.kernel_size[axis] - 1) + 1
        windows = windows.unfold(dim, reach, module.stride[axis])[..., :: module.dilation[axis]]
    # [batch, channel, height, width, kh, kw]; one copy of a view, faster than F.unfold.
    columns = windows.permute(0, 1, 4, 5, 2, 3).flatten(4).flatten(1, 3)
    return _split_groups(columns, module.groups, batch_size)


def conv_output_positions(module: nn.Conv2d, delta: Tensor, batch_size: int) -> Tensor:
    """[batch·k, channel, height, width] as [batch·groups, k·patch, channel/groups]."""
    wide = delta.to(accumulation_dtype(delta.dtype)).flatten(2)
    return _split_groups(wide, module.groups, batch_size)


def _split_groups(x: Tensor, groups: int, batch_size: int) -> Tensor:
    """[batch·k, groups·feature, position] as [batch·groups, k·position, feature]."""
    rows, features, positions = x.shape
    per_example, width = rows // batch_size, features // groups
    parts = x.reshape(batch_size, per_example, groups, width, positions)
    return parts.permute(0, 2, 1, 4, 3).reshape(batch_size * groups, -1, width)


def _conv_padding(module: nn.Conv2d) -> list[int]:
    """Left, right, top, bottom, as F.pad wants it (last dimension first)."""
    if module.padding == "valid":
        return [0, 0, 0, 0]
    pads: list[int] = []
    for axis in (1, 0):
        if module.padding == "same":
            total = module.dilation[axis] * (module.kernel_size[axis] - 1)
            pads += [total // 2, total - total // 2]
        else:
            amount = module.padding[axis]
            assert isinstance(amount, int)
            pads += [amount, amount]
    return pads
