from __future__ import annotations

import models
import pytest
import torch
from opacus.grad_sample import GradSampleModule, register_grad_sampler
from torch import nn

from hf_dpkfc.errors import ConfigurationError, UnsupportedLayerError
from hf_dpkfc.layers.capture import capture
from hf_dpkfc.layers.routes import Form, inspect_model


class Bilinear(nn.Module):
    """Two inputs: no rule fits."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, x, y):
        return x * y * self.weight


@pytest.mark.parametrize("name", models.NAMES)
def test_every_trainable_parameter_is_in_exactly_one_block(name):
    model = models.build(name)
    named = [n for block in inspect_model(model).require_covered() for n in block.parameters]
    assert sorted(named) == sorted(n for n, _ in model.named_parameters())


def test_frozen_parameters_are_in_no_block():
    table = inspect_model(models.only_head(models.build("bert")))
    assert [n for b in table for n in b.parameters] == ["classifier.weight", "classifier.bias"]


def test_a_model_without_trainable_parameters_is_refused_and_says_so_in_print():
    table = inspect_model(models.build("bert").requires_grad_(False))
    assert str(table) == "No parameter of the model trains: all are frozen."
    with pytest.raises(ConfigurationError, match=r"No parameter[\s\S]*requires_grad_\(True\)"):
        table.require_covered()


@pytest.mark.parametrize("freeze", [False, True])
def test_batch_norm_is_refused_even_when_frozen(freeze):
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)).requires_grad_(True)
    model[1].requires_grad_(not freeze)
    with pytest.raises(UnsupportedLayerError, match=r"1 \(BatchNorm2d\)[\s\S]*GroupNorm"):
        inspect_model(model).require_covered()


@pytest.mark.parametrize(
    "module", [Bilinear(), nn.LSTM(3, 3), nn.Bilinear(2, 2, 2), nn.MultiheadAttention(4, 2)]
)
def test_an_unknown_trainable_module_is_refused_by_name(module):
    model = nn.ModuleDict({"odd": module})
    with pytest.raises(UnsupportedLayerError, match=r"odd\.[\s\S]*requires_grad_\(False\)"):
        inspect_model(model).require_covered()


def test_an_embedding_that_rescales_by_frequency_is_refused():
    model = nn.Sequential(nn.Embedding(4, 2, scale_grad_by_freq=True))
    assert inspect_model(model).refusals[0].parameter == "0.weight"


class ScaledEmbedding(nn.Embedding):
    def forward(self, ids):
        return 2 * super().forward(ids)


class GatedLinear(nn.Linear):
    def __init__(self):
        super().__init__(3, 3)
        self.gate = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return super().forward(x) * self.gate


def test_a_subclass_that_computes_something_else_is_not_that_layer():
    assert inspect_model(nn.Sequential(ScaledEmbedding(4, 2))).refusals
    table = inspect_model(nn.Sequential(GatedLinear())).require_covered()
    assert [use.kind for use in table.blocks[0].uses] == ["vjp"]
    assert set(table.blocks[0].parameters) == {"0.weight", "0.bias", "0.gate"}


def test_a_matrix_tied_to_a_layer_without_a_rule_is_refused_by_name():
    """Gemma's embedding scales its rows: the output projection alone would be half a gradient."""
    embedding, head = ScaledEmbedding(40, 30), nn.Linear(30, 40, bias=False)
    head.weight = embedding.weight
    refusals = inspect_model(nn.ModuleDict({"embed": embedding, "head": head})).refusals
    assert "embed (ScaledEmbedding)" in str(refusals[0])


def test_a_tied_matrix_is_one_block_of_both_uses():
    table = inspect_model(models.build("gpt2"))
    tied = [block for block in table if block.form is Form.TIED]
    assert [use.module for use in tied[0].uses] == ["transformer.wte", "lm_head"]
    assert tied[0].treatment == "scaled"


def test_printing_shows_each_parameter_and_its_route():
    text = str(inspect_model(models.build("vit")))
    assert "vit.embeddings.cls_token" in text
    assert "broadcast" in text
    assert "kfac" in text


def test_split_and_join_are_inverse():
    model = models.build("cnn")
    parameters = dict(model.named_parameters())
    for block in inspect_model(model):
        parts = {n: parameters[n] for n in block.parameters}
        back = block.split(block.join(parts))
        assert all(torch.equal(back[n], parts[n]) for n in parts)


def test_a_users_grad_sampler_is_honoured():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = nn.Parameter(torch.tensor([2.0]))

        def forward(self, x, unused):
            return x * self.factor

    @register_grad_sampler(Scale)
    def scale_sampler(layer, activations, backprops):
        return {layer.factor: (activations[0] * backprops).sum(1, keepdim=True)}

    model = nn.ModuleDict({"scale": Scale()})
    x = torch.randn(3, 5)
    try:
        table = inspect_model(model).require_covered()
        captured = capture(model, table, lambda m, i: m["scale"](x, None).square().sum(1), {}, 3)
        expected = (4 * x.square()).sum(1).square()
        torch.testing.assert_close(captured.gradient(table.blocks[0]).sq_norms(), expected)
    finally:
        del GradSampleModule.GRAD_SAMPLERS[Scale]
