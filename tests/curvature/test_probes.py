from __future__ import annotations

import math
from types import SimpleNamespace

import models
import pytest
import tokenizers_zoo
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from transformers import BertConfig, BertForTokenClassification, PreTrainedTokenizerFast

from hf_dpkfc.curvature.labels import LabelSpace
from hf_dpkfc.curvature.probes import (
    PinkNoiseProbe,
    PublicDataProbe,
    SequenceTemplate,
    UniformTokenProbe,
    WhiteNoiseProbe,
    ZipfTokenProbe,
)
from hf_dpkfc.curvature.vocabulary import ranked_payload_ids
from hf_dpkfc.errors import ConfigurationError, ProbeError
from hf_dpkfc.losses import Task

LABELS = LabelSpace(Task.SINGLE_LABEL, 3)


def probe_for(tokenizer, pair=False, **options):
    lengths = {"min_length": 8, "max_length": 16} | options
    template = SequenceTemplate.of(tokenizer, pair=pair)
    return ZipfTokenProbe(template, tuple(ranked_payload_ids(tokenizer)), LABELS, **lengths)


def first_batch(probe, size=32, seed=0):
    return next(iter(probe.batches(1, size, torch.Generator().manual_seed(seed))))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", tokenizers_zoo.NAMES)
def test_a_probe_looks_like_the_tokenizers_own_encoding(name, side):
    tokenizer = tokenizers_zoo.build(name)
    tokenizer.padding_side = side
    batch = first_batch(probe_for(tokenizer))
    own = tokenizer("a", return_token_type_ids="token_type_ids" in batch)
    payload = tokenizer("a", add_special_tokens=False)["input_ids"]
    at = next(
        i for i in range(len(own["input_ids"])) if own["input_ids"][i : i + len(payload)] == payload
    )
    before, after = own["input_ids"][:at], own["input_ids"][at + len(payload) :]
    for i, ids in enumerate(batch["input_ids"]):
        real = ids[batch["attention_mask"][i].bool()].tolist()
        assert real[: len(before)] == before
        assert real[len(real) - len(after) :] == after


@pytest.mark.parametrize("name", tokenizers_zoo.NAMES)
def test_special_added_and_unused_tokens_are_never_payload(name):
    tokenizer = tokenizers_zoo.build(name)
    forbidden = set(tokenizer.all_special_ids) | set(tokenizer.get_added_vocab().values())
    unused = {i for token, i in tokenizer.get_vocab().items() if "unused" in token}
    assert not (forbidden | unused) & set(ranked_payload_ids(tokenizer))


@pytest.mark.parametrize("leftover", ["[PAD]", "[MASK]", "<s>", "</s>", "<|endoftext|>"])
def test_special_tokens_of_a_parent_vocabulary_are_never_payload(leftover):
    """MPNet's vocabulary was made from BERT's and holds its special tokens as ordinary ones."""
    words = {leftover: 0, "<unk>": 1, "the": 2, "<b>": 3, "[sic]": 4}
    backend = Tokenizer(WordPiece(words, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    assert ranked_payload_ids(tokenizer) == [2, 3, 4]


@pytest.mark.parametrize("side", ["left", "right"])
def test_masks_are_exact(side):
    tokenizer = tokenizers_zoo.build("bert")
    tokenizer.padding_side = side
    batch = first_batch(probe_for(tokenizer))
    assert torch.equal(batch["attention_mask"] == 0, batch["input_ids"] == tokenizer.pad_token_id)
    lengths = batch["attention_mask"].sum(1)
    assert lengths.min() >= 8
    assert lengths.max() == batch["input_ids"].shape[1] <= 16


def test_pairs_have_both_separators_and_segments():
    tokenizer = tokenizers_zoo.build("bert")
    batch = first_batch(probe_for(tokenizer, pair=True))
    assert ((batch["input_ids"] == tokenizer.sep_token_id).sum(1) == 2).all()
    for types, mask in zip(batch["token_type_ids"], batch["attention_mask"], strict=True):
        real = types[mask.bool()].tolist()
        assert real == sorted(real)
        assert set(real) == {0, 1}


def test_without_a_pad_token_a_batch_has_one_length():
    tokenizer = tokenizers_zoo.build("gpt2")
    assert tokenizer.pad_token_id is None
    assert first_batch(probe_for(tokenizer))["attention_mask"].min() == 1


def test_word_pieces_rank_whole_words_before_continuations_before_characters():
    tokenizer = tokenizers_zoo.build("bert")
    tokens = tokenizer.convert_ids_to_tokens(ranked_payload_ids(tokenizer))
    assert tokens[:2] == ["the", "and"]
    classes = [2 if len(t.removeprefix("##")) == 1 else int(t.startswith("##")) for t in tokens]
    assert classes == sorted(classes)


def test_unigram_ranks_by_log_probability():
    tokenizer = tokenizers_zoo.build("t5")
    ranked = tokenizer.convert_ids_to_tokens(ranked_payload_ids(tokenizer))
    assert ranked[:3] == ["▁the", "▁of", "s"]


def test_bpe_ranks_by_merge_order_with_bytes_last():
    tokenizer = tokenizers_zoo.build("gpt2")
    ranked = tokenizer.convert_ids_to_tokens(ranked_payload_ids(tokenizer))
    lengths = [len(token) for token in ranked]
    assert min(lengths[: tokenizers_zoo.NUM_MERGES]) > 1
    assert set(lengths[tokenizers_zoo.NUM_MERGES :]) == {1}


@pytest.mark.statistical
def test_token_frequencies_follow_zipfs_law():
    # Chi-squared over the 20 commonest tokens; the bound has false-alarm probability 1e-9.
    probe = probe_for(tokenizers_zoo.build("gpt2"), min_length=100, max_length=100)
    drawn = torch.cat(
        [b["input_ids"].flatten() for b in probe.batches(20, 64, torch.Generator().manual_seed(7))]
    )
    weights = torch.arange(1, len(probe.payload_ids) + 1).double().reciprocal()
    expected = weights / weights.sum() * len(drawn)
    counts = torch.stack([(drawn == token).sum() for token in probe.payload_ids[:20]]).double()
    assert ((counts - expected[:20]).square() / expected[:20]).sum() < 89.0


def test_uniform_probe_is_flat():
    model = models.build("bert")
    probe = UniformTokenProbe.for_model(model, tokenizers_zoo.build("bert"), max_length=16)
    assert probe.exponent == 0.0


def test_probes_need_no_data_set_and_respect_the_models_limits():
    model = models.build("bert")
    probe = ZipfTokenProbe.for_model(model, tokenizers_zoo.build("bert"))
    assert probe.max_length == model.config.max_position_embeddings
    assert max(probe.payload_ids) < model.config.vocab_size
    assert probe.is_data_free


def test_the_same_seed_gives_the_same_probes():
    probe = probe_for(tokenizers_zoo.build("bert"))
    one, two = first_batch(probe, seed=4), first_batch(probe, seed=4)
    assert all(torch.equal(one[k], two[k]) for k in one)


def test_a_tokenizer_without_vocabulary_is_refused():
    with pytest.raises(ProbeError, match="no vocabulary"):
        ranked_payload_ids(None)


def test_lengths_out_of_order_are_refused():
    with pytest.raises(ConfigurationError, match="probe_min_length=20"):
        probe_for(tokenizers_zoo.build("bert"), min_length=20, max_length=16)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, 1.5])
@pytest.mark.parametrize("size", [(64, 64), (96, 48)])
def test_measured_power_slope_is_minus_two_alpha(alpha, size):
    probe = PinkNoiseProbe(*size, 3, LABELS, alpha=alpha)
    pixels = first_batch(probe, size=64)["pixel_values"].double()
    power = torch.fft.fft2(pixels).abs().square().mean((0, 1)).flatten()
    f_y, f_x = torch.fft.fftfreq(size[0]), torch.fft.fftfreq(size[1])
    radius = (f_y[:, None].square() + f_x.square()).sqrt().flatten()
    inside = (radius > 0.03) & (radius < 0.45)
    x, y = radius[inside].double().log(), power[inside].log()
    slope = ((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()
    assert abs(slope + 2 * alpha) < 0.05


def test_images_have_zero_mean_and_unit_deviation_each():
    pixels = first_batch(PinkNoiseProbe(20, 30, 3, LABELS))["pixel_values"]
    assert pixels.shape == (32, 3, 20, 30)
    assert pixels.mean((1, 2, 3)).abs().max() < 1e-5
    torch.testing.assert_close(pixels.std((1, 2, 3)), torch.ones(32))


def test_a_processor_that_does_not_normalise_sets_the_scale():
    class Processor:
        do_normalize = False
        image_mean = (0.4, 0.6)
        image_std = (0.1, 0.2)

    probe = PinkNoiseProbe.for_model(models.build("vit"), Processor())
    pixels = first_batch(probe, size=256)["pixel_values"]
    torch.testing.assert_close(pixels.mean((0, 2, 3)), torch.tensor([0.4, 0.6]), atol=0.02, rtol=0)


def test_white_noise_has_no_slope():
    assert WhiteNoiseProbe(8, 8, 1, LABELS).alpha == 0.0


@pytest.mark.parametrize("shape", [(8, 8, 0), (0, 8, 3), (1, 1, 1)])
def test_images_without_channels_or_pixels_are_refused(shape):
    with pytest.raises(ProbeError, match="at least one channel and two pixels"):
        PinkNoiseProbe(*shape, LABELS)


def test_public_probe_draws_records_and_relabels():
    rows = [{"x": torch.tensor([float(i)])} for i in range(5)]
    probe = PublicDataProbe(rows, lambda e: {"x": torch.stack([r["x"] for r in e])}, LABELS)
    batch = first_batch(probe)
    assert set(batch["x"].flatten().tolist()) <= {0.0, 1.0, 2.0, 3.0, 4.0}
    assert set(batch["labels"].tolist()) == {0, 1, 2}
    assert not probe.is_data_free


def test_an_empty_public_set_is_refused():
    with pytest.raises(ProbeError, match="empty"):
        PublicDataProbe([], lambda e: {})


@pytest.mark.parametrize(
    ("space", "check"),
    [
        (LabelSpace(Task.SINGLE_LABEL, 4), lambda y: set(y.tolist()) == {0, 1, 2, 3}),
        (
            LabelSpace(Task.MULTI_LABEL, 3),
            lambda y: y.shape == (200, 3) and set(y.unique().tolist()) == {0, 1},
        ),
        (LabelSpace(Task.REGRESSION, 1), lambda y: y.shape == (200,) and 0.7 < y.std() < 1.3),
    ],
)
def test_labels_of_whole_examples(space, check):
    assert check(space.draw(200, torch.Generator().manual_seed(0)))


def test_labels_of_tokens_stand_on_payload_only():
    config = BertConfig(
        vocab_size=60, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_labels=4
    )
    tokenizer = tokenizers_zoo.build("bert")
    probe = ZipfTokenProbe.for_model(BertForTokenClassification(config), tokenizer, max_length=16)
    batch = first_batch(probe)
    special = torch.isin(batch["input_ids"], torch.tensor(tokenizer.all_special_ids))
    assert torch.equal(batch["labels"] == -100, special)


def test_masked_lm_labels_are_the_masked_tokens():
    tokenizer = tokenizers_zoo.build("bert")
    probe = ZipfTokenProbe.for_model(models.build("bert-mlm"), tokenizer, max_length=16)
    batch = first_batch(probe)
    labelled = batch["labels"] != -100
    assert torch.equal(labelled, batch["input_ids"] == tokenizer.mask_token_id)
    assert labelled.any(1).all()


def test_span_labels_are_ordered_positions_inside_the_payload():
    payload = torch.tensor([[0, 1, 1, 1, 0, 0]] * 50).bool()
    drawn = LabelSpace(Task.SPAN, 2).draw_for_tokens(
        payload.long(), payload, None, torch.Generator().manual_seed(0)
    )
    assert (drawn["start_positions"] <= drawn["end_positions"]).all()
    assert drawn["start_positions"].min() >= 1
    assert drawn["end_positions"].max() <= 3


def test_zipf_mass_of_the_commonest_token():
    probe = probe_for(tokenizers_zoo.build("bert"))
    harmonic = sum(1 / r for r in range(1, len(probe.payload_ids) + 1))
    drawn = probe._draw_tokens(20000, torch.Generator().manual_seed(0))
    share = float((drawn == probe.payload_ids[0]).double().mean())
    # Six standard deviations: false-alarm probability 2e-9.
    p = 1 / harmonic
    assert abs(share - p) < 6 * math.sqrt(p * (1 - p) / 20000)


@pytest.mark.parametrize("task", [Task.MASKED_LM, Task.CAUSAL_LM])
def test_public_text_of_a_language_model_keeps_the_labels_that_its_collator_made(task):
    """The text is the label; masked positions would otherwise be asked for the mask itself."""
    ids, labels = torch.full((32, 4), 3), torch.tensor([[-100, 7, -100, -100]]).expand(32, 4)
    probe = PublicDataProbe(
        [{}], lambda rows: {"input_ids": ids, "labels": labels}, LabelSpace(task, 9)
    )
    assert torch.equal(first_batch(probe)["labels"], labels)
    assert torch.equal(first_batch(probe)["input_ids"], ids)


@pytest.mark.parametrize(("crops", "size"), [(True, (6, 4)), (False, (9, 9))])
def test_images_have_the_size_that_the_processor_gives_the_model(crops, size):
    processor = SimpleNamespace(
        do_center_crop=crops,
        crop_size={"height": 6, "width": 4},
        size={"shortest_edge": 9},
        image_mean=None,
        image_std=None,
        do_normalize=True,
    )
    probe = PinkNoiseProbe.for_model(models.build("vit"), processor)
    assert (probe.height, probe.width) == size
