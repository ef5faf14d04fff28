from __future__ import annotations

import dataclasses

import models
import peft
import pytest
import reference
import tokenizers_zoo
import torch

from hf_dpkfc import PinkNoiseProbe, Preconditioner, ZipfTokenProbe
from hf_dpkfc.curvature.fit import CurvatureOptions, fit_preconditioner
from hf_dpkfc.curvature.preconditioner import ElementwiseMap, KroneckerMap, ScalarMap
from hf_dpkfc.errors import ConfigurationError, ProbeError
from hf_dpkfc.layers.capture import capture
from hf_dpkfc.layers.routes import inspect_model
from hf_dpkfc.losses import TaskLoss, task_of

SMALL = CurvatureOptions(rank=None, num_batches=2, batch_size=8)
POOLER = -2  # of BERT's blocks, the last one below the head; 16 wide


def text_probe(model):
    return ZipfTokenProbe.for_model(model, tokenizers_zoo.build("bert"), max_length=12)


def fit(model, **changes):
    options = dataclasses.replace(SMALL, **changes)
    return fit_preconditioner(model, text_probe(model), options)


def test_the_same_seed_and_weights_give_identical_bits():
    assert fit(models.build("bert")).fingerprint == fit(models.build("bert")).fingerprint


def test_another_seed_gives_other_probes():
    model = models.build("bert")
    other = fit_preconditioner(model, text_probe(model), SMALL, seed=1)
    assert other.fingerprint != fit(model).fingerprint


def test_probing_leaves_modes_gradients_and_random_state_alone():
    model = models.build("bert").train()
    model.bert.embeddings.eval()
    state = torch.get_rng_state()
    fit(model)
    assert torch.equal(state, torch.get_rng_state())
    assert model.training
    assert not model.bert.embeddings.training
    assert all(p.grad is None for p in model.parameters())


def test_layers_that_read_one_tensor_share_its_root():
    preconditioner = fit(models.build("bert"))
    layer = "bert.encoder.layer.0.attention.self."
    query, value = preconditioner[layer + "query"], preconditioner[layer + "value"]
    assert query.root_A is value.root_A
    assert query.root_G is not value.root_G


def test_layers_that_read_different_tensors_never_share_a_root():
    """Concatenated calls are fresh tensors, whose addresses are reused once they are freed."""
    preconditioner = fit(models.build("albert").float())
    layer = "albert.encoder.albert_layer_groups.0.albert_layers.0."
    roots = [preconditioner[layer + n].root_A for n in ("attention.dense", "ffn", "ffn_output")]
    assert len({id(root) for root in roots}) == 3


def probe_norms(model, preconditioner):
    """Mean squared norms of each preconditioned block's probe gradients, raw and mapped."""
    generator = torch.Generator().manual_seed(1)
    batch = next(iter(text_probe(model).batches(1, 8, generator)))
    table = inspect_model(model)
    captured = capture(model, table, TaskLoss(task_of(model)), batch, 8)
    mapped = {n for n, linear in preconditioner.maps.items() if not isinstance(linear, ScalarMap)}
    gradients = [(b.name, captured.gradient(b)) for b in table if b.name in mapped]
    raw = torch.stack([gradient.sq_norms().mean() for _, gradient in gradients])
    moved = [preconditioner[name].sq_norms(gradient, {}).mean() for name, gradient in gradients]
    return raw, torch.stack(moved)


@pytest.mark.parametrize("kind", ["kfac", "diagonal"])
def test_balance_keeps_each_layers_mean_squared_probe_norm(kind):
    model = models.build("bert")
    raw, moved = probe_norms(model, fit(model, kind=kind))
    torch.testing.assert_close(moved, raw)


@pytest.mark.parametrize("exponent", [0.0, 0.5])
def test_a_lower_balance_shares_the_same_total_more_equally(exponent):
    model = models.build("bert")
    raw, moved = probe_norms(model, fit(model, layer_balance=exponent))
    torch.testing.assert_close(moved, raw.pow(exponent) * raw.sum() / raw.pow(exponent).sum())


def with_head_along(model, coordinate):
    """Logits read one coordinate of the pooled token, so that δ below has one direction."""
    with torch.no_grad():
        model.classifier.weight.zero_()[0, coordinate] = 1.0
    return model


def test_factors_of_another_head_let_the_layer_below_take_the_clip_norm():
    """Why the first refreshes come early.

    With one direction of δ, U_G shrinks it by √(d + 1) and balance makes up for that; the
    direction of another head is then magnified by as much.
    """
    stale = fit(with_head_along(models.build("bert"), 0))
    model = with_head_along(models.build("bert"), 1)
    raw, magnified = (norms[POOLER] for norms in probe_norms(model, stale))
    torch.testing.assert_close(magnified / raw, torch.tensor(17.0).to(raw), rtol=0.3, atol=0)
    raw, kept = (norms[POOLER] for norms in probe_norms(model, fit(model)))
    torch.testing.assert_close(kept, raw)


def test_the_inputs_root_alone_does_not_age_with_the_head():
    """Another head's directions of δ keep the size that they have without a root."""
    stale = fit(with_head_along(models.build("bert"), 0), sides="inputs")
    raw, moved = probe_norms(with_head_along(models.build("bert"), 1), stale)
    torch.testing.assert_close(moved, raw, rtol=0.1, atol=0)


def test_inputs_alone_have_the_same_root_and_leave_output_gradients_as_they_are():
    model = models.build("bert")
    both, inputs = fit(model), fit(model, sides="inputs")
    assert both.maps.keys() == inputs.maps.keys()
    for name, linear in inputs.maps.items():
        delta = torch.randn(5, linear.root_G.dim, dtype=torch.float64)
        torch.testing.assert_close(linear.root_G.apply(delta), delta)
        if isinstance(both[name], KroneckerMap):
            torch.testing.assert_close(
                reference.explicit_root(linear.root_A), reference.explicit_root(both[name].root_A)
            )


def test_inputs_alone_need_no_factor_of_a_key_projections_output_gradients():
    model = models.build("bert")
    keys = {n for n, linear in fit(model).maps.items() if linear == ScalarMap()}
    inputs = fit(model, sides="inputs")
    assert keys == {name for name in inputs.maps if name.endswith("self.key")}
    assert all(isinstance(inputs[name], KroneckerMap) for name in keys)
    assert not inputs.notes


@pytest.mark.parametrize("sides", ["both", "inputs"])
@pytest.mark.parametrize("balance", [0.0, 1.0])
def test_a_layer_without_signal_keeps_identity_and_says_so(balance, sides):
    config = peft.LoraConfig(r=2, target_modules=["query"])  # B starts at zero: no gradient for A
    model = peft.get_peft_model(models.build("bert"), config).double()
    preconditioner = fit(model, layer_balance=balance, sides=sides)
    silent = [name for name in preconditioner.maps if "lora_A" in name]
    assert silent
    assert all(preconditioner[name] == ScalarMap() for name in silent)
    assert all(any(name in note for note in preconditioner.notes) for name in silent)
    assert all(
        isinstance(preconditioner[n], KroneckerMap) for n in preconditioner.maps if "lora_B" in n
    )


def test_a_factor_above_the_cap_falls_back_to_low_rank_and_says_so():
    preconditioner = fit(models.build("bert"), max_factor_dim=20)
    assert any("max_factor_dim=20" in note for note in preconditioner.notes)
    wide = {n for n in preconditioner.maps if n.endswith("intermediate.dense")}  # 16 in, 32 out
    inputs = fit(models.build("bert"), max_factor_dim=20, sides="inputs")
    assert not any(name in note for name in wide for note in inputs.notes)
    assert not any("max_factor_dim" in note for note in fit(models.build("bert")).notes)


@pytest.mark.parametrize("options", [{}, {"approx": "expand"}, {"max_factor_dim": 20}], ids=str)
def test_a_rank_above_every_width_gives_the_exact_preconditioner(options):
    exact, ranked = (fit(models.build("bert"), rank=rank, **options) for rank in (None, 1000))
    assert ranked.fingerprint == exact.fingerprint
    assert ranked.notes == exact.notes


@pytest.mark.parametrize("labels", ["uniform", "model"])
@pytest.mark.parametrize("name", ["vit", "cnn"])
def test_images_are_probed_with_noise(name, labels):
    model = models.build(name)
    options = dataclasses.replace(SMALL, labels=labels)
    preconditioner = fit_preconditioner(model, PinkNoiseProbe.for_model(model), options)
    assert preconditioner.is_data_free
    silent = {n for n, linear in preconditioner.maps.items() if linear == ScalarMap()}
    assert silent == {n for n in preconditioner.maps if n.endswith("k_proj")}


def test_diagonal_maps_come_from_per_sample_second_moments():
    model = models.build("cnn")
    options = CurvatureOptions(kind="diagonal", num_batches=1, batch_size=6, damping=0.5)
    probe = PinkNoiseProbe.for_model(model)
    preconditioner = fit_preconditioner(model, probe, options)
    batch = next(iter(probe.batches(1, 6, torch.Generator().manual_seed(0))))
    batch["pixel_values"] = batch["pixel_values"].double()
    table = inspect_model(model)
    captured = capture(model, table, TaskLoss(task_of(model)), batch, 6)
    block = next(b for b in table if b.name == "head")
    moment = torch.cat([g for _, g in captured.gradient(block).dense_chunks()]).square().mean(0)
    expected = (moment / moment.mean() + 0.5).rsqrt()
    linear = preconditioner["head"]
    assert isinstance(linear, ElementwiseMap)
    ratio = linear.diagonal / expected
    torch.testing.assert_close(ratio, ratio.mean().expand_as(ratio))


def test_none_is_the_identity():
    assert fit(models.build("bert"), kind="none") == Preconditioner.identity()


@pytest.mark.parametrize(
    "options", [{}, {"rank": 3}, {"sides": "inputs"}, {"kind": "diagonal"}], ids=str
)
def test_a_saved_preconditioner_comes_back_bit_for_bit(tmp_path, options):
    preconditioner = fit(models.build("bert"), **options)
    preconditioner.save(tmp_path / "p.safetensors")
    back = Preconditioner.load(tmp_path / "p.safetensors")
    assert back.fingerprint == preconditioner.fingerprint
    assert back.notes == preconditioner.notes


def test_a_file_without_preconditioner_is_refused(tmp_path):
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, tmp_path / "x.safetensors")
    with pytest.raises(ConfigurationError, match="holds no preconditioner"):
        Preconditioner.load(tmp_path / "x.safetensors")


def test_a_preconditioner_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        fit(models.build("bert")).kind = "none"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"damping": 0.0}, "damping=0.0"),
        ({"damping": -1.0}, "damping=-1.0"),
        ({"damping": float("nan")}, "damping=nan"),
        ({"rank": 0}, "rank=0"),
        ({"kind": "full"}, "kfac, diagonal, none"),
        ({"approx": "flatten"}, "reduce, expand"),
        ({"sides": "outputs"}, "both, inputs"),
        ({"num_batches": 0}, "num_batches=0"),
    ],
)
def test_options_out_of_range_are_refused_by_name(change, message):
    with pytest.raises(ConfigurationError, match=message):
        fit(models.build("bert"), **change)


def test_non_finite_weights_are_refused():
    model = models.build("bert")
    with torch.no_grad():
        model.bert.encoder.layer[0].output.dense.weight.fill_(float("nan"))
    with pytest.raises(ProbeError, match="non-finite"):
        fit(model)


def test_a_factor_too_wide_to_expand_is_noted():
    notes = fit(models.build("bert"), approx="expand", max_factor_dim=20).notes
    assert any("reduced, its factor of width" in note for note in notes)
