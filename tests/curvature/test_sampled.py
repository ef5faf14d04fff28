from __future__ import annotations

import shutil
from dataclasses import replace
from types import SimpleNamespace

import models
import peft
import pytest
import tokenizers_zoo
import torch
from torch import nn
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification

from hf_dpkfc.curvature.catalogue import ProbeOptions, build_probe
from hf_dpkfc.curvature.labels import LabelSpace
from hf_dpkfc.curvature.probes import SequenceTemplate
from hf_dpkfc.curvature.sampled import SampledTokenProbe
from hf_dpkfc.curvature.vocabulary import ranked_payload_ids
from hf_dpkfc.diagnostics.record import contrast_of
from hf_dpkfc.errors import ProbeError
from hf_dpkfc.losses import Task
from hf_dpkfc.tuning import exponent_of

WITH_MASK = ("bert", "roberta")


class CertainOfSuccessor(nn.Module):
    """A causal language model that is sure of successor[token]."""

    def __init__(self, successor):
        super().__init__()
        self.logits = nn.Parameter(100.0 * nn.functional.one_hot(successor, len(successor)))
        self.seen = []

    def forward(self, input_ids, past_key_values=None, use_cache=False):
        self.seen.append(input_ids.clone())
        return SimpleNamespace(logits=self.logits[input_ids], past_key_values=self.seen)


class CertainOfOne(nn.Module):
    """A masked language model that is sure of one token everywhere."""

    def __init__(self, token, vocabulary):
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(vocabulary).index_fill(0, torch.tensor(token), 100))
        self.seen = []

    def forward(self, input_ids, attention_mask=None, token_type_ids=None):
        self.seen.append(input_ids.clone())
        return SimpleNamespace(logits=self.logits.expand(*input_ids.shape, -1))


def rows_for(tokenizer):
    """Embedding rows that hold every id; ids may have gaps."""
    return max(tokenizer.get_vocab().values()) + 1


def probe_for(tokenizer, model, task, pair=False):
    template = SequenceTemplate.of(tokenizer, pair=pair)
    payload = tuple(ranked_payload_ids(tokenizer))
    return SampledTokenProbe(template, payload, LabelSpace(task, 2), 8, 16, model=model)


def causal_probe(name):
    tokenizer = tokenizers_zoo.build(name)
    payload = ranked_payload_ids(tokenizer)
    successor = torch.full((rows_for(tokenizer),), payload[0])
    successor[payload] = torch.tensor(payload[1:] + payload[:1])
    return probe_for(tokenizer, CertainOfSuccessor(successor), Task.CAUSAL_LM), successor


def first_batch(probe, size=16, seed=0):
    return next(iter(probe.batches(1, size, torch.Generator().manual_seed(seed))))


@pytest.mark.parametrize("name", tokenizers_zoo.NAMES)
def test_each_token_of_a_causal_sample_is_drawn_given_those_before(name):
    probe, successor = causal_probe(name)
    batch = first_batch(probe)
    before, after = batch["labels"][:, :-1], batch["labels"][:, 1:]
    both = (before >= 0) & (after >= 0)
    assert both.sum() > 16
    assert torch.equal(successor[before[both]], after[both])


@pytest.mark.parametrize("name", tokenizers_zoo.NAMES)
def test_a_causal_sample_starts_from_the_tokenizers_own_beginning(name):
    probe, _ = causal_probe(name)
    first_batch(probe)
    beginning = torch.tensor(probe.template.fixed[0])
    first = probe.model.seen[0]
    assert first.shape[1] == max(1, len(beginning))
    assert torch.equal(first[:, : len(beginning)], beginning.long().expand(len(first), -1))


@pytest.mark.parametrize("name", WITH_MASK)
def test_a_gibbs_sweep_redraws_every_payload_position_and_no_other(name):
    tokenizer = tokenizers_zoo.build(name)
    token = ranked_payload_ids(tokenizer)[3]
    probe = probe_for(tokenizer, CertainOfOne(token, rows_for(tokenizer)), Task.MASKED_LM)
    batch = first_batch(probe)
    ids = torch.where(batch["labels"] >= 0, batch["labels"], batch["input_ids"])
    special = torch.isin(ids, torch.tensor(tokenizer.all_special_ids))
    assert (ids[~special] == token).all()
    assert ((~special).sum(1) == batch["attention_mask"].sum(1) - probe.template.num_fixed).all()


def test_a_position_is_drawn_once_and_masked_only_then():
    tokenizer = tokenizers_zoo.build("bert")
    model = CertainOfOne(ranked_payload_ids(tokenizer)[3], rows_for(tokenizer))
    first_batch(probe_for(tokenizer, model, Task.MASKED_LM))
    masked = torch.stack([ids == tokenizer.mask_token_id for ids in model.seen])
    special = torch.isin(model.seen[0], torch.tensor(tokenizer.all_special_ids)) & ~masked[0]
    assert torch.equal(masked.sum(0), (~special).long())


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert-mlm"])
def test_real_heads_are_sampled_alike_under_one_seed_and_left_as_they_were(name):
    model = models.build(name).train()
    tokenizer = tokenizers_zoo.build("bert")
    probe = SampledTokenProbe.for_model(model, tokenizer, max_length=12)
    state = torch.get_rng_state()
    one, two = first_batch(probe, seed=4), first_batch(probe, seed=4)
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert torch.equal(state, torch.get_rng_state())
    assert all(module.training for module in model.modules())
    assert one["input_ids"].max() < model.config.vocab_size


@pytest.mark.statistical
def test_a_causal_sample_follows_the_heads_distribution():
    # Chi-squared with 2 degrees of freedom; the bound has false-alarm probability 1e-9.
    tokenizer = tokenizers_zoo.build("gpt2")
    payload = ranked_payload_ids(tokenizer)
    model = CertainOfSuccessor(torch.full((rows_for(tokenizer),), payload[0]))
    shares = torch.tensor([0.5, 0.3, 0.2])
    model.logits.data.fill_(-100.0)
    model.logits.data[:, payload[:3]] = shares.log()
    probe = replace(probe_for(tokenizer, model, Task.CAUSAL_LM), min_length=16)
    drawn = first_batch(probe, size=400)["input_ids"][:, 1:]
    counts = torch.stack([(drawn == token).sum() for token in payload[:3]])
    expected = shares * drawn.numel()
    assert ((counts - expected).square() / expected).sum() < 41.5


def test_a_model_without_head_or_checkpoint_is_refused():
    model, tokenizer = models.build("bert"), tokenizers_zoo.build("bert")
    with pytest.raises(ProbeError, match="no checkpoint behind it"):
        build_probe(ProbeOptions("sampled"), model, tokenizer)
    with pytest.raises(ProbeError, match="a head for single_label"):
        SampledTokenProbe.for_model(model, tokenizer)


def test_a_masked_model_without_a_mask_token_is_refused():
    with pytest.raises(ProbeError, match="no mask token"):
        SampledTokenProbe.for_model(
            models.build("bert-mlm"), tokenizers_zoo.build("t5"), max_length=12
        )


def with_adapters(model):
    return peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS", r=2))


def classifier_from(checkpoint, folder):
    checkpoint.save_pretrained(folder)
    return AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2)


@pytest.fixture
def spoken(tmp_path):
    """A classifier whose checkpoint is a masked language model, sure of one token; its probe."""
    tokenizer, speaker = tokenizers_zoo.build("bert"), models.build("bert-mlm")
    token = ranked_payload_ids(tokenizer, speaker.config.vocab_size)[3]
    with torch.no_grad():
        speaker.get_output_embeddings().bias[token] = 100.0
    model = classifier_from(speaker, tmp_path)
    return build_probe(ProbeOptions("sampled", max_length=12), model, tokenizer), token


def test_the_checkpoint_speaks_for_a_classifier(spoken):
    probe, token = spoken
    batch = first_batch(probe)
    assert set(batch["labels"].tolist()) == {0, 1}
    payload = batch["attention_mask"].sum(1) - probe.template.num_fixed
    assert torch.equal((batch["input_ids"] == token).sum(1), payload)


def test_a_checkpoint_speaks_once_for_all_refreshes(spoken, monkeypatch):
    probe, _ = spoken
    monkeypatch.setattr(AutoModelForMaskedLM, "from_pretrained", None)
    beginnings = {row[:size] for row in probe.said for size in range(1, len(row) + 1)}
    for seed in (1, 2):
        batch = first_batch(probe, seed=seed)
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
            assert tuple(ids[mask.bool()][1:-1].tolist()) in beginnings


@pytest.mark.parametrize("wrap", [lambda m: m, with_adapters], ids=["plain", "peft"])
@pytest.mark.parametrize("name", ["bert-mlm", "gpt2"])
def test_what_a_checkpoint_says_does_not_depend_on_global_randomness(tmp_path, name, wrap):
    model = wrap(classifier_from(models.build(name), tmp_path))
    said = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        options = ProbeOptions("sampled", max_length=12)
        said.append(build_probe(options, model, tokenizers_zoo.build("bert")).said)
    assert said[0] == said[1]
    assert len(set(said[0])) > 1


def test_a_checkpoint_without_a_language_model_head_is_refused(tmp_path):
    model = classifier_from(models.build("bert").base_model, tmp_path)
    state = torch.get_rng_state()
    with pytest.raises(ProbeError, match="there is none"):
        build_probe(ProbeOptions("sampled"), model, tokenizers_zoo.build("bert"))
    assert torch.equal(state, torch.get_rng_state())


def test_a_checkpoint_that_was_trained_since_is_refused(tmp_path):
    """Its head is tied to its embedding, so no weight would be missing."""
    trained = classifier_from(models.build("gpt2"), tmp_path / "pretrained")
    model = classifier_from(trained, tmp_path / "trained")
    with pytest.raises(ProbeError, match="pre-trained as a language model"):
        build_probe(ProbeOptions("sampled"), model, tokenizers_zoo.build("bert"))


def test_a_checkpoint_that_is_gone_is_named(tmp_path):
    model = classifier_from(models.build("bert-mlm"), tmp_path / "there")
    shutil.rmtree(tmp_path / "there")
    with pytest.raises(ProbeError, match=r"there, which can't be read"):
        build_probe(ProbeOptions("sampled"), model, tokenizers_zoo.build("bert"))


def test_the_contrast_of_a_checkpoints_words_is_uniform(spoken):
    probe, token = spoken
    (contrast,) = contrast_of(probe).values()
    assert (first_batch(contrast)["input_ids"] != token).any()
    assert exponent_of(probe) is None
