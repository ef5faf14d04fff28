"""IMDB reviews with TF-IDF and logistic regression: 2,000 words, 20 epochs, batch 256, SGD.

Vocabulary and document frequencies come from public sentences (Rotten Tomatoes): fitting them on
the private reviews, as is often done, isn't free. Every arm is tuned with the same effort on lr and
C. Of the 25,000 training reviews 2,500 are held out for validation; test reviews that repeat a
training review are left out. The synthetic probes are Zipf documents over the public vocabulary,
whose order is its order of frequency; the public ones are Rotten Tomatoes' sentences themselves.

    python recipes/imdb_logreg.py --method synthetic --epsilon 1
    python recipes/imdb_logreg.py --data-dir DIR                # DIR/imdb/reviews.json
    python recipes/compare.py imdb_logreg --data-dir DIR --epsilons 1 3
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter

import texts
import torch
import torch.nn.functional as F
from encoders import Collator, Rows, effective_rank
from task import Task, Trials, main
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.modeling_outputs import SequenceClassifierOutput

NUM_WORDS = 2_000
SPECIAL = ["[PAD]", "[UNK]"]


class TfidfForSequenceClassification(PreTrainedModel):
    """Logistic regression on TF-IDF; takes word ids, as probes are, or features made of them."""

    config_class = PretrainedConfig
    main_input_name = "input_ids"

    def __init__(self, idf: Tensor) -> None:
        super().__init__(PretrainedConfig(vocab_size=len(idf), num_labels=2))
        self.register_buffer("idf", idf)
        self.classifier = nn.Linear(len(idf), 2)

    def forward(self, input_ids=None, attention_mask=None, features=None, labels=None):
        """Logits; the mean loss is for HF's evaluation."""
        features = tfidf(input_ids, self.idf) if features is None else features
        logits = self.classifier(features)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


def tfidf(ids: Tensor, idf: Tensor) -> Tensor:
    """Counts times inverse document frequency, of unit length, [batch, vocabulary]."""
    counts = torch.zeros(len(ids), len(idf), device=ids.device)
    counts.scatter_add_(1, ids, torch.ones_like(ids, dtype=counts.dtype))
    return F.normalize(counts * idf)  # idf is 0 at padding and unknown words


def fit(public: list[str]) -> tuple[PreTrainedTokenizerFast, Tensor]:
    """Commonest words and their smoothed inverse document frequency, from public texts alone."""
    split = pre_tokenizers.Whitespace()
    documents = [[w for w, _ in split.pre_tokenize_str(text.lower())] for text in public]
    common = Counter(w for d in documents for w in d if len(w) > 1).most_common(NUM_WORDS)
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *(w for w, _ in common)])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.normalizer, backend.pre_tokenizer = normalizers.Lowercase(), split
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="[PAD]",
        unk_token="[UNK]",
        model_max_length=10_000,
        model_input_names=["input_ids", "attention_mask"],
    )
    frequency = Counter(word for document in documents for word in set(document))
    counts = torch.tensor([0.0] * len(SPECIAL) + [float(frequency[w]) for w, _ in common])
    idf = ((1 + len(documents)) / (1 + counts)).log() + 1
    idf[: len(SPECIAL)] = 0.0
    return tokenizer, idf


def add_options(parser: argparse.ArgumentParser) -> None:
    """None of its own."""


def load(options: argparse.Namespace) -> Task:
    data = texts.made_up(2) if options.smoke else texts.imdb(options.data_dir)
    tokenizer, idf = fit(data.public)
    splits = {
        "train": data.train,
        "validation": data.validation,
        "test": data.test,
        "public": [(text, 0) for text in data.public],
    }
    rows = {name: _features(tokenizer, idf, split) for name, split in splits.items()}
    features = rows["test"].columns["features"]
    measured = {"effective_rank_of_head_inputs": effective_rank(features)}
    return Task(
        name=("smoke_" if options.smoke else "") + "imdb_logreg",
        title=f"IMDB, TF-IDF with a public vocabulary, 20 epochs of {len(rows['train']):,}",
        **rows,
        build_model=lambda: TfidfForSequenceClassification(idf),
        optimizer="sgd",
        epochs=1 if options.smoke else 20,
        batch_size=64 if options.smoke else 256,
        micro_batch=64 if options.smoke else 256,
        probe="Zipf",
        collator=Collator(tokenizer),
        processor=tokenizer,
        rate_scale=10.0,
        trials=Trials(300, 1) if options.smoke else Trials(10_000, 160),
        options={"probe_max_length": 256} | ({"rank": 8} if options.smoke else {}),
        measure=lambda _: measured,
    )


def _features(tokenizer: PreTrainedTokenizerFast, idf: Tensor, split: texts.Labelled) -> Rows:
    ids = tokenizer([text for text, _ in split])["input_ids"]
    features = torch.cat([tfidf(torch.tensor(row or [1])[None], idf) for row in ids])
    return Rows({"features": features, "labels": [label for _, label in split]})


if __name__ == "__main__":
    main(sys.modules[__name__])
