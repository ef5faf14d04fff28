"""DiSK's filter against its own formula, and a whole run of it against a slow twin."""

from __future__ import annotations

import models
import pytest
import reference
import torch

from hf_dpkfc.curvature.preconditioner import Preconditioner
from hf_dpkfc.layers.routes import inspect_model
from hf_dpkfc.losses import TaskLoss, task_of
from hf_dpkfc.mechanism.clipping import Clipper
from hf_dpkfc.optimizers.disk import KalmanFilter, lookahead_weight

KAPPA, GAMMA = 0.7, 0.5


def test_the_estimate_follows_the_formula():
    torch.manual_seed(0)
    means = torch.randn(6, 3).double()
    kalman = KalmanFilter(KAPPA, GAMMA)
    expected = means[0]
    for t, mean in enumerate(means):
        got = kalman.update({"x": mean}, {"x": torch.zeros(3).double()})["x"]
        expected = mean if t == 0 else (1 - KAPPA) * expected + KAPPA * mean
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-15)


def test_the_first_step_and_kappa_one_need_one_gradient():
    x = {"x": torch.zeros(3)}
    fresh, unfiltered = KalmanFilter(KAPPA, GAMMA), KalmanFilter(1.0, GAMMA)
    assert fresh.lookahead(x) is None
    unfiltered.update({"x": torch.ones(3)}, x)
    assert unfiltered.lookahead(x) is None
    assert unfiltered.update({"x": torch.full((3,), 5.0)}, x)["x"].tolist() == [5.0, 5.0, 5.0]


def test_the_lookahead_goes_on_along_the_last_update():
    kalman = KalmanFilter(KAPPA, GAMMA)
    kalman.update({"x": torch.ones(1)}, {"x": torch.tensor([1.0])})
    lookahead = kalman.lookahead({"x": torch.tensor([3.0])})
    assert lookahead.point["x"].item() == 3.0 + 0.5 * 2.0
    assert lookahead.weight == pytest.approx(0.3 / 0.35)


def test_what_the_optimizer_does_to_its_gradient_stays_outside():
    kalman = KalmanFilter(KAPPA, GAMMA)
    x = torch.zeros(2)
    kalman.update({"x": torch.ones(2)}, {"x": x})["x"].mul_(100)
    x.add_(7)
    assert torch.equal(kalman.estimate["x"], torch.ones(2))
    assert torch.equal(kalman.previous["x"], torch.zeros(2))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_checkpoint_keeps_the_filter_bit_for_bit(tmp_path, dtype):
    torch.manual_seed(1)
    kalman = KalmanFilter(KAPPA, GAMMA)
    kalman.update({"a.b": torch.randn(2, 3)}, {"a.b": torch.randn(2, 3).to(dtype)})
    kalman.save(tmp_path / "filter.safetensors")
    again = KalmanFilter(KAPPA, GAMMA)
    again.restore(tmp_path / "filter.safetensors", torch.device("cpu"))
    assert torch.equal(again.estimate["a.b"], kalman.estimate["a.b"])
    assert torch.equal(again.previous["a.b"], kalman.previous["a.b"])
    assert again.previous["a.b"].dtype == dtype


def test_the_query_depends_on_kappa_gamma_and_the_displacement():
    def determinants(kappa=KAPPA, gamma=GAMMA, previous=0.0):
        kalman = KalmanFilter(kappa, gamma, previous={"x": torch.tensor([previous])})
        return {name: value.tolist() for name, value in kalman.determinants()}

    assert determinants() == determinants()
    for change in ({"kappa": 0.8}, {"gamma": 0.6}, {"previous": 1.0}):
        assert determinants(**change) != determinants()


def test_a_lookahead_of_weight_one_is_recognised_whatever_its_rounding():
    assert all(lookahead_weight(k / 100, (1 - k / 100) / (k / 100)) == 1 for k in range(1, 100))


@pytest.mark.parametrize("name", ["bert", "gpt2", "cnn"])
def test_a_run_with_sgd_equals_the_slow_twin(name):
    """Five steps: pair, clip, (no) noise, filter, SGD; in float64."""
    fast, slow = models.build(name), models.build(name)
    loss = TaskLoss(task_of(fast))
    table = inspect_model(fast).require_covered()
    names = [n for block in table for n in block.parameters]
    identity = Preconditioner.identity()
    clipper = Clipper(fast, table, identity, loss, 0.5)
    kalman, estimate, previous = KalmanFilter(KAPPA, GAMMA), None, None
    for step in range(5):
        inputs = models.inputs_for(name, seed=step)
        weights = {n: fast.get_parameter(n) for n in names}
        lookahead = kalman.lookahead(weights)
        mean = clipper.sum_of([(inputs, models.BATCH)], lookahead).values
        for n, gradient in kalman.update(mean, weights).items():
            weights[n].data.sub_(gradient, alpha=0.3)

        x = {n: slow.get_parameter(n).detach().clone() for n in names}
        noisy = reference.disk_clipped_sum(
            slow,
            table,
            identity,
            loss,
            models.singles(inputs),
            clipper.bound(lookahead),
            previous=previous or x,
            kappa=KAPPA,
            gamma=GAMMA,
        )
        estimate = {
            n: noisy[n] if estimate is None else (1 - KAPPA) * estimate[n] + KAPPA * noisy[n]
            for n in names
        }
        for n in names:
            slow.get_parameter(n).data = x[n] - 0.3 * estimate[n]
        previous = x
    for n in names:
        torch.testing.assert_close(
            fast.get_parameter(n), slow.get_parameter(n), rtol=1e-9, atol=1e-10
        )
