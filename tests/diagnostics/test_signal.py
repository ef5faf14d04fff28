from __future__ import annotations

import math

import models
import pytest
import reference
import tokenizers_zoo
import torch

from hf_dpkfc import CurvatureOptions, Preconditioner, ZipfTokenProbe, fit_preconditioner
from hf_dpkfc.diagnostics.signal import LayerSignal, probe_signals, unsafe_signals
from hf_dpkfc.layers.routes import inspect_model
from hf_dpkfc.losses import TaskLoss, task_of


def probe_of(model):
    return ZipfTokenProbe.for_model(model, tokenizers_zoo.build("bert"), max_length=12)


def fitted(model):
    options = CurvatureOptions(num_batches=2, batch_size=8, rank=8)
    return fit_preconditioner(model, probe_of(model), options)


def brute_force(model, preconditioner, examples, clip_norm):
    """{block: (‖mean‖, rms, share)} by a loop over examples with explicit matrices."""
    table = inspect_model(model)
    names = [n for block in table for n in block.parameters]
    clipped, shares = [], []
    loss = TaskLoss(task_of(model))
    for gradient in reference.per_sample_gradients(model, names, loss, examples):
        moved = {
            b.name: reference.transform(preconditioner[b.name], b.join(gradient)) for b in table
        }
        squares = {n: float(g.square().sum()) for n, g in moved.items()}
        whole = sum(squares.values())
        factor = min(1.0, clip_norm / math.sqrt(whole))
        clipped.append({n: factor * g for n, g in moved.items()})
        shares.append({n: s / whole for n, s in squares.items()})
    count = len(examples)
    return {
        n: (
            float(sum(c[n] for c in clipped).norm()) / count,
            math.sqrt(sum(float(c[n].square().sum()) for c in clipped) / count),
            sum(s[n] for s in shares) / count,
        )
        for n in clipped[0]
    }


@pytest.mark.parametrize("clip_norm", [0.05, 1e3])
@pytest.mark.parametrize("preconditioned", [True, False])
def test_signals_are_those_of_a_loop_over_examples(clip_norm, preconditioned):
    model = models.build("bert")
    preconditioner = fitted(model) if preconditioned else Preconditioner.identity()
    batches = [models.inputs_for("bert", seed=s) for s in (1, 2)]
    examples = [single for batch in batches for single in models.singles(batch)]
    expected = brute_force(model, preconditioner, examples, clip_norm)
    signals = unsafe_signals(model, batches, preconditioner, clip_norm)
    measured = {s.name: (s.mean_norm, s.rms_norm, s.share) for s in signals}
    assert set(measured) == set(expected)
    for name, numbers in expected.items():
        assert measured[name] == pytest.approx(numbers, rel=1e-6, abs=1e-12)


def test_shares_add_up_to_one():
    model = models.build("bert")
    signals = probe_signals(model, probe_of(model), fitted(model), 1.0, batch_size=8)
    assert sum(s.share for s in signals) == pytest.approx(1.0)


def test_snr_divides_by_the_norm_of_the_noise():
    signal = LayerSignal("x", num_parameters=25, mean_norm=2.0, rms_norm=6.0, share=1.0)
    assert signal.snr(noise_std=0.1) == pytest.approx(2.0 / (0.1 * 5))
    assert signal.snr_per_example(noise_std=0.1) == pytest.approx(6.0 / (0.1 * 5))


def test_measuring_leaves_modes_gradients_and_random_state_alone():
    model = models.build("bert").train()
    state = torch.get_rng_state()
    probe_signals(model, probe_of(model), Preconditioner.identity(), 1.0, batch_size=4)
    assert torch.equal(state, torch.get_rng_state())
    assert model.training
    assert all(p.grad is None for p in model.parameters())
