"""DP-AdamBC: Adam whose second moment is freed of the variance that the noise added to it.

Reference: Tang, Shpilevskiy, Lécuyer, "DP-AdamBC: Your DP-Adam Is Actually DP-SGD (Unless You Apply
Bias Correction)", AAAI 2024, Alg. 1. Departure: weight decay is decoupled, as in AdamW.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from hf_dpkfc.layers.layout import accumulation_dtype

# Their γ': the default (`eps_root`) of both of the authors' implementations.
DEFAULT_FLOOR = 1e-8


def noise_variance_of(
    noise_multiplier: float, clip_norm: float, expected_batch_size: float
) -> float:
    """(σC/B)²: variance of the noise in each coordinate of the noisy mean, from public constants.

    Noise is added in the preconditioned space and applied as it is, so this holds under any
    preconditioner.
    """
    return (noise_multiplier * clip_norm / expected_batch_size) ** 2


class DPAdamBC(Optimizer):
    """θ ← θ − lr·m̂ / √max(v̂ − (σC/B)², floor), with m and v from the noisy mean gradient alone.

    Moments are float32 at least: bf16 can't add a thousandth to itself, and v̂ is compared with
    the noise's variance. State survives ``state_dict`` bit for bit.

    Args:
        params: Parameters or groups of them.
        lr: Learning rate.
        betas: Decay of the first and second moment.
        weight_decay: Decoupled; acts on the weights, not on the gradient.
        noise_variance: (σC/B)², see :func:`noise_variance_of`.
        floor: Smallest debiased second moment, on the squared scale.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        *,
        noise_variance: float,
        floor: float = DEFAULT_FLOOR,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "weight_decay": weight_decay,
            "noise_variance": noise_variance,
            "floor": floor,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter] or self._start(parameter)
        beta1, beta2 = group["betas"]
        noisy_mean = parameter.grad.to(state["m"].dtype)  # type: ignore[union-attr]
        state["step"] += 1
        state["m"].lerp_(noisy_mean, 1 - beta1)
        state["v"].lerp_(noisy_mean.square(), 1 - beta2)
        m_hat = state["m"] / (1 - beta1 ** state["step"])
        v_hat = state["v"] / (1 - beta2 ** state["step"])
        debiased = v_hat.sub_(group["noise_variance"]).clamp_(min=group["floor"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(m_hat.div_(debiased.sqrt_()).to(parameter.dtype), alpha=-group["lr"])

    def _start(self, parameter: Tensor) -> dict[str, Any]:
        moment = torch.zeros_like(parameter, dtype=accumulation_dtype(parameter.dtype))
        self.state[parameter] = {"step": 0, "m": moment, "v": moment.clone()}
        return self.state[parameter]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but moments keep their dtype: torch would round them to the parameters'."""
        super().load_state_dict(state_dict)
        parameters = [p for group in self.param_groups for p in group["params"]]
        for index, saved in state_dict["state"].items():
            own = self.state[parameters[index]]
            own |= {name: saved[name].to(own[name].device, copy=True) for name in ("m", "v")}
