from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from hf_dpkfc import PrivacyPlan
from hf_dpkfc.errors import ConfigurationError
from hf_dpkfc.privacy.plan import Adjacency, steps_in

FIELDS = {
    "clip_norm": 1.0,
    "expected_batch_size": 256,
    "dataset_size": 10_000,
    "steps": 200,
    "delta": 1e-5,
}


def plan(**changes):
    return PrivacyPlan(**({"noise_multiplier": 1.0} | FIELDS | changes))


def test_a_calibrated_plan_keeps_its_target():
    calibrated = PrivacyPlan.calibrated(2.0, **FIELDS)
    assert 1.98 <= calibrated.epsilon <= 2.0
    assert calibrated.target_epsilon == 2.0


def test_epsilon_grows_with_the_steps():
    values = [plan().epsilon_at(step) for step in (0, 1, 10, 100, 200)]
    assert values == sorted(values)
    assert values[0] == 0
    assert values[-1] == plan().epsilon


def test_a_second_accountants_opinion_is_tighter_than_rdp():
    assert plan().epsilon_at(200, "prv") < plan().epsilon


def test_rate_and_epoch_come_from_public_constants_only():
    assert plan().sampling_rate == 256 / 10_000
    assert plan().steps_per_epoch == 40


def test_json_round_trip():
    original = PrivacyPlan.calibrated(1.0, **FIELDS, adjacency=Adjacency.ADD_REMOVE)
    assert PrivacyPlan.from_json(original.to_json()) == original
    assert PrivacyPlan.from_json(original.to_json()).digest == original.digest


def test_any_change_changes_the_digest():
    digests = {plan().digest} | {
        plan(**{name: value}).digest
        for name, value in {
            "noise_multiplier": 1.1,
            "clip_norm": 2.0,
            "expected_batch_size": 255,
            "dataset_size": 10_001,
            "steps": 201,
            "delta": 1e-6,
            "accountant": "prv",
            "adjacency": Adjacency.ADD_REMOVE,
            "privacy_unit": "one patient",
        }.items()
    }
    assert len(digests) == 10


def test_a_plan_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan().steps = 1000


def test_printing_states_epsilon_delta_and_adjacency():
    text = str(plan())
    assert "δ = 1e-05" in text
    assert "zero-out" in text
    assert "q = 256/10000" in text


def test_no_noise_is_an_infinite_epsilon():
    assert plan(noise_multiplier=0.0).epsilon == math.inf


@pytest.mark.parametrize(
    "change",
    [
        {"noise_multiplier": -1.0},
        {"noise_multiplier": math.nan},
        {"clip_norm": 0.0},
        {"expected_batch_size": 0},
        {"dataset_size": 0, "expected_batch_size": 1},
        {"steps": 0},
        {"delta": 0.0},
        {"delta": 1.0},
        {"accountant": "gdp"},
        {"target_epsilon": -2.0},
    ],
    ids=str,
)
def test_a_field_out_of_range_is_refused_by_name(change):
    name = next(iter(change))
    with pytest.raises(ConfigurationError, match=f"{name}="):
        plan(**change)


def test_a_batch_larger_than_the_data_set_is_refused():
    with pytest.raises(ConfigurationError, match="larger than the data set"):
        plan(expected_batch_size=10_001)


def test_a_delta_that_allows_to_publish_whole_records_is_refused():
    with pytest.raises(ConfigurationError, match=r"delta=0\.00011 is above 1/N for N = 10000"):
        plan(delta=1.1e-4)


@pytest.mark.parametrize("size", [7, 60, 6530, 10_000, 55_000, 10**7])
def test_one_over_n_is_a_legal_delta_however_it_was_rounded(size):
    exact = 1 / size
    for delta in (exact, math.nextafter(exact, 1), float(np.float32(exact)), float(f"{exact:.8g}")):
        assert plan(dataset_size=size, expected_batch_size=5, delta=delta).delta == delta


@pytest.mark.parametrize("text", ["", "{}", '{"sigma": 1}', "[1]"])
def test_json_that_is_no_plan_is_refused(text):
    with pytest.raises(ConfigurationError, match="Not a privacy plan"):
        PrivacyPlan.from_json(text)


@pytest.mark.parametrize(
    ("epochs", "size", "batch", "steps"),
    [(5, 10_000, 256, 200), (1.5, 100, 30, 6), (0.1, 100, 30, 1), (1, 64, 64, 1), (3, 0, 8, 0)],
)
def test_steps_are_counted_as_hf_counts_them(epochs, size, batch, steps):
    assert steps_in(epochs, size, batch) == steps


@pytest.mark.parametrize("epochs", [float("inf"), float("nan"), 1e308])
def test_endless_epochs_are_refused(epochs):
    with pytest.raises(ConfigurationError, match="a training ends"):
        steps_in(epochs, 10_000, 1)
