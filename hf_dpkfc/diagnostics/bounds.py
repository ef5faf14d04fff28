"""From an attacker's success to a lower bound on what a mechanism leaks.

Every verdict here is valid at its stated confidence whatever the attack: a poor one makes a bound
small, never wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
from scipy.stats import beta

from hf_dpkfc.privacy.accounting import rdp_curve
from hf_dpkfc.privacy.plan import PrivacyPlan

_NORMAL = NormalDist()

# ε at which a Rényi curve is turned into (ε, δ) pairs; more points only tighten the claim.
_EPSILONS = np.concatenate([np.linspace(0, 10, 401), np.linspace(10.1, 100, 400)])

# How far from the claimed noise a bound is looked for, as a factor on either side.
_LARGEST_FACTOR = 2.0**10

# Of that range: the bound's noise is then found to a tenth of a percent, rounded to the safe side.
_HALVINGS = 14

# (y) -> the least false-positive rate at which a test can have power y.
LeastFalsePositives = Callable[[float], float]


def clopper_pearson_upper(events: int, trials: int, miss: float) -> float:
    """Upper bound on a probability; below the truth with probability at most ``miss``."""
    return 1.0 if events >= trials else float(beta.ppf(1 - miss, events + 1, trials - events))


def gaussian_bound(
    false_positives: int, false_negatives: int, trials: int, confidence: float
) -> float:
    """Lower bound on μ of the Gaussian trade-off function, from one fixed test's errors.

    A μ-GDP mechanism has Φ⁻¹(1−α) − Φ⁻¹(β) ≤ μ for every test with errors α and β (Dong, Roth and
    Su 2022); both errors are bounded from above by Clopper and Pearson, each at half the miss.

    Args:
        false_positives: Of ``trials`` without the canary.
        false_negatives: Of ``trials`` with it.
        trials: In each of the two worlds.
        confidence: With which the bound holds.
    """
    miss = (1 - confidence) / 2
    errors = (clopper_pearson_upper(n, trials, miss) for n in (false_positives, false_negatives))
    return max(0.0, -sum(_quantile(error) for error in errors))


def best_threshold(without: np.ndarray, with_it: np.ndarray, confidence: float) -> float:
    """The threshold whose test gives the largest bound on these scores.

    The test itself must then be run on other scores than those that chose it.
    """
    candidates = np.quantile(np.concatenate([without, with_it]), np.linspace(0.02, 0.98, 97))
    bounds = [
        gaussian_bound(*errors(without, with_it, t), min(len(without), len(with_it)), confidence)
        for t in candidates
    ]
    best = np.flatnonzero(np.equal(bounds, max(bounds)))
    return float(candidates[best[len(best) // 2]])


def errors(without: np.ndarray, with_it: np.ndarray, threshold: float) -> tuple[int, int]:
    """False positives and false negatives of "in, if the score is above the threshold"."""
    return int((without > threshold).sum()), int((with_it <= threshold).sum())


def is_refuted(
    least_false_positives: LeastFalsePositives,
    num_canaries: int,
    num_guesses: int,
    num_correct: int,
    miss: float,
) -> bool:
    """Whether a claim gives so many correct guesses a probability below ``miss``.

    One run: each of m canaries is in or out by a fair coin, and the attacker guesses c of the m
    coins. With p_i the probability of i correct guesses, u a uniformly chosen canary, and
    r_i = Σ_{j≥i} (j/m)·p_j, h_i = Σ_{j≥i} ((c−j)/m)·p_j, flipping u's coin turns "u right, i−1
    others right" into "u wrong, i−1 others right", so r_i ≤ 1 − f(h_{i−1}) under f-DP. Were the
    tail at c' as likely as ``miss``, the least mass consistent with all of these inequalities
    must fit into r_0 + h_0 = c/m.

    Reference: Mahloujifar, Melis and Chaudhuri 2024, "Auditing f-differential privacy in one run".
    """
    r = miss * num_correct / num_canaries
    h = miss * (num_guesses - num_correct) / num_canaries
    for i in range(num_correct - 1, -1, -1):
        needed = max(h, least_false_positives(min(1.0, r)))
        r, h = r + i / (num_guesses - i) * (needed - h), needed
    return r + h > num_guesses / num_canaries


@dataclass(frozen=True)
class GaussianTradeOff:
    """The claim of μ-Gaussian differential privacy."""

    mu: float

    def __call__(self, power: float) -> float:
        """Least false-positive rate at this power."""
        return 0.0 if power <= 0 else _NORMAL.cdf(_quantile(power) - self.mu)


@dataclass(frozen=True)
class CurveTradeOff:
    """The claim of (ε, δ) for a whole curve of pairs, in both directions."""

    epsilons: np.ndarray
    deltas: np.ndarray

    def __call__(self, power: float) -> float:
        """Least false-positive rate at this power, allowed by every pair."""
        rising = (power - self.deltas) * np.exp(-self.epsilons)
        falling = 1 - self.deltas - np.exp(self.epsilons) * (1 - power)
        return float(max(0.0, rising.max(), falling.max()))


def claim_of(noise_multiplier: float, rate: float, steps: int) -> LeastFalsePositives:
    """The trade-off that a plan's releases promise.

    Exact at rate 1, where T Gaussian releases are √T/σ-GDP; below it from the Rényi curve, by the
    conversion of Canonne, Kamath and Steinke 2020.
    """
    if rate == 1:
        return GaussianTradeOff(math.sqrt(steps) / noise_multiplier)
    orders, divergences = np.asarray(rdp_curve(noise_multiplier, rate, steps)).T
    orders, divergences = orders[orders > 1, None], divergences[orders > 1, None]
    log_deltas = (orders - 1) * (divergences - _EPSILONS + np.log1p(-1 / orders)) - np.log(orders)
    return CurveTradeOff(_EPSILONS, np.exp(np.minimum(0.0, log_deltas.min(0))))


@dataclass(frozen=True)
class Guesses:
    """What an attacker on one run got right."""

    num_canaries: int
    num_guesses: int
    num_correct: int

    def epsilon_bound(self, plan: PrivacyPlan, confidence: float) -> float:
        """ε at the plan's δ, as the accountant states it, of the least noise that is refuted.

        The claim is accounted in the same way, so bound and claim compare as their noises do. The
        accountant's ε is itself an upper bound: this isn't one on the least ε that would be true.

        Args:
            plan: The claim, around whose noise the bound is looked for.
            confidence: With which the bound holds.
        """

        def refuted(log_factor: float) -> bool:
            sigma = plan.noise_multiplier * math.exp(log_factor)
            claim = claim_of(sigma, plan.sampling_rate, plan.steps)
            return is_refuted(
                claim, self.num_canaries, self.num_guesses, self.num_correct, 1 - confidence
            )

        high, low = math.log(_LARGEST_FACTOR), -math.log(_LARGEST_FACTOR)
        if not refuted(high):
            return 0.0
        for _ in range(_HALVINGS):
            middle = (high + low) / 2
            high, low = (middle, low) if refuted(middle) else (high, middle)
        return replace(plan, noise_multiplier=plan.noise_multiplier * math.exp(high)).epsilon


def _quantile(probability: float) -> float:
    if probability <= 0:
        return -math.inf
    return math.inf if probability >= 1 else _NORMAL.inv_cdf(probability)
