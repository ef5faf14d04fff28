from __future__ import annotations

import itertools
import math
import random

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from opacus.accountants.analysis.rdp import get_privacy_spent

from hf_dpkfc.errors import ConfigurationError
from hf_dpkfc.privacy.accounting import RDP_ORDERS, calibrate, epsilon, rdp_curve


def google(accountant, sigma, rate, steps, delta):
    event = dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma)), steps
    )
    return accountant.compose(event).get_epsilon(delta)


def test_the_anchor():
    """(σ 1, q .01, T 1000, δ 1e-5): RDP 2.1014, PLD 1.8282."""
    setting = (1.0, 0.01, 1000, 1e-5)
    assert epsilon(*setting) == pytest.approx(2.1014, abs=1e-4)
    assert google(PLDAccountant(), *setting) == pytest.approx(1.8282, abs=1e-3)


GRID = list(
    itertools.product([0.6, 0.8, 1.0, 2.0, 6.0], [0.001, 0.01, 0.2], [1, 30, 1000], [1e-5, 1e-7])
)


# At rate 0.2 Google's fractional orders don't converge; there only "not below PLD" is claimed.
@pytest.mark.parametrize("setting", [s for s in GRID if s[1] <= 0.01][::3], ids=str)
def test_rdp_equals_googles_on_the_same_orders(setting):
    theirs = google(RdpAccountant(list(RDP_ORDERS)), *setting)
    assert epsilon(*setting) == pytest.approx(theirs, rel=1e-3, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("setting", GRID, ids=str)
def test_no_accountant_is_below_pld(setting):
    pld = google(PLDAccountant(), *setting)
    assert epsilon(*setting) >= pld * (1 - 1e-3) - 1e-3
    assert epsilon(*setting, accountant="prv") >= pld * (1 - 0.02) - 2e-2


def random_settings(count, seed):
    """(σ, rate, steps, δ), log-uniform over what trainings use, up to ε ≈ 20."""
    rng, found = random.Random(seed), []

    def between(low, high):
        return math.exp(rng.uniform(math.log(low), math.log(high)))

    while len(found) < count:
        sigma, rate, steps = between(0.6, 10), between(1e-3, 0.3), round(between(1, 3000))
        # Gaussian differential privacy's limit (Dong, Roth and Su 2022); μ = 4 is ε ≈ 20.
        if rate * math.sqrt(steps * math.expm1(sigma**-2)) < 4:
            found.append((sigma, rate, steps, between(1e-8, 1e-4)))
    return found


@pytest.mark.slow
def test_rdp_is_never_below_pld_in_300_settings(figure):
    margins = []
    for setting in random_settings(300, seed=0):
        sigma, rate, *_ = setting
        # A step's loss is about rate/σ: a coarser grid would round it up, 3,000 times over.
        interval = min(1e-3, rate / sigma / 10)
        pld = google(PLDAccountant(value_discretization_interval=interval), *setting)
        margins.append(epsilon(*setting) - pld)
        assert margins[-1] >= 0, setting
    figure(f"{len(margins)} settings, smallest ε(RDP) − ε(PLD) = {min(margins):.2g}")


@pytest.mark.slow
def test_rdp_equals_googles_in_300_settings(figure):
    """On the integer orders, where Google's series converges at every rate."""
    orders = [order for order in RDP_ORDERS if order == int(order) and order > 1]
    errors = []
    for sigma, rate, steps, delta in random_settings(300, seed=1):
        theirs = google(RdpAccountant(orders), sigma, rate, steps, delta)
        curve = [d for order, d in rdp_curve(sigma, rate, steps) if order in orders]
        ours = get_privacy_spent(orders=orders, rdp=curve, delta=delta)[0]
        errors.append(abs(ours - theirs) / max(theirs, 1e-3))
    figure(f"{len(errors)} settings, largest relative difference {max(errors):.1e}")
    assert max(errors) < 1e-3


@pytest.mark.slow
def test_calibration_hits_500_targets(figure):
    rng = random.Random(2)
    shares = []
    for _, rate, steps, delta in random_settings(500, seed=2):
        target = math.exp(rng.uniform(math.log(0.1), math.log(20)))
        shares.append(epsilon(calibrate(target, rate, steps, delta), rate, steps, delta) / target)
    figure(f"{len(shares)} targets, ε/target in [{min(shares):.4f}, {max(shares):.4f}]")
    assert 0.99 <= min(shares)
    assert max(shares) <= 1


@pytest.mark.parametrize("target", [0.05, 0.3, 1.0, 3.0, 8.0, 40.0])
@pytest.mark.parametrize("rate", [0.002, 0.05, 1.0])
@pytest.mark.parametrize("steps", [1, 200])
def test_calibration_spends_99_percent_and_never_more(target, rate, steps):
    sigma = calibrate(target, rate, steps, 1e-5)
    assert 0.99 * target <= epsilon(sigma, rate, steps, 1e-5) <= target


def test_no_step_is_free_and_no_noise_is_infinite():
    assert epsilon(1.0, 0.1, 0, 1e-5) == 0.0
    assert epsilon(0.0, 0.1, 1, 1e-5) == math.inf


def test_an_unknown_accountant_is_refused():
    with pytest.raises(ConfigurationError, match="rdp, prv"):
        epsilon(1.0, 0.1, 1, 1e-5, "moments")


def test_an_unreachable_target_is_refused():
    with pytest.raises(ConfigurationError, match="can't be reached"):
        calibrate(1e-6, 1.0, 10**6, 1e-12)
