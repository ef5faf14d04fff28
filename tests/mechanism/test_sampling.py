from __future__ import annotations

import math

import numpy as np
import pytest

from hf_dpkfc.errors import ConfigurationError
from hf_dpkfc.mechanism.randomness import SecretKey, StepRandomness
from hf_dpkfc.mechanism.sampling import PoissonSampler

KEY = SecretKey(bytes(32))
N, Q, STEPS = 200, 0.1, 5000


def at(step, secure=False):
    return StepRandomness(KEY, step, b"", secure)


@pytest.fixture(scope="module")
def membership():
    """[step, record]: who was drawn when."""
    sampler = PoissonSampler(N, Q, 8)
    table = np.zeros((STEPS, N))
    for step in range(STEPS):
        table[step, sampler.draw(at(step))] = 1
    return table


@pytest.mark.statistical
def test_every_record_enters_with_the_public_rate(membership):
    # 200 two-sided tests at 6.5 standard deviations: false-alarm probability 200·8e-11 = 2e-8.
    bound = 6.5 * math.sqrt(Q * (1 - Q) / STEPS)
    assert np.abs(membership.mean(0) - Q).max() < bound


@pytest.mark.statistical
def test_the_mean_batch_size_is_the_expected_one(membership, figure):
    # All 10^6 draws together see a rate that is off by 2 %; six standard deviations: 2e-9.
    off = abs(membership.mean() - Q)
    figure(f"rate off by {off / Q:.2%} over {membership.size:,} draws")
    assert off < 6 * math.sqrt(Q * (1 - Q) / membership.size)


@pytest.mark.statistical
def test_records_enter_independently_of_each_other(membership):
    # 19,900 pairs at 7 standard deviations: false-alarm probability 5e-8.
    centred = membership - Q
    covariance = centred.T @ centred / STEPS
    off_diagonal = covariance[~np.eye(N, dtype=bool)]
    assert np.abs(off_diagonal).max() < 7 * Q * (1 - Q) / math.sqrt(STEPS)


@pytest.mark.statistical
def test_batch_sizes_have_the_binomial_variance(membership):
    # Relative standard deviation of a sample variance is √(2/n); six of them: 2e-9.
    sizes = membership.sum(1)
    assert abs(sizes.var() / (N * Q * (1 - Q)) - 1) < 6 * math.sqrt(2 / STEPS)


@pytest.mark.statistical
def test_steps_are_independent(membership):
    centred = membership - Q
    lagged = (centred[1:] * centred[:-1]).mean()
    assert abs(lagged) < 6 * Q * (1 - Q) / math.sqrt(N * STEPS)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("secure", [False, True])
def test_ranks_share_one_draw_without_overlap(world_size, secure):
    whole = PoissonSampler(N, Q, 8).draw(at(3, secure)).tolist()
    parts = []
    for rank in range(world_size):
        sampler = PoissonSampler(N, Q, 4, rank, world_size)
        batches = list(sampler.micro_batches(at(3, secure)))
        assert all(1 <= len(batch) <= 4 for batch in batches)
        parts += [i for batch in batches for i in batch]
    assert sorted(parts) == whole


def test_records_of_like_length_share_a_micro_batch():
    lengths = np.random.default_rng(0).integers(1, 100, N)
    batches = list(PoissonSampler(N, Q, 4).micro_batches(at(3), lambda i: lengths[i]))
    drawn = [i for batch in batches for i in batch]
    assert sorted(drawn) == PoissonSampler(N, Q, 4).draw(at(3)).tolist()
    longest = [max(lengths[i] for i in batch) for batch in batches]
    shortest = [min(lengths[i] for i in batch) for batch in batches]
    assert all(long <= short for long, short in zip(longest, shortest[1:], strict=False))


def test_an_empty_draw_gives_no_micro_batch():
    sampler = PoissonSampler(3, 1e-9, 8)
    assert list(sampler.micro_batches(at(0))) == []


def test_rate_one_draws_everybody():
    assert len(PoissonSampler(50, 1.0, 8).draw(at(0))) == 50


def test_one_more_record_changes_nobody_elses_draw():
    smaller, larger = PoissonSampler(100, 0.3, 8), PoissonSampler(101, 0.3, 8)
    drawn = larger.draw(at(5))
    assert smaller.draw(at(5)).tolist() == drawn[drawn < 100].tolist()


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.5, float("nan")])
def test_a_rate_that_is_no_probability_is_refused(rate):
    with pytest.raises(ConfigurationError, match="sampling rate"):
        PoissonSampler(10, rate, 2)
