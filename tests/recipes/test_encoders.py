"""Features in place of tokens: the same head sees the same numbers, and the backbone stays."""

from __future__ import annotations

import encoders
import pytest
import texts
import torch
from transformers import AutoTokenizer

from hf_dpkfc import inspect_model


@pytest.fixture(scope="module")
def checkpoint():
    return encoders.tiny_checkpoint()


@pytest.fixture(scope="module")
def rows(checkpoint):
    pairs = texts.made_up(2, count=20).train
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    return encoders.tokenized(tokenizer, *zip(*pairs, strict=True), 16)


@pytest.fixture(scope="module")
def collate(checkpoint):
    return encoders.Collator(AutoTokenizer.from_pretrained(checkpoint))


@pytest.mark.parametrize("mode", ["head", "lora"])
def test_features_and_tokens_give_the_same_logits(checkpoint, rows, collate, mode):
    model = encoders.builder(checkpoint, 2, mode)().eval()
    featurised = encoders.featurised(rows, model, collate, None)
    from_tokens = model(**collate([rows[i] for i in range(20)])).logits
    from_features = model(**collate([featurised[i] for i in range(20)])).logits
    torch.testing.assert_close(from_features, from_tokens)
    assert featurised.columns["labels"] == rows.columns["labels"]


def test_cached_features_are_those_of_their_own_records(
    checkpoint, rows, collate, tmp_path, monkeypatch
):
    monkeypatch.setattr(encoders, "CACHE", tmp_path / "wheels")
    model = encoders.builder(checkpoint, 2, "head")()
    first = encoders.featurised(rows, model, collate, "tiny")
    again = encoders.featurised(rows, model, collate, "tiny")
    fewer = encoders.Rows({name: column[5:] for name, column in rows.columns.items()})
    others = encoders.featurised(fewer, model, collate, "tiny")
    features = first.columns["features"]
    assert torch.equal(features, again.columns["features"])
    torch.testing.assert_close(others.columns["features"], features[5:])
    assert len(list((tmp_path / "features").iterdir())) == 2


def test_only_the_head_trains_on_a_frozen_backbone(checkpoint):
    model = encoders.builder(checkpoint, 2, "head")()
    trainable = {name for block in inspect_model(model) for name in block.parameters}
    assert trainable == {"trained.classifier.weight", "trained.classifier.bias"}
    model.train()
    assert not any(module.training for module in model.encoder.modules())


def test_heads_differ_by_seed_and_backbones_do_not(checkpoint):
    build = encoders.builder(checkpoint, 2, "full")
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        models.append(build())
    first, second = (dict(model.named_parameters()) for model in models)
    assert not torch.equal(first["classifier.weight"], second["classifier.weight"])
    name = "bert.encoder.layer.0.attention.self.query.weight"
    assert torch.equal(first[name], second[name])


def test_effective_rank_counts_equal_directions():
    assert encoders.effective_rank(torch.eye(5)[:3]) == pytest.approx(3)
    assert encoders.effective_rank(torch.ones(4, 5)) == pytest.approx(1)


def test_adapters_on_frozen_layers_start_as_the_whole_model(checkpoint, rows, collate):
    models = []
    for mode in ("full", "lora"):
        torch.manual_seed(0)
        models.append(encoders.builder(checkpoint, 2, mode)().eval())
    batch = collate([rows[i] for i in range(20)])
    whole, adapted = (model(**batch).logits for model in models)
    torch.testing.assert_close(adapted, whole)


def test_only_adapters_and_head_train_in_the_upper_layers(checkpoint):
    model = encoders.builder(checkpoint, 2, "lora")()
    trainable = {name for block in inspect_model(model) for name in block.parameters}
    assert all("lora_" in name or "classifier" in name for name in trainable)
    assert (
        len(model.encoder.encoder.layer) == len(model.trained.model.base_model.encoder.layer) == 1
    )
    assert len(trainable) == 2 * 2 + 2  # A and B of query and value in one layer, and the head
