"""ε of the subsampled Gaussian mechanism, and the noise that a target ε needs; by Opacus."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from opacus.accountants import PRVAccountant, RDPAccountant
from opacus.accountants.analysis.rdp import compute_rdp, get_privacy_spent
from opacus.accountants.utils import get_noise_multiplier

from hf_dpkfc.errors import ConfigurationError

ACCOUNTANTS = ("rdp", "prv")

# Opacus' orders end at 63, where the conversion to (ε, δ) alone costs 0.1; the added ones make
# small ε reachable. A superset of orders can only lower the bound.
RDP_ORDERS = (*RDPAccountant.DEFAULT_ALPHAS, 80.0, 96.0, 128.0, 192.0, 256.0, 384.0, 512.0, 1024.0)

# PRV's grid grows with ε: some gigabytes at ε = 500. No guarantee worth a second opinion is there.
MAX_PRV_EPSILON = 250.0

# Calibration stops when ε is within this share below the target.
CALIBRATION_TOLERANCE = 0.005


def epsilon(
    noise_multiplier: float, rate: float, steps: int, delta: float, accountant: str = "rdp"
) -> float:
    """ε spent by ``steps`` Poisson-subsampled Gaussian releases at ``delta``.

    Edge cases: no step costs nothing; no noise costs everything.
    """
    _require_known(accountant)
    if steps == 0:
        return 0.0
    if noise_multiplier == 0:
        return float("inf")
    return composed_epsilon([(noise_multiplier, rate, steps)], delta, accountant)


def composed_epsilon(
    runs: Sequence[tuple[float, float, int]], delta: float, accountant: str = "rdp"
) -> float:
    """ε of several runs on the same records, each (noise_multiplier, rate, steps)."""
    with warnings.catch_warnings():
        # Opacus warns where the best order is the first or last; ours reach further.
        warnings.simplefilter("ignore", UserWarning)
        if accountant == "prv":
            _require_small_enough_for_prv(composed_epsilon(runs, delta))
            prv = PRVAccountant()
            prv.history = list(runs)
            return float(prv.get_epsilon(delta=delta))
        curve = sum(steps * _rdp_of_one_step(sigma, rate) for sigma, rate, steps in runs)
        return float(get_privacy_spent(orders=RDP_ORDERS, rdp=curve, delta=delta)[0])


def rdp_curve(noise_multiplier: float, rate: float, steps: int) -> list[tuple[float, float]]:
    """(order, Rényi divergence) of ``steps`` releases, over :data:`RDP_ORDERS`."""
    curve = steps * _rdp_of_one_step(noise_multiplier, rate)
    return list(zip(RDP_ORDERS, map(float, curve), strict=True))


@lru_cache(maxsize=64)
def _rdp_of_one_step(noise_multiplier: float, rate: float) -> Any:
    """The RDP curve of one release over :data:`RDP_ORDERS`; steps add up."""
    return compute_rdp(q=rate, noise_multiplier=noise_multiplier, steps=1, orders=RDP_ORDERS)


def calibrate(
    target_epsilon: float, rate: float, steps: int, delta: float, accountant: str = "rdp"
) -> float:
    """The smallest noise multiplier whose ε is within 0.5 % below the target, never above.

    Raises:
        ConfigurationError: If no amount of noise reaches the target.
    """
    _require_known(accountant)
    options = {"alphas": RDP_ORDERS} if accountant == "rdp" else {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return float(
                get_noise_multiplier(
                    target_epsilon=target_epsilon,
                    target_delta=delta,
                    sample_rate=rate,
                    steps=steps,
                    accountant=accountant,
                    epsilon_tolerance=CALIBRATION_TOLERANCE * target_epsilon,
                    **options,
                )
            )
    except ValueError as error:
        raise ConfigurationError(
            f"target_epsilon={target_epsilon} can't be reached with {steps} steps at rate "
            f"{rate:.3g} and δ = {delta:.3g}.",
            why=f"the {accountant} accountant finds no noise multiplier for it.",
            way_out="raise target_epsilon or target_delta, or take fewer steps.",
        ) from error


def _require_small_enough_for_prv(rdp_epsilon: float) -> None:
    if rdp_epsilon > MAX_PRV_EPSILON:
        raise ConfigurationError(
            f"ε = {rdp_epsilon:.4g} by PRV.",
            why=f"its memory grows with ε, and above {MAX_PRV_EPSILON:g} nothing is protected.",
            way_out="raise the noise, or use accountant='rdp'.",
        )


def _require_known(accountant: str) -> None:
    if accountant not in ACCOUNTANTS:
        raise ConfigurationError(
            f"accountant={accountant!r}.",
            why="there is no such accountant.",
            way_out=f"choose one of {', '.join(ACCOUNTANTS)}.",
        )
