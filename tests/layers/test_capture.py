from __future__ import annotations

import models
import pytest
import reference
import torch
from torch import nn
from transformers import BertConfig, BertForMultipleChoice

from hf_dpkfc.curvature.fit import CurvatureOptions, fit_preconditioner
from hf_dpkfc.curvature.probes import PublicDataProbe
from hf_dpkfc.errors import UnsupportedLayerError
from hf_dpkfc.layers.capture import capture
from hf_dpkfc.layers.gradients import OuterGradient, RowGradient
from hf_dpkfc.layers.routes import inspect_model
from hf_dpkfc.losses import CustomLoss, TaskLoss, task_of


def captured_of(model, inputs, loss=None):
    table = inspect_model(model).require_covered()
    loss = loss or TaskLoss(task_of(model))
    size = len(next(iter(inputs.values())))
    return table, capture(model, table, loss, inputs, size)


def explicit_sq_norms(model, block, loss, inputs):
    grads = reference.per_sample_gradients(
        model, list(block.parameters), loss, models.singles(inputs)
    )
    return torch.stack([sum(g.square().sum() for g in one.values()) for one in grads])


class Twice(nn.Module):
    """One module called twice, and a weight shared by two modules."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(torch.tanh(self.first(x)))))


def test_a_module_called_twice_and_a_shared_weight_have_cross_terms():
    torch.manual_seed(0)
    model = Twice().double()
    inputs = {"x": torch.randn(3, 5, 4).double()}

    def loss(m, i):
        return m(i["x"]).square().sum((1, 2))

    table, captured = captured_of(model, inputs, loss)
    for block in table:
        torch.testing.assert_close(
            captured.gradient(block).sq_norms(), explicit_sq_norms(model, block, loss, inputs)
        )


@pytest.mark.parametrize("name", ["bert", "vit", "cnn", "gpt2"])
def test_bias_only_training_is_exact(name):
    model = models.build(name).requires_grad_(False)
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter_name.endswith("bias"))
    inputs, loss = models.inputs_for(name), TaskLoss(task_of(model))
    table, captured = captured_of(model, inputs)
    for block in table:
        gradient = captured.gradient(block)
        expected = explicit_sq_norms(model, block, loss, inputs)
        actual = torch.zeros_like(expected) if gradient is None else gradient.sq_norms()
        torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-14)


def test_nothing_is_left_on_the_model():
    model = models.build("vit")
    captured_of(model, models.inputs_for("vit"))
    assert all(p.grad is None for p in model.parameters())
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())
    hooks = [m._forward_hooks or m._forward_pre_hooks for m in model.modules()]
    assert not any(hooks)


def test_a_failing_forward_leaves_nothing_on_the_model():
    model = models.build("vit")
    with pytest.raises(RuntimeError, match="broken loss"):
        captured_of(model, models.inputs_for("vit"), loss=_broken_after_forward)
    assert isinstance(model.vit.embeddings.cls_token, nn.Parameter)
    assert not any(m._forward_hooks for m in model.modules())


class ReadsOneCopy(nn.Module):
    """A bare parameter that its owner reshapes as if there were one copy, as DINOv2 does."""

    def __init__(self):
        super().__init__()
        self.position = nn.Parameter(torch.ones(1, 4))
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x + self.position.reshape(1, 2, 2).flatten(1))


def test_a_bare_parameter_that_cannot_be_copied_is_named_and_records_are_not_blamed():
    model, loss = ReadsOneCopy(), CustomLoss(lambda outputs, _: outputs.sum(1))
    with pytest.raises(UnsupportedLayerError, match="its own copy of position"):
        captured_of(model, {"x": torch.ones(3, 4)}, loss=loss)
    assert isinstance(model.position, nn.Parameter)


def _broken_after_forward(model, inputs):
    model(pixel_values=inputs["pixel_values"])
    raise RuntimeError("broken loss")


def test_padding_has_norm_exactly_zero():
    inputs = models.inputs_for("bert")
    table, captured = captured_of(models.build("bert"), inputs)
    block = next(b for b in table if b.name.endswith("layer.1.intermediate.dense"))
    gradient = captured.gradient(block)
    assert gradient.delta[inputs["attention_mask"] == 0].abs().max() == 0


def test_an_example_without_labels_has_loss_and_gradient_zero():
    model, inputs = models.build("bert-mlm"), models.inputs_for("bert-mlm")
    inputs["labels"][2] = -100
    table, captured = captured_of(model, inputs)
    assert captured.losses[2] == 0
    norms = [captured.gradient(block).sq_norms()[2] for block in table if captured.gradient(block)]
    assert max(norms) == 0


def test_an_input_overwritten_in_place_is_caught():
    class Overwrites(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x):
            h = x * 1.0
            y = self.linear(h)
            h.add_(1.0)
            return y + h

    with pytest.raises(UnsupportedLayerError, match="overwritten in place"):
        captured_of(Overwrites(), {"x": torch.randn(2, 3)}, lambda m, i: m(i["x"]).sum(1))


def test_an_output_without_batch_dimension_is_refused():
    class Latents(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(5, 3)

        def forward(self, x):
            return x + self.table(torch.arange(5))[0]

    with pytest.raises(UnsupportedLayerError, match="isn't the batch"):
        captured_of(Latents(), {"x": torch.randn(2, 3)}, lambda m, i: m(i["x"]).sum(1))


def test_a_batch_loss_is_refused():
    with pytest.raises(UnsupportedLayerError, match=r"shape \(\), not \(4,\)"):
        captured_of(
            models.build("cnn"),
            models.inputs_for("cnn"),
            lambda m, i: m(i["pixel_values"]).logits.mean(),
        )


def test_gram_and_explicit_norms_agree():
    generator = torch.Generator().manual_seed(3)
    a = torch.randn(3, 6, 40, generator=generator).double()
    delta = torch.randn(3, 6, 30, generator=generator).double()
    gradient = OuterGradient(a, delta, torch.ones(3, 6, 1).double())
    assert gradient.prefers_gram
    explicit = torch.cat([g.square().sum((1, 2)) for _, g in gradient.dense_chunks()])
    torch.testing.assert_close(gradient.sq_norms(), explicit)


def test_rows_met_twice_are_added_before_they_are_squared():
    delta = torch.tensor([[[1.0, 0.0], [2.0, 0.0], [0.0, 3.0]]])
    gradient = RowGradient(torch.tensor([[7, 7, 2]]), delta, 10)
    assert gradient.sq_norms().tolist() == [9.0 + 9.0]


def test_complete_cancellation_is_never_under_estimated():
    a = torch.randn(1, 1, 64, generator=torch.Generator().manual_seed(0)).repeat(1, 2, 1)
    delta = torch.randn(1, 1, 64, generator=torch.Generator().manual_seed(1)) * 1e3
    gradient = OuterGradient(a, torch.cat([delta, -delta * (1 + 1e-6)], dim=1))
    exact = OuterGradient(gradient.a.double(), gradient.delta.double())
    truth = torch.cat([g.square().sum((1, 2)) for _, g in exact.dense_chunks()])
    assert gradient.sq_norms() >= truth


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x, gate=None):
        return x * self.weight * (1 if gate is None else gate)


class GatedNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.gated = Gated()

    def forward(self, x):
        return self.gated(x, 10 * torch.ones_like(x))


def test_a_small_layer_with_a_second_argument_is_refused():
    """Its rule takes the first alone: the gradient would be ten times too small."""
    model = GatedNet()
    with pytest.raises(UnsupportedLayerError, match="several arguments"):
        capture(
            model, inspect_model(model), lambda m, i: m(i["x"]).sum(1), {"x": torch.ones(2, 4)}, 2
        )


class FlatPositions(nn.Module):
    def __init__(self):
        super().__init__()
        self.positions = nn.Embedding(8, 4)

    def forward(self, x):
        return x + self.positions(torch.arange(x.shape[1]))


def test_positions_without_a_batch_dimension_are_refused():
    """[T] ids with T a multiple of the batch would be cut up among the examples."""
    model, x = FlatPositions(), torch.randn(4, 8, 4)
    with pytest.raises(UnsupportedLayerError, match="positions"):
        capture(model, inspect_model(model), lambda m, i: m(i["x"]).sum((1, 2)), {"x": x}, 4)


def test_a_layer_norm_without_bias_has_exact_gradients():
    """ModernBERT's; Opacus' own rule reads the bias that isn't there."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4, bias=False)).double()
    inputs = {"x": torch.randn(3, 5, 4).double()}

    def loss(m, i):
        return m(i["x"]).square().sum((1, 2))

    table, captured = captured_of(model, inputs, loss)
    for block in table:
        expected = explicit_sq_norms(model, block, loss, inputs)
        torch.testing.assert_close(captured.gradient(block).sq_norms(), expected)


def test_layers_that_read_one_tensor_share_it_also_in_bfloat16():
    """Query, key and value: one Gram matrix and one root serve all three."""
    model = models.build("bert").to(torch.bfloat16)
    _, captured = captured_of(model, models.inputs_for("bert"))
    attention = "bert.encoder.layer.0.attention.self"
    inputs = {captured.calls[f"{attention}.{n}"][0].a.data_ptr() for n in ("query", "key", "value")}
    assert len(inputs) == 1


def choices_loss(model, inputs):
    outputs = model(**{k: v for k, v in inputs.items() if k != "labels"})
    return nn.functional.cross_entropy(outputs.logits, inputs["labels"], reduction="none")


def test_several_sequences_of_one_example_have_exact_gradients_and_factors():
    """Multiple choice: [batch, choice, token]."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=20,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=8,
    )
    model = BertForMultipleChoice(config).double().eval()
    ids = torch.randint(5, 20, (3, 4, 6))
    mask = (torch.arange(6) < torch.tensor([6, 4, 5])[:, None, None]).long().repeat(1, 4, 1)
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([0, 3, 1])}
    table, captured = captured_of(model, inputs, choices_loss)
    for block in table:
        expected = explicit_sq_norms(model, block, choices_loss, inputs)
        torch.testing.assert_close(captured.gradient(block).sq_norms(), expected)
    probe = PublicDataProbe([0], lambda _: inputs)
    preconditioner = fit_preconditioner(
        model, probe, CurvatureOptions(num_batches=1, rank=None), per_example_loss=choices_loss
    )
    assert preconditioner.kind == "kfac"


class Frames(nn.Module):
    """A video classifier: every frame goes through the convolutions, then they are averaged."""

    def __init__(self):
        super().__init__()
        self.grouped = nn.Conv2d(2, 4, 3, groups=2)
        self.norm = nn.GroupNorm(2, 4)  # as many channels as an example has frames
        self.line = nn.Conv1d(4, 3, 2)
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        found = self.norm(self.grouped(x.flatten(0, 1))).tanh()
        return self.head(self.line(found.flatten(2)).mean(-1)).view(*x.shape[:2], -1).mean(1)


@pytest.mark.parametrize("batch", [1, 3])
def test_frames_of_one_example_are_parts_of_one_gradient(batch):
    """Clipped frame by frame, an example would move the sum by as many times C."""
    torch.manual_seed(0)
    model = Frames().double()
    inputs = {"x": torch.randn(batch, 4, 2, 6, 6).double()}

    def loss(m, i):
        return m(i["x"]).square().sum(1)

    table, captured = captured_of(model, inputs, loss)
    for block in table:
        gradient = captured.gradient(block)
        expected = explicit_sq_norms(model, block, loss, inputs)
        torch.testing.assert_close(gradient.sq_norms(), expected)
        weights = torch.arange(1.0, batch + 1).double()
        by_example = reference.per_sample_gradients(
            model, list(block.parameters), loss, models.singles(inputs)
        )
        summed = block.split(gradient.weighted_sum(weights))
        for name, value in summed.items():
            wanted = sum(w * one[name] for w, one in zip(weights, by_example, strict=True))
            torch.testing.assert_close(value, wanted)


class SideTable(nn.Module):
    """Calls a layer once more, on something that is no batch, and keeps no gradient of it."""

    def __init__(self, detaches):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.detaches = detaches

    def forward(self, x):
        table = self.layer(torch.eye(4, dtype=x.dtype))
        return self.layer(x) @ (table.detach() if self.detaches else table)


def side_loss(model, inputs):
    return model(inputs["x"]).square().sum(1)


def test_a_call_without_a_gradient_may_have_any_shape():
    """DoRA asks its adapters for their matrix in this way."""
    torch.manual_seed(0)
    model, inputs = SideTable(True).double(), {"x": torch.randn(3, 4).double()}
    table, captured = captured_of(model, inputs, side_loss)
    for block in table:
        expected = explicit_sq_norms(model, block, side_loss, inputs)
        torch.testing.assert_close(captured.gradient(block).sq_norms(), expected)


def test_a_call_with_a_gradient_and_no_row_per_example_is_refused():
    model, inputs = SideTable(False).double(), {"x": torch.randn(3, 4).double()}
    with pytest.raises(UnsupportedLayerError, match="isn't the batch"):
        captured_of(model, inputs, side_loss)
