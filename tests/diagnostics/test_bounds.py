"""The bounds hold at their confidence, and are close to the truth where they can be."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binom, norm

from hf_dpkfc import PrivacyPlan
from hf_dpkfc.diagnostics.bounds import (
    CurveTradeOff,
    GaussianTradeOff,
    Guesses,
    claim_of,
    clopper_pearson_upper,
    errors,
    gaussian_bound,
    is_refuted,
)


def test_clopper_pearson_misses_as_often_as_it_says():
    """By enumeration, not by simulation: P[bound < p] ≤ miss for every p."""
    bounds = np.array([clopper_pearson_upper(k, 40, 0.01) for k in range(41)])
    for p in np.linspace(0.01, 0.99, 50):
        assert binom.pmf(np.flatnonzero(bounds < p), 40, p).sum() <= 0.01


def test_the_gaussian_bound_approaches_mu():
    """A million scores in each world, with their expected errors."""
    wrong = round(10**6 * norm.cdf(-0.5))
    bound = gaussian_bound(wrong, wrong, 10**6, 0.9999)
    assert 0.98 < bound < 1.0


def test_no_difference_gives_no_bound():
    assert gaussian_bound(500, 500, 1000, 0.9999) == 0.0


def test_errors_are_counted_on_both_sides():
    assert errors(np.array([0.0, 2.0]), np.array([0.5, 3.0, 4.0]), 1.0) == (1, 1)


@pytest.mark.statistical
@pytest.mark.parametrize("mu", [0.0, 0.3, 1.0])
def test_a_true_claim_is_refuted_no_more_often_than_stated(mu):
    """500 games on an exactly μ-GDP mechanism; more than 53 refutations at 5 % have p < 1e-6."""
    rng, m = np.random.default_rng(0), 60
    refuted = 0
    for _ in range(500):
        is_in = rng.random(m) < 0.5
        order = np.argsort(rng.normal(size=m) + mu * is_in)
        correct = int(is_in[order[30:]].sum() + (~is_in[order[:30]]).sum())
        refuted += is_refuted(GaussianTradeOff(mu), m, m, correct, 0.05)
    assert binom.sf(53, 500, 0.05) < 1e-6
    assert refuted <= 53


def test_perfect_guesses_refute_any_modest_claim():
    assert is_refuted(GaussianTradeOff(0.5), 512, 256, 256, 1e-6)
    assert not is_refuted(GaussianTradeOff(0.5), 512, 256, 200, 1e-6)


def test_a_coin_gives_the_binomial_tail():
    """No leak at all: c' of c right has the tail of fair coins, which the recursion recovers."""
    tail = binom.sf(44, 60, 0.5)
    assert is_refuted(GaussianTradeOff(0.0), 60, 60, 45, 1.3 * tail)
    assert not is_refuted(GaussianTradeOff(0.0), 60, 60, 45, 0.99 * tail)


def test_the_renyi_claim_is_weaker_than_the_exact_one():
    """Rate 1 computed both ways: a weaker claim allows fewer false positives at any power."""
    exact, renyi = claim_of(2.0, 1.0, 4), claim_of(2.0, 1.0 - 1e-9, 4)
    assert isinstance(renyi, CurveTradeOff)
    for power in (0.1, 0.5, 0.9, 0.99):
        assert renyi(power) <= exact(power) + 1e-9
        assert renyi(power) >= 0.2 * exact(power)


def test_the_bound_in_epsilon_is_that_of_some_noise():
    plan = PrivacyPlan(4.0, 1.0, 50, 100, 10, 1e-5)
    bound = Guesses(512, 256, 256).epsilon_bound(plan, 0.9999)
    assert plan.epsilon < bound < replace(plan, noise_multiplier=0.4).epsilon
    assert Guesses(512, 256, 130).epsilon_bound(plan, 0.9999) == 0.0
