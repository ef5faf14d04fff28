"""The processes of an Accelerate launch, as a private run sees them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor


@dataclass(frozen=True)
class AcceleratePeers:
    """Peers through Accelerate; a single process talks to nobody.

    Attributes:
        rank: This process.
        world_size: How many there are.
        accelerator: The launch's.
    """

    rank: int
    world_size: int
    accelerator: Accelerator

    def gather(self, value: bytes) -> list[bytes]:
        """Every process's value, in order of rank."""
        return [value] if self.world_size == 1 else gather_object([value])

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value."""
        return value if self.world_size == 1 else broadcast_object_list([value])[0]

    def sum(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sums over all processes, in one message."""
        if self.world_size == 1:
            return dict(values)
        names = sorted(values)
        flat = torch.cat([values[name].flatten() for name in names])
        parts = self.accelerator.reduce(flat, reduction="sum").split(
            [values[name].numel() for name in names]
        )
        return {n: part.view(values[n].shape) for n, part in zip(names, parts, strict=True)}
