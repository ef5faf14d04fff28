"""The same code path on an accelerator: `pytest -m gpu`, never run by this project's CI."""

from __future__ import annotations

import models
import pytest
import settings
import torch

from hf_dpkfc.curvature.fit import CurvatureOptions, fit_preconditioner
from hf_dpkfc.curvature.probes import PinkNoiseProbe
from hf_dpkfc.layers.routes import inspect_model
from hf_dpkfc.losses import TaskLoss, task_of
from hf_dpkfc.mechanism.clipping import Clipper

pytestmark = pytest.mark.gpu


def clipped_sum(name, device):
    model = models.build(name).to(device)
    probe = PinkNoiseProbe.for_model(model)
    preconditioner = fit_preconditioner(model, probe, CurvatureOptions(rank=4, num_batches=2))
    inputs = {key: value.to(device) for key, value in models.inputs_for(name).items()}
    clipper = Clipper(
        model, inspect_model(model), preconditioner, TaskLoss(task_of(model)), clip_norm=0.1
    )
    return clipper.sum_of([(inputs, models.BATCH)]).values


@pytest.mark.parametrize("name", ["vit", "cnn"])
def test_the_clipped_sum_is_that_of_the_cpu(name):
    on_cpu, on_gpu = clipped_sum(name, "cpu"), clipped_sum(name, "cuda")
    for parameter, value in on_cpu.items():
        torch.testing.assert_close(on_gpu[parameter].cpu(), value, rtol=1e-6, atol=1e-9)


def test_a_training_spends_its_plan_under_a_nonce_of_its_own(tmp_path):
    trainer = settings.trainer(tmp_path, use_cpu=False)
    trainer.train()
    assert trainer.args.device.type == "cuda"
    assert trainer.epsilon_spent() == trainer.plan.epsilon
    assert trainer._run.nonce  # the backward pass isn't deterministic: lost steps are charged
