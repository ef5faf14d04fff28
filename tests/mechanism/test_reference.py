"""G1: the released sum equals the textbook loop."""

from __future__ import annotations

import models
import peft
import pytest
import reference
import torch

from hf_dpkfc.curvature.fit import CurvatureOptions, fit_preconditioner
from hf_dpkfc.curvature.probes import PublicDataProbe
from hf_dpkfc.layers.routes import inspect_model
from hf_dpkfc.losses import TaskLoss, task_of
from hf_dpkfc.mechanism.clipping import Clipper

LORA_TARGETS = {
    "bert": ["query", "value", "dense"],
    "bert-mlm": ["query", "value"],
    "albert": ["query", "value"],
    "distilbert": ["q_lin", "v_lin"],
    "roberta": ["query", "value"],
    "gpt2": ["c_attn", "c_fc"],
    "llama": ["q_proj", "v_proj", "up_proj"],
    "vit": ["q_proj", "v_proj"],
    "cnn": ["body.0", "head"],
}
OPTIONS = {
    "none": CurvatureOptions(kind="none"),
    "diagonal": CurvatureOptions(kind="diagonal", num_batches=2, batch_size=8),
    "reduce-full": CurvatureOptions(rank=None, num_batches=2, batch_size=8),
    "reduce-rank": CurvatureOptions(rank=3, damping=0.1, num_batches=3, batch_size=8),
    "inputs": CurvatureOptions(sides="inputs", rank=3, num_batches=3, batch_size=8),
    "expand-full": CurvatureOptions(approx="expand", rank=None, num_batches=2, batch_size=8),
    "expand-rank": CurvatureOptions(approx="expand", rank=3, num_batches=2, batch_size=8),
}


def with_parameters(name, trains):
    model = models.build(name)
    if trains == "head":
        return models.only_head(model)
    if trains == "lora":
        config = peft.LoraConfig(r=2, target_modules=LORA_TARGETS[name], init_lora_weights=False)
        return peft.get_peft_model(model, config).double().eval()
    return model


def probe_of(name):
    """Random inputs of the right form, as a data set."""
    rows = models.singles(models.inputs_for(name, batch=12, seed=5))

    def collate(examples):
        return {k: torch.cat([e[k] for e in examples]) for k in examples[0]}

    return PublicDataProbe(rows, collate)


def setting(name, trains, options, dtype=torch.float64):
    model = with_parameters(name, trains).to(dtype)
    table = inspect_model(model).require_covered()
    loss = TaskLoss(task_of(model))
    preconditioner = fit_preconditioner(model, probe_of(name), options)
    return model, table, loss, preconditioner


def relative_error(actual, expected):
    difference = sum((actual[n].double() - expected[n].double()).square().sum() for n in expected)
    size = sum(expected[n].double().square().sum() for n in expected)
    return float((difference / size).sqrt())


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("trains", ["full", "lora", "head"])
@pytest.mark.parametrize("name", models.NAMES)
@pytest.mark.parametrize("clip_norm", [0.05, 1e3])
def test_clipped_sum_equals_the_textbook_loop(name, trains, option, clip_norm):
    model, table, loss, preconditioner = setting(name, trains, OPTIONS[option])
    inputs = models.inputs_for(name)
    clipper = Clipper(model, table, preconditioner, loss, clip_norm)
    fast = clipper.sum_of([(inputs, models.BATCH)])
    slow = reference.clipped_sum(
        model, table, preconditioner, loss, models.singles(inputs), clip_norm * (1 - clipper.margin)
    )
    assert set(fast.values) == set(slow)
    assert relative_error(fast.values, slow) < 1e-9


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", models.NAMES)
def test_float32_equals_the_float64_loop(name, option):
    model, table, loss, preconditioner = setting(name, "full", OPTIONS[option], torch.float32)
    inputs = models.inputs_for(name)
    narrow = {k: v.float() if v.is_floating_point() else v for k, v in inputs.items()}
    clipper = Clipper(model, table, preconditioner, loss, 0.05)
    fast = clipper.sum_of([(narrow, models.BATCH)])
    bound = 0.05 * (1 - clipper.margin)
    wide = preconditioner.to("cpu", torch.float64)
    slow = reference.clipped_sum(model.double(), table, wide, loss, models.singles(inputs), bound)
    assert all(value.dtype == torch.float32 for value in fast.values.values())
    assert relative_error(fast.values, slow) < 1e-5
