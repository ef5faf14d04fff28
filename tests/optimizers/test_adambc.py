"""DP-AdamBC against its own formula, one coordinate after the other."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from hf_dpkfc.optimizers.adambc import DPAdamBC, noise_variance_of

LR, BETA1, BETA2, DECAY, FLOOR = 0.05, 0.8, 0.95, 0.1, 1e-3
VARIANCE = noise_variance_of(noise_multiplier=1.5, clip_norm=0.4, expected_batch_size=2)


def textbook(start, noisy_means):
    """Tang et al. 2024, Alg. 1, for one number; weight decay as in AdamW."""
    theta, m, v = start, 0.0, 0.0
    for t, g in enumerate(noisy_means, 1):
        m = BETA1 * m + (1 - BETA1) * g
        v = BETA2 * v + (1 - BETA2) * g * g
        m_hat = m / (1 - BETA1**t)
        v_hat = v / (1 - BETA2**t)
        phi = (1.5 * 0.4 / 2) ** 2
        theta -= LR * DECAY * theta
        theta -= LR * m_hat / math.sqrt(max(v_hat - phi, FLOOR))
    return theta


def optimizer_of(parameters):
    return DPAdamBC(
        parameters,
        lr=LR,
        betas=(BETA1, BETA2),
        weight_decay=DECAY,
        noise_variance=VARIANCE,
        floor=FLOOR,
    )


def run(parameter, optimizer, gradients):
    for gradient in gradients:
        parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()


def test_every_coordinate_follows_the_formula():
    torch.manual_seed(0)
    start, gradients = torch.randn(5, dtype=torch.float64), torch.randn(30, 5).double() * 0.4
    parameter = nn.Parameter(start.clone())
    run(parameter, optimizer_of([parameter]), gradients)
    expected = [textbook(float(start[i]), gradients[:, i].tolist()) for i in range(5)]
    expected = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(parameter.data, expected, rtol=0, atol=1e-12)


def test_both_sides_of_the_floor_are_reached():
    """The test above would prove little if v̂ − (σC/B)² were always above the floor, or below."""
    torch.manual_seed(0)
    gradients = torch.randn(30, 5).double() * 0.4
    debiased = gradients.square().mean(0) - VARIANCE
    assert (debiased > FLOOR).any()
    assert (gradients[:1].square() - VARIANCE < FLOOR).any()


def test_without_noise_it_is_adam_up_to_its_epsilon():
    torch.manual_seed(1)
    start, gradients = torch.randn(4).double(), torch.randn(10, 4).double()
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    run(ours, DPAdamBC([ours], lr=LR, noise_variance=0.0, floor=1e-30), gradients)
    run(theirs, torch.optim.Adam([theirs], lr=LR, eps=0.0), gradients)
    torch.testing.assert_close(ours.data, theirs.data, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_state_dict_round_trip_is_exact(dtype, tmp_path):
    torch.manual_seed(2)
    gradients = torch.randn(6, 3)
    whole = nn.Parameter(torch.randn(3).to(dtype))
    first = optimizer_of([whole])
    run(whole, first, gradients[:3])
    again = nn.Parameter(whole.detach().clone())
    second = optimizer_of([again])
    torch.save(first.state_dict(), tmp_path / "optimizer.pt")
    second.load_state_dict(torch.load(tmp_path / "optimizer.pt"))
    run(whole, first, gradients[3:])
    run(again, second, gradients[3:])
    assert torch.equal(whole, again)
    assert all(torch.equal(first.state[whole][k], second.state[again][k]) for k in ("m", "v"))


def test_bfloat16_weights_keep_float32_moments():
    """In bf16, β₂ = .999 would never move v: a thousandth is below half an ulp."""
    parameter = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = DPAdamBC([parameter], noise_variance=0.0)
    run(parameter, optimizer, torch.full((3, 2), 0.5))
    assert optimizer.state[parameter]["v"].dtype == torch.float32
    v = float(optimizer.state[parameter]["v"][0])
    assert v == pytest.approx(0.25 * (1 - 0.999**3), rel=1e-4)


def test_groups_and_schedulers_work_as_with_any_optimizer():
    decayed, plain = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    groups = [{"params": [decayed], "weight_decay": 0.5}, {"params": [plain]}]
    optimizer = DPAdamBC(groups, lr=0.1, noise_variance=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for parameter in (decayed, plain):
        parameter.grad = torch.zeros(1)
    optimizer.step()
    scheduler.step()
    assert float(decayed.detach()) == pytest.approx(0.95)
    assert float(plain.detach()) == 1.0
    assert optimizer.param_groups[0]["lr"] == 0.05
