"""Probes of words: in a language's own proportions, as the tokenizer writes them, from no text."""

from __future__ import annotations

import builtins
from collections import Counter
from itertools import pairwise

import models
import pytest
import tokenizers_zoo
import torch

from hf_dpkfc import WordTokenProbe
from hf_dpkfc.curvature import words
from hf_dpkfc.curvature.catalogue import ProbeOptions, build_probe
from hf_dpkfc.errors import ProbeError

KINDS = ["bert", "gpt2", "t5"]


class Letters:
    """A tokenizer whose tokens are characters."""

    def __call__(self, lines, add_special_tokens, verbose):
        assert not add_special_tokens
        assert not verbose  # a line is cut by the probe, not by the tokenizer
        return {"input_ids": [[ord(c) for c in line] for line in lines]}


def letters_probe(monkeypatch, listed, language="en", **fields):
    frequencies = torch.tensor([*listed.values()], dtype=torch.float64)
    monkeypatch.setattr(words, "word_frequencies", lambda _: (tuple(listed), frequencies))
    built = build_probe(ProbeOptions("zipf"), models.build("bert"), tokenizers_zoo.build("bert"))
    return WordTokenProbe(
        built.template,
        tuple(range(1, 0x10000)),
        built.labels,
        built.min_length,
        built.max_length,
        **{"tokenizer": Letters(), "language": language, **fields},
    )


def drawn(probe, sizes, seed=0):
    return probe._drawer()(sizes, torch.Generator().manual_seed(seed))


def text_of(probe, size=30_000):
    return "".join(map(chr, drawn(probe, [size])[0]))


def test_words_are_as_common_as_listed(monkeypatch):
    text = text_of(letters_probe(monkeypatch, {"aa": 6.0, "bb": 3.0, "cc": 1.0}))
    counts = Counter(text.lower()[i : i + 2] for i in range(len(text)))
    total = counts["aa"] + counts["bb"] + counts["cc"]
    assert counts["aa"] / total == pytest.approx(0.6, abs=0.02)
    assert counts["cc"] / total == pytest.approx(0.1, abs=0.02)


def test_the_exponent_sharpens_frequencies(monkeypatch):
    text = text_of(letters_probe(monkeypatch, {"aa": 3.0, "bb": 1.0}, exponent=2.0)).lower()
    assert text.count("aa") / (text.count("aa") + text.count("bb")) == pytest.approx(0.9, abs=0.02)


def test_marks_stand_at_their_rates_and_sentences_begin_with_capitals(monkeypatch):
    text = text_of(letters_probe(monkeypatch, {"ab": 1.0}))
    num_words = text.lower().count("ab")
    for mark, rate in ((".", 65.3), (",", 61.6), ('"', 26.7), (" - ", 15.3)):
        expected = num_words * rate / 1000
        assert text.count(mark) == pytest.approx(expected, abs=5 * expected**0.5)
    assert text.startswith("Ab")
    assert all(
        after[:1] in ("A", "") for end in (". ", "? ", "! ") for after in text.split(end)[1:]
    )
    assert text.count("A") == 1 + sum(text[:-1].count(end) for end in (". ", "? ", "! "))


def test_digits_of_numbers_are_drawn(monkeypatch):
    text = text_of(letters_probe(monkeypatch, {"00": 1.0}), size=9000)
    counts = Counter(c for c in text if c.isdigit())
    assert set(counts) == set("0123456789")
    assert max(counts.values()) < 2 * min(counts.values())


def test_a_single_zero_is_a_word():
    generator = torch.Generator().manual_seed(0)
    assert words._with_digits("0", generator) == "0"
    assert words._with_digits("two", generator) == "two"
    assert words._with_digits("c0d0", generator) == "c0d0"
    assert len(words._with_digits("0,000.00", generator)) == 8


@pytest.mark.parametrize("language", words.SPACELESS)
def test_nothing_stands_between_words_of_languages_without_spaces(monkeypatch, language):
    assert " " not in text_of(letters_probe(monkeypatch, {"字": 1.0}, language), size=2000)


@pytest.mark.parametrize("kind", KINDS)
def test_lines_are_what_the_tokenizer_makes_of_words(kind):
    tokenizer = tokenizers_zoo.build(kind)
    model = models.build("bert")
    model.config.vocab_size = len(tokenizer)
    probe = build_probe(ProbeOptions("words", max_length=24), model, tokenizer)
    assert isinstance(probe, WordTokenProbe)
    sizes = [3, 9, 20]
    for payload, size in zip(drawn(probe, sizes), sizes, strict=True):
        assert len(payload) == size
        assert set(payload) <= set(probe.payload_ids)
    batch = next(probe.batches(1, 8, torch.Generator().manual_seed(0)))
    assert batch["input_ids"].shape[0] == len(batch["labels"]) == 8
    assert batch["input_ids"].shape[1] <= 24


def test_the_same_seed_draws_the_same_lines():
    tokenizer = tokenizers_zoo.build("bert")
    probe = build_probe(ProbeOptions("words"), models.build("bert"), tokenizer)
    assert drawn(probe, [9, 9], seed=1) == drawn(probe, [9, 9], seed=1) != drawn(probe, [9, 9], 2)


def test_frequencies_are_those_of_the_language():
    english, weights = words.word_frequencies("en")
    assert english[0] == "the"
    assert all(one >= two for one, two in pairwise(weights.tolist()))
    assert words.word_frequencies("de")[0][:3] != english[:3]


def test_options_reach_the_probe():
    model, tokenizer = models.build("bert"), tokenizers_zoo.build("bert")
    options = ProbeOptions("words", max_length=20, zipf_exponent=0.5, language="fr")
    probe = build_probe(options, model, tokenizer)
    assert (probe.language, probe.exponent, probe.max_length) == ("fr", 0.5, 20)


def test_an_unknown_language_is_named():
    with pytest.raises(ProbeError, match="probe_language='xx'"):
        build_probe(
            ProbeOptions("words", language="xx"), models.build("bert"), tokenizers_zoo.build("bert")
        )


def test_a_missing_library_is_named(monkeypatch):
    words.word_frequencies.cache_clear()
    imported = builtins.__import__

    def without(name, *rest):
        if name == "wordfreq":
            raise ImportError(name)
        return imported(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ProbeError, match=r"hf-dpkfc\[words\]"):
        words.word_frequencies("en")


def test_a_line_of_unknown_words_goes_on_in_the_next_one(monkeypatch):
    def knows_every_other_line(lines, **_):
        return {"input_ids": [[], [7, 8]] * (len(lines) // 2)}

    probe = letters_probe(monkeypatch, {"ab": 1.0}, tokenizer=knows_every_other_line)
    assert drawn(probe, [2, 3, 5, 1]) == [[7, 8], [7, 8, 7], [7, 8, 7, 8, 7], [7]]


def test_a_large_exponent_leaves_the_commonest_word(monkeypatch):
    probe = letters_probe(monkeypatch, {"aa": 0.05, "bb": 0.01}, exponent=400.0)
    assert "b" not in text_of(probe, size=1000).lower()


def test_english_i_is_a_capital(monkeypatch):
    assert "i" not in text_of(letters_probe(monkeypatch, {"i": 1.0}), size=1000)
    assert "i" in text_of(letters_probe(monkeypatch, {"i": 1.0}, "it"), size=1000)


def test_a_tokenizer_of_another_script_is_told_before_training():
    tokenizer = tokenizers_zoo.build("bert")
    with pytest.raises(ProbeError, match="knows no token"):
        build_probe(ProbeOptions("words", language="ko"), models.build("bert"), tokenizer)


def test_a_tokenizer_that_knows_no_word_is_told(monkeypatch):
    probe = letters_probe(
        monkeypatch, {"ab": 1.0}, tokenizer=lambda lines, **_: {"input_ids": [[]]}
    )
    with pytest.raises(ProbeError, match="probe_language"):
        drawn(probe, [4])
