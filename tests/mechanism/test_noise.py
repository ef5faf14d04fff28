from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hf_dpkfc.mechanism.clipping import ClippedSum
from hf_dpkfc.mechanism.noise import privatize
from hf_dpkfc.mechanism.randomness import CHUNK, SecretKey, StepRandomness

KEY = SecretKey(bytes(range(32)))


def randomness(step=0, digest=b"d", secure=False, key=KEY):
    return StepRandomness(key, step, digest, secure)


def zeros(count, sensitivity=1.0):
    return ClippedSum({"w": torch.zeros(count)}, sensitivity)


def variance_is(drawn, sigma):
    """Two-sided chi-squared test by its normal limit; five standard deviations, p = 6e-7."""
    relative = float(drawn.double().square().mean()) / sigma**2 - 1
    return abs(relative) < 5 * math.sqrt(2 / len(drawn))


@pytest.mark.statistical
@pytest.mark.parametrize("secure", [False, True])
def test_noise_has_variance_sigma_squared_c_squared(secure, figure):
    """Row N1: 10^6 draws hold it within 0.71 %, so 2 % more or less noise is seen."""
    sigma, clip = 1.3, 0.5
    drawn = privatize(zeros(10**6, clip), sigma, 1, randomness(secure=secure))["w"]
    relative = float(drawn.double().square().mean()) / (sigma * clip) ** 2 - 1
    figure(f"variance off by {relative:+.3%} over 10^6 draws")
    assert variance_is(drawn, sigma * clip)
    assert not variance_is(drawn, 0.98 * sigma * clip)
    assert not variance_is(drawn, 1.02 * sigma * clip)


@pytest.mark.slow
@pytest.mark.statistical
@pytest.mark.parametrize("secure", [False, True])
def test_noise_has_its_variance_over_ten_million_draws(secure, figure):
    drawn = privatize(zeros(10**7), 1.0, 1, randomness(secure=secure))["w"]
    figure(f"variance off by {float(drawn.double().square().mean()) - 1:+.3%} over 10^7 draws")
    assert variance_is(drawn, 1.0)
    assert not variance_is(drawn, 0.99)
    assert not variance_is(drawn, 1.01)


@pytest.mark.statistical
@pytest.mark.parametrize("secure", [False, True])
def test_noise_is_normal(secure):
    """Kolmogorov-Smirnov on 10^6 draws; the bound has false-alarm probability 2e-8 (DKW)."""
    drawn = np.sort(randomness(secure=secure).stream("noise").normal(10**6, np.float32))
    from scipy.stats import norm

    empirical = np.arange(1, len(drawn) + 1) / len(drawn)
    assert np.abs(norm.cdf(drawn) - empirical).max() < 3.04e-3


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_is_as_fine_as_what_it_hides(secure, dtype):
    """On a coarser grid than the sum's, the sum's own low bits would be released as they are."""
    zero = ClippedSum({"w": torch.zeros(10_000, dtype=dtype)}, 1.0)
    drawn = privatize(zero, 1.0, 1, randomness(secure=secure))["w"]
    assert drawn.dtype == dtype
    if_coarser = {torch.float32: torch.bfloat16, torch.float64: torch.float32}[dtype]
    assert (drawn.to(if_coarser).to(dtype) == drawn).double().mean() < 0.1


def test_secure_noise_is_rounded_once_after_the_sum():
    """Rounded before, noise lies on a grid that a sum's low bits shift: which sum, shows."""
    value = torch.full((10_000,), 0.0123)
    stream = randomness(secure=True).stream("noise").normal(10_000, np.float32)
    noisy = privatize(ClippedSum({"w": value}, 1.0), 0.7, 1, randomness(secure=True))["w"]
    exact = torch.from_numpy(stream * 0.7 + value.double().numpy())
    assert torch.equal(noisy, exact.float())
    coarse = torch.from_numpy(stream.astype(np.float32)) * 0.7 + value
    assert not torch.equal(noisy, coarse)


def test_a_secure_number_is_made_of_four_independent_draws():
    """Both halves of a Box-Muller pair in one sum would be a single draw of two-thirds the bits."""
    stream = randomness(secure=True).stream("noise")
    size = 1000
    u = 1 - stream._uniform(4 * size, block=1)
    radius, angle = np.sqrt(-2 * np.log(u[: 2 * size])), 2 * np.pi * u[2 * size :]
    pairs = np.stack([radius * np.cos(angle), radius * np.sin(angle)]).reshape(2, 2, size)
    summed = (pairs[0, :, 1] + pairs[1, :, 0]).sum() / 2
    assert stream.normal(size, np.float32)[1] == pytest.approx(summed)


def correlation(one, two):
    return float((one * two).mean() / (one.std() * two.std()))


@pytest.mark.statistical
@pytest.mark.parametrize(
    "other",
    [
        {"step": 1},
        {"digest": b"e"},
        {"key": SecretKey(bytes(31) + b"\x01")},
        {"secure": True},
    ],
    ids=["step", "digest", "key", "generator"],
)
def test_noise_is_fresh_where_anything_differs(other):
    # 10^5 pairs: five standard deviations, false-alarm probability 6e-7 each.
    one = privatize(zeros(10**5), 1.0, 1, randomness())["w"]
    two = privatize(zeros(10**5), 1.0, 1, randomness(**other))["w"]
    assert abs(correlation(one, two)) < 5 / math.sqrt(10**5)


def test_an_identical_replay_repeats_itself():
    one = privatize(zeros(1000), 1.0, 1, randomness())["w"]
    two = privatize(zeros(1000), 1.0, 1, randomness())["w"]
    assert torch.equal(one, two)


@pytest.mark.statistical
def test_parameters_of_one_step_get_independent_noise():
    total = ClippedSum({n: torch.zeros(10**5) for n in "ab"}, 1.0)
    drawn = privatize(total, 1.0, 1, randomness())
    assert abs(correlation(drawn["a"], drawn["b"])) < 5 / math.sqrt(10**5)


@pytest.mark.statistical
def test_chunks_of_one_draw_are_independent():
    drawn = torch.from_numpy(randomness().stream("noise").normal(2 * CHUNK, np.float32)).view(2, -1)
    assert abs(correlation(*drawn)) < 5 / math.sqrt(CHUNK)


@pytest.mark.parametrize("secure", [False, True])
def test_sampling_and_noise_have_streams_of_their_own(secure):
    streams = [randomness(secure=secure).stream(p).uniform(100) for p in ("sampling", "noise")]
    assert not np.array_equal(*streams)


def test_the_noisy_sum_is_divided_by_the_public_constant():
    total = ClippedSum({"w": torch.full((3,), 8.0)}, 1.0)
    assert privatize(total, 0.0, 4, randomness())["w"].tolist() == [2.0, 2.0, 2.0]


def test_all_bits_of_the_key_matter():
    """torch's CPU generator keeps 32 bits of its seed; flip each bit and see the stream change."""
    draws = set()
    for bit in range(256):
        flipped = bytearray(KEY.secret)
        flipped[bit // 8] ^= 1 << bit % 8
        draws.add(
            randomness(key=SecretKey(bytes(flipped)))
            .stream("noise")
            .normal(4, np.float32)
            .tobytes()
        )
    assert len(draws) == 256


def test_global_seeds_do_not_reach_the_noise():
    torch.manual_seed(42)
    np.random.seed(42)
    one = privatize(zeros(10), 1.0, 1, randomness(key=SecretKey.generate()))["w"]
    torch.manual_seed(42)
    np.random.seed(42)
    two = privatize(zeros(10), 1.0, 1, randomness(key=SecretKey.generate()))["w"]
    assert not torch.equal(one, two)


def test_a_key_is_stored_for_its_owner_alone_and_never_overwritten(tmp_path):
    path = tmp_path / "key"
    KEY.store(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert SecretKey.load(path) == KEY
    with pytest.raises(FileExistsError):
        SecretKey.generate().store(path)


def test_a_key_does_not_show_in_its_repr():
    assert KEY.secret.hex() not in repr(KEY)
    assert str(KEY.secret) not in repr(KEY)


def test_a_damaged_key_is_refused(tmp_path):
    from hf_dpkfc.errors import LedgerError

    (tmp_path / "key").write_bytes(b"short")
    with pytest.raises(LedgerError, match="5 bytes"):
        SecretKey.load(tmp_path / "key")
