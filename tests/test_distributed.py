"""D1 and G5: several processes through Accelerate, on CPU with gloo."""

from __future__ import annotations

import sys

import processes
import pytest
import torch

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

WHOLE = {
    "max_steps": 3,
    "optim": "sgd",
    "learning_rate": 0.5,
    "lr_scheduler_type": "constant",
    "preconditioner": "none",
    "clip_norm": 0.1,
}


def launcher(count):
    """One process per rank by torchrun, as for GPUs; use_cpu=True makes the backend gloo."""
    if count == 1:
        return (sys.executable,)
    return (
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--multi_gpu",
        f"--num_processes={count}",
        "--num_machines=1",
        "--mixed_precision=no",
        "--dynamo_backend=no",
        "--main_process_port=0",
    )


def weights(folder, count, **options):
    """Rate 1: the draw is the whole set on any number of processes, in eval mode of dropout."""
    per_device = {"per_device_train_batch_size": 60 // count}
    result = processes.run(folder, options=WHOLE | per_device | options, launcher=launcher(count))
    assert isinstance(result, dict), result[-3000:]
    return torch.tensor(result["weights"], dtype=torch.float64), result


def test_two_processes_give_the_update_of_one(tmp_path, monkeypatch):
    monkeypatch.setenv("NO_DROPOUT", "1")
    one, _ = weights(tmp_path / "one", 1, noise_multiplier=0.0)
    two, result = weights(tmp_path / "two", 2, noise_multiplier=0.0)
    assert (one - two).abs().max() < 1e-6
    assert result["releases"] == 3


def test_two_processes_draw_noise_once(tmp_path, monkeypatch):
    """The difference to the noiseless run is lr·σ·C/B per step: its variance is counted once."""
    monkeypatch.setenv("NO_DROPOUT", "1")
    options = {"max_steps": 1}
    plain, _ = weights(tmp_path / "plain", 2, noise_multiplier=0.0, **options)
    noisy, _ = weights(tmp_path / "noisy", 2, noise_multiplier=5.0, **options)
    expected = 0.5 * 5.0 * 0.1 / 60
    ratio = float((noisy - plain).std()) / expected
    # Six standard deviations of a sample deviation over all parameters: 2e-9.
    assert abs(ratio - 1) < 6 / (2 * len(plain)) ** 0.5


def test_kfac_trains_on_two_processes_and_stops_together(tmp_path):
    options = {"preconditioner": "kfac", "target_epsilon": 2.0, "per_device_train_batch_size": 4}
    result = processes.run(tmp_path / "run", options=WHOLE | options, launcher=launcher(2))
    assert isinstance(result, dict), result[-3000:]
    assert result["releases"] == result["step"] == 3
    assert result["epsilon"] <= 2.0
