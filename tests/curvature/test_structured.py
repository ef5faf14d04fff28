from __future__ import annotations

import math

import models
import pytest
import tokenizers_zoo
import torch
from torch import nn

from hf_dpkfc.curvature.catalogue import ProbeOptions, build_probe
from hf_dpkfc.curvature.labels import LabelSpace
from hf_dpkfc.curvature.probes import SequenceTemplate
from hf_dpkfc.curvature.structured import LineLaw, StructuredTokenProbe, log_ranks
from hf_dpkfc.curvature.vocabulary import (
    Kind,
    count_reliably_ranked,
    ranked_payload_ids,
    token_kinds,
)
from hf_dpkfc.losses import Task


def rows_for(tokenizer):
    """Embedding rows that hold every id; ids may have gaps."""
    return max(tokenizer.get_vocab().values()) + 1


def probe_for(tokenizer, embedding=None, **options):
    payload = tuple(ranked_payload_ids(tokenizer))
    return StructuredTokenProbe(
        SequenceTemplate.of(tokenizer),
        payload,
        LabelSpace(Task.SINGLE_LABEL, 3),
        **{"min_length": 8, "max_length": 16} | options,
        kinds=tuple(token_kinds(tokenizer, payload)),
        num_known=count_reliably_ranked(tokenizer, payload),
        embedding=embedding or nn.Embedding(rows_for(tokenizer), 4),
    )


def first_batch(probe, size=32, seed=0):
    return next(iter(probe.batches(1, size, torch.Generator().manual_seed(seed))))


def kinds_by_token(name):
    tokenizer = tokenizers_zoo.build(name)
    ids = ranked_payload_ids(tokenizer)
    tokens = tokenizer.convert_ids_to_tokens(ids)
    return dict(zip(tokens, token_kinds(tokenizer, ids), strict=True))


def remembering(num_tokens, num_known, num_features=6):
    """Embeddings whose first coordinate is log(rank) exactly, the rest noise; ranks shuffled after
    the known ones."""
    generator = torch.Generator().manual_seed(0)
    log_rank = torch.arange(1, num_tokens + 1).double().log()
    log_rank[num_known:] = log_rank[torch.randperm(num_known, generator=generator)][
        : num_tokens - num_known
    ]
    noise = torch.randn(num_tokens, num_features, generator=generator).double()
    rotation = torch.linalg.qr(torch.randn(num_features, num_features, generator=generator))[0]
    noise[:, 0] = log_rank
    return noise @ rotation.double(), log_rank


@pytest.mark.parametrize("name", tokenizers_zoo.NAMES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_special_tokens_stand_where_the_tokenizer_puts_them_and_nowhere_else(name, side):
    tokenizer = tokenizers_zoo.build(name)
    tokenizer.padding_side = side
    probe = probe_for(tokenizer)
    batch = first_batch(probe)
    for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
        real = ids[mask.bool()].tolist()
        before, after = map(list, probe.template.fixed)
        assert real[: len(before)] == before
        assert real[len(real) - len(after) :] == after
        assert set(real[len(before) : len(real) - len(after)]) <= set(probe.payload_ids)


@pytest.mark.parametrize("side", ["left", "right"])
def test_masks_are_exact(side):
    tokenizer = tokenizers_zoo.build("bert")
    tokenizer.padding_side = side
    batch = first_batch(probe_for(tokenizer))
    assert torch.equal(batch["attention_mask"] == 0, batch["input_ids"] == tokenizer.pad_token_id)


@pytest.mark.parametrize("name", tokenizers_zoo.NAMES)
def test_the_same_seed_gives_the_same_probes(name):
    probe = probe_for(tokenizers_zoo.build(name))
    one, two = first_batch(probe, seed=4), first_batch(probe, seed=4)
    assert all(torch.equal(one[k], two[k]) for k in one)


def test_kinds_of_word_pieces():
    kinds = kinds_by_token("bert")
    assert kinds["the"] is Kind.WORD
    assert kinds["a"] is Kind.WORD
    assert kinds["##ing"] is Kind.CONTINUATION


def test_kinds_where_beginnings_of_words_are_marked():
    kinds = kinds_by_token("t5")
    assert kinds["▁the"] is Kind.WORD
    assert kinds["ing"] is Kind.CONTINUATION
    assert kinds["▁"] is Kind.MARK


def test_kinds_where_nothing_marks_words():
    kinds = kinds_by_token("gpt2")
    assert kinds["the"] is Kind.WORD
    assert kinds["."] is Kind.MARK


@pytest.mark.parametrize(
    ("name", "unknown"),
    [("bert", {"##ing", "a", "##z"}), ("gpt2", {"a", "."}), ("t5", set())],
)
def test_the_tokenizer_ranks_words_merges_and_unigrams(name, unknown):
    tokenizer = tokenizers_zoo.build(name)
    ids = ranked_payload_ids(tokenizer)
    known = count_reliably_ranked(tokenizer, ids)
    rest = set(tokenizer.convert_ids_to_tokens(ids[known:]))
    assert unknown <= rest
    assert (len(rest) > 0) == bool(unknown)


def test_unknown_ranks_are_read_off_the_embedding():
    vectors, truth = remembering(num_tokens=500, num_known=400)
    found = log_ranks(vectors, 400)
    # The ridge shrinks a little.
    torch.testing.assert_close(found[400:], truth[400:], atol=0.05, rtol=0)


def test_known_ranks_are_kept():
    found = log_ranks(torch.randn(500, 6, generator=torch.Generator().manual_seed(1)), 400)
    torch.testing.assert_close(found[:400], torch.arange(1, 401).double().log())
    assert found.min() >= 0


@pytest.mark.parametrize("num_known", [0, 20, 500])
def test_with_too_few_known_ranks_or_none_unknown_the_order_stands(num_known):
    found = log_ranks(torch.randn(500, 6), num_known)
    torch.testing.assert_close(found, torch.arange(1, 501).double().log())


def test_constant_embeddings_rank_finitely():
    assert log_ranks(torch.ones(100, 3), 50).isfinite().all()


def law_of_three_words(mark=0.2, continuation=0.1):
    frequencies = torch.tensor([0.4, 0.3 - mark - continuation + 0.3, continuation, mark]).double()
    kinds = torch.tensor([Kind.WORD, Kind.WORD, Kind.CONTINUATION, Kind.MARK])
    return LineLaw.of(frequencies, kinds), kinds


def test_a_line_begins_with_a_word_and_no_two_marks_stand_together():
    law, kinds = law_of_three_words()
    drawn = kinds[law.draw(200, 30, torch.Generator().manual_seed(0))]
    assert (drawn[:, 0] == Kind.WORD).all()
    marks = drawn == Kind.MARK
    assert marks.any()
    assert not (marks[:, 1:] & marks[:, :-1]).any()


def test_a_continuation_never_follows_a_mark():
    law, kinds = law_of_three_words()
    drawn = kinds[law.draw(200, 30, torch.Generator().manual_seed(0))]
    continuations = drawn[:, 1:] == Kind.CONTINUATION
    assert continuations.any()
    assert not (continuations & (drawn[:, :-1] == Kind.MARK)).any()


@pytest.mark.statistical
def test_kinds_have_the_shares_that_their_frequencies_add_up_to():
    # Positions of a line are dependent, lines are not: six standard deviations of the mean over
    # lines, false-alarm probability 2e-9 each. The first ten positions are the chain's approach.
    law, kinds = law_of_three_words()
    drawn = kinds[law.draw(2000, 60, torch.Generator().manual_seed(0))][:, 10:]
    for kind, share in ((Kind.MARK, 0.2), (Kind.CONTINUATION, 0.1)):
        per_line = (drawn == kind).double().mean(1)
        assert abs(per_line.mean() - share) < 6 * per_line.std() / math.sqrt(len(per_line))


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9, 1.0])
def test_any_share_of_marks_gives_a_law(share):
    frequencies = torch.tensor([1 - share, share]).double()
    law = LineLaw.of(frequencies, torch.tensor([Kind.WORD, Kind.MARK]))
    assert 0 <= law.mark_rate <= 1
    assert 0 <= law.continuation_rate <= 1


def test_probes_follow_the_embedding_at_its_present_weights():
    tokenizer = tokenizers_zoo.build("gpt2")
    embedding = nn.Embedding(rows_for(tokenizer), 1)
    probe = probe_for(tokenizer, embedding)
    payload = torch.tensor(probe.payload_ids)
    known = torch.arange(1, probe.num_known + 1).double().log()
    with torch.no_grad():  # every byte is rare, then "." as common as the commonest merge
        embedding.weight.fill_(10.0)
        embedding.weight[payload[: probe.num_known], 0] = known.float()
    dot = tokenizer.convert_tokens_to_ids(".")
    rare = (first_batch(probe, size=500)["input_ids"] == dot).sum()
    with torch.no_grad():
        embedding.weight[dot] = 0.0
    common = (first_batch(probe, size=500)["input_ids"] == dot).sum()
    assert common > 10 * rare


def test_the_catalogue_builds_it_from_model_and_tokenizer_alone():
    model = models.build("bert")
    probe = build_probe(
        ProbeOptions("structured", max_length=16, zipf_exponent=1.5),
        model,
        tokenizers_zoo.build("bert"),
    )
    assert isinstance(probe, StructuredTokenProbe)
    assert probe.exponent == 1.5
    assert probe.embedding is model.get_input_embeddings()
    assert probe.is_data_free
    assert first_batch(probe)["input_ids"].max() < model.config.vocab_size
