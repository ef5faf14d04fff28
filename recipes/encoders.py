"""Text encoders in three modes: a head on a frozen backbone, LoRA, and full fine-tuning.

What lies below the first trained layer runs once per record: a fixed transformation by the public
checkpoint, of each record by itself, which costs no privacy and saves every epoch's forward passes.
"""

from __future__ import annotations

import hashlib
import math
import os
import string
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import texts
import torch
import torch.nn.functional as F
from offline import CACHE
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    BertConfig,
    BertTokenizer,
    PreTrainedModel,
)
from transformers.modeling_outputs import SequenceClassifierOutput

ADAPTED = 1 / 3  # share of the layers that have adapters in LoRA, counted from the top


class Rows(Dataset[dict[str, Any]]):
    """Records as dictionaries, kept by column: labels, token ids, features."""

    def __init__(self, columns: Mapping[str, Sequence[Any]]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns["labels"])

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: column[index] for name, column in self.columns.items()}


class FrozenForSequenceClassification(PreTrainedModel):
    """A trained part on a frozen encoder.

    Takes tokens, as probes are, or the features that the same encoder made of a record.

    Args:
        encoder: Frozen.
        trained: (features, attention_mask) -> logits.
        num_labels: Classes.
    """

    main_input_name = "input_ids"

    def __init__(self, encoder: PreTrainedModel, trained: nn.Module, num_labels: int) -> None:
        config = type(encoder.config).from_dict({**encoder.config.to_dict()})
        config.num_labels = num_labels
        super().__init__(config)
        self.encoder = encoder.requires_grad_(False)
        self.trained = trained

    def train(self, mode: bool = True) -> FrozenForSequenceClassification:
        """The frozen part stays in eval mode: it has no dropout to regularise with."""
        super().train(mode)
        self.encoder.eval()
        return self

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        features: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> SequenceClassifierOutput:
        """Logits, from features where they are given; the mean loss is for HF's evaluation."""
        if features is None:
            features = self.features_of(input_ids, attention_mask, token_type_ids)
        logits = self.trained(features, attention_mask)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)

    @torch.no_grad()
    def features_of(
        self, input_ids: Any, attention_mask: Any, token_type_ids: Any = None
    ) -> Tensor:
        """What the trained part reads, [batch, hidden] or [batch, position, hidden]."""
        tokens = {"input_ids": input_ids, "attention_mask": attention_mask}
        if token_type_ids is not None:
            tokens["token_type_ids"] = token_type_ids
        return self.encoder(**tokens)[self.trained.reads]


class Head(nn.Module):
    """HF's standard head: a linear layer on the pooled CLS token."""

    reads = "pooler_output"

    def __init__(self, config: Any, num_labels: int) -> None:
        super().__init__()
        self.classifier = nn.Linear(config.hidden_size, num_labels)
        nn.init.normal_(self.classifier.weight, std=config.initializer_range)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, features: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Logits of a pooled token."""
        return self.classifier(features)


class UpperLayers(nn.Module):
    """The upper layers of an encoder with rank-8 adapters on query and value, and HF's head.

    Args:
        model: A classifier whose layers are ``base_model.encoder.layer`` (BERT, RoBERTa, …).
        num_layers: How many of them to keep, counted from the top.
    """

    reads = "last_hidden_state"

    def __init__(self, model: PreTrainedModel, num_layers: int) -> None:
        super().__init__()
        base = model.base_model
        base.encoder.layer = base.encoder.layer[-num_layers:]
        base.embeddings = GivenEmbeddings()
        lora = LoraConfig(r=8, lora_alpha=16, target_modules=["query", "value"])
        self.model = inject_adapter_in_model(lora, model)
        self.model.classifier.requires_grad_(True)

    def forward(self, features: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Logits of what the layers below made of a text."""
        return self.model(inputs_embeds=features, attention_mask=attention_mask).logits


class GivenEmbeddings(nn.Module):
    """In the place of an encoder's embeddings where its lower layers have run already."""

    def forward(self, inputs_embeds: Tensor, **_: Any) -> Tensor:
        """They have seen positions and segments; nothing is added."""
        return inputs_embeds


class Collator:
    """Stacks or pads features where records have them, else pads tokens with the tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        """One batch."""
        labels = {"labels": torch.tensor([int(row["labels"]) for row in rows])}
        if "features" not in rows[0]:
            tokens = [{k: v for k, v in row.items() if k != "labels"} for row in rows]
            return {**self.tokenizer.pad(tokens, return_tensors="pt"), **labels}
        features = [row["features"] for row in rows]
        if features[0].dim() == 1:
            return {"features": torch.stack(features), **labels}
        mask = pad_sequence([torch.ones(len(f), dtype=torch.long) for f in features], True)
        return {"features": pad_sequence(features, True), "attention_mask": mask, **labels}


def tokenized(tokenizer: Any, texts: Sequence[str], labels: Sequence[int], length: int) -> Rows:
    """Token ids, cut to a length."""
    ids = tokenizer(list(texts), truncation=True, max_length=length)["input_ids"]
    return Rows({"input_ids": ids, "labels": labels})


def tokenized_splits(data: texts.Texts, tokenizer: Any, length: int) -> dict[str, Rows]:
    """Every split of a data set, and its public texts under label 0."""
    splits = {
        name: tokenized(tokenizer, *zip(*getattr(data, name), strict=True), length)
        for name in ("train", "validation", "test")
    }
    return splits | {"public": tokenized(tokenizer, data.public, [0] * len(data.public), length)}


def featurised_splits(
    splits: Mapping[str, Rows], model: PreTrainedModel, collate: Any, cache: str | None
) -> dict[str, Rows]:
    """Every split with the frozen part's features."""
    assert isinstance(model, FrozenForSequenceClassification)
    return {name: featurised(rows, model, collate, cache) for name, rows in splits.items()}


def featurised(
    rows: Rows, model: FrozenForSequenceClassification, collate: Any, cache: str | None
) -> Rows:
    """The same records with the frozen part's features besides their tokens.

    Args:
        rows: Tokenised records.
        model: Whose encoder is frozen.
        collate: From records to a batch.
        cache: Name of the checkpoint, under which features are kept on disk; None keeps none.
    """
    if cache is None:
        return _with_features(rows, _features(rows, model.eval(), collate))
    depth = (model.trained.reads, model.encoder.config.num_hidden_layers)
    key = repr((cache, depth, rows.columns["input_ids"]))
    digest = hashlib.sha256(key.encode()).hexdigest()[:24]
    path = CACHE.parent / "features" / f"{digest}.safetensors"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.part")
        save_file({"features": _features(rows, model.eval(), collate)}, str(partial))
        partial.replace(path)
    return _with_features(rows, load_file(str(path))["features"])


def _with_features(rows: Rows, features: Tensor) -> Rows:
    """One vector per record, or one per token, by the records' lengths."""
    ids = rows.columns["input_ids"]
    is_pooled = len(features) == len(ids)
    return Rows(
        {**rows.columns, "features": features if is_pooled else features.split([*map(len, ids)])}
    )


def _features(rows: Rows, model: FrozenForSequenceClassification, collate: Any) -> Tensor:
    """Of all records one after the other, computed in batches of like lengths."""
    ids = rows.columns["input_ids"]
    by_length = sorted(range(len(rows)), key=lambda i: len(ids[i]))
    found: dict[int, Tensor] = {}
    for start in range(0, len(rows), 64):
        at = by_length[start : start + 64]
        batch = collate([rows[i] for i in at])
        mask = batch["attention_mask"]
        features = model.features_of(batch["input_ids"], mask)
        for i, own, kept in zip(at, features, mask.bool(), strict=True):
            found[i] = own[None] if own.dim() == 1 else own[kept]
    return torch.cat([found[i] for i in range(len(rows))])


def effective_rank(features: Tensor) -> float:
    """Exponential of the entropy of the normalised eigenvalues of XᵀX (Roy & Vetterli 2007)."""
    X = features.double()
    shares = torch.linalg.eigvalsh(X.mT @ X).clamp(min=0)
    shares = shares / shares.sum()
    return float(torch.exp(-torch.xlogy(shares, shares).sum()))


def builder(checkpoint: str, num_labels: int, mode: str) -> Callable[[], PreTrainedModel]:
    """A function that builds the model afresh, its new layers under the current seed."""

    def full() -> PreTrainedModel:
        # Eager attention: on a CPU in bf16, the fused one's backward pass takes a third of a step.
        model = AutoModelForSequenceClassification.from_pretrained(
            checkpoint, num_labels=num_labels, attn_implementation="eager"
        )
        return without_dropout(model)

    if mode == "full":
        return full
    num_layers = AutoConfig.from_pretrained(checkpoint).num_hidden_layers
    num_adapted = math.ceil(num_layers * ADAPTED) if mode == "lora" else 0
    encoder = AutoModel.from_pretrained(checkpoint, num_hidden_layers=num_layers - num_adapted)

    def on_frozen() -> PreTrainedModel:
        trained = (
            UpperLayers(full(), num_adapted) if mode == "lora" else Head(encoder.config, num_labels)
        )
        return FrozenForSequenceClassification(encoder, trained, num_labels)

    return on_frozen


def without_dropout(model: PreTrainedModel) -> PreTrainedModel:
    """Noise and few epochs regularise enough, and drawing masks is slow on a CPU."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def tiny_checkpoint() -> str:
    """The folder of a random encoder with a tokenizer of letters, for smoke runs."""
    folder = Path(tempfile.mkdtemp())
    letters = string.ascii_lowercase
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *texts.MADE_UP_WORDS]
    path = folder / "vocab.txt"
    path.write_text("\n".join([*vocabulary, *(f"##{letter}" for letter in letters)]))
    tokenizer = BertTokenizer(vocab=str(path), vocab_file=str(path))
    tokenizer.save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    AutoModel.from_config(config).save_pretrained(folder)
    return str(folder)
