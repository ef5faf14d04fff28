"""DiSK's pair of gradients, combined example by example before anything is clipped.

Reference: Zhang et al., "DiSK: Differentially Private Optimizer with Simplified Kalman Filter for
Noise Reduction", ICLR 2025. For each example,

    g_i = w·∇f_i(x_t + γ d_{t−1}) + (1 − w)·∇f_i(x_t),    d_{t−1} = x_t − x_{t−1}.

Both points are known from earlier releases, and g_i depends on no other example: clipped to C, one
example moves the sum by at most C, exactly as with a single gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_dpkfc.layers.capture import Captured, PerExampleLoss, capture
from hf_dpkfc.layers.routes import RouteTable


@dataclass(frozen=True)
class Lookahead:
    """Where the second gradient is taken, and its weight.

    Attributes:
        weight: w, of the gradient at the look-ahead point.
        point: x_t + γ d_{t−1}, by parameter name.
    """

    weight: float
    point: Mapping[str, Tensor]

    @property
    def amplification(self) -> float:
        """|w| + |1 − w|: by how much rounding may grow against a single gradient's."""
        return abs(self.weight) + abs(1 - self.weight)

    def capture(
        self,
        model: nn.Module,
        table: RouteTable,
        per_example_loss: PerExampleLoss,
        inputs: Mapping[str, Any],
        batch_size: int,
    ) -> Captured:
        """The pair as one pass: calls of one module are positions, so cross terms come for free.

        Both passes draw the same dropout masks: a difference of gradients at two points would
        otherwise be mostly a difference of masks. (torch's random state is rewound; a model that
        draws from Python's or numpy's gets two independent draws, which costs accuracy, not
        privacy.)
        """
        with self._moved(model):
            with _rewound(self.weight != 1):
                ahead = capture(model, table, per_example_loss, inputs, batch_size)
            ahead = ahead.resolved(table)
        if self.weight == 1:
            return ahead
        here = capture(model, table, per_example_loss, inputs, batch_size).resolved(table)
        return ahead.scaled(self.weight) + here.scaled(1 - self.weight)

    @contextmanager
    def _moved(self, model: nn.Module) -> Iterator[None]:
        """The model at the look-ahead point; afterwards its own tensors are back, untouched."""
        parameters = dict(model.named_parameters())
        own = {name: parameters[name].data for name in self.point}
        try:
            for name, value in self.point.items():
                parameters[name].data = value
            yield
        finally:
            for name, value in own.items():
                parameters[name].data = value


@contextmanager
def _rewound(is_wanted: bool) -> Iterator[None]:
    with torch.random.fork_rng(enabled=is_wanted):
        yield
