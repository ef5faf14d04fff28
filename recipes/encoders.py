"""Text encoders in three modes: a head on a frozen backbone, LoRA, and full fine-tuning.

With a frozen backbone, every record's features are computed once by the public checkpoint: a fixed
transformation of each record by itself, which costs no privacy and saves an epoch's forward passes.
"""

from __future__ import annotations

import hashlib
import os
import string
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import texts
import torch
import torch.nn.functional as F
from offline import CACHE
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    BertConfig,
    BertTokenizer,
    PreTrainedModel,
)
from transformers.modeling_outputs import SequenceClassifierOutput


class Rows(Dataset[dict[str, Any]]):
    """Records as dictionaries: token ids or features, and labels."""

    def __init__(self, inputs: Sequence[Any], name: str, labels: Sequence[int]) -> None:
        self.inputs, self.name, self.labels = inputs, name, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {self.name: self.inputs[index], "labels": self.labels[index]}


class FrozenForSequenceClassification(PreTrainedModel):
    """HF's standard head (a linear layer on the pooled CLS token) on a frozen encoder.

    Takes tokens, as probes are, or the features that the same encoder made of a record.
    """

    main_input_name = "input_ids"

    def __init__(self, encoder: PreTrainedModel, num_labels: int) -> None:
        config = type(encoder.config).from_dict({**encoder.config.to_dict()})
        config.num_labels = num_labels
        super().__init__(config)
        self.encoder = encoder.requires_grad_(False)
        self.classifier = nn.Linear(config.hidden_size, num_labels)
        nn.init.normal_(self.classifier.weight, std=config.initializer_range)
        nn.init.zeros_(self.classifier.bias)

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
            features = self.pooled(input_ids, attention_mask, token_type_ids)
        logits = self.classifier(features)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)

    @torch.no_grad()
    def pooled(self, input_ids: Any, attention_mask: Any, token_type_ids: Any = None) -> Tensor:
        """The pooled CLS token of each text, [batch, hidden]."""
        tokens = {"input_ids": input_ids, "attention_mask": attention_mask}
        if token_type_ids is not None:
            tokens["token_type_ids"] = token_type_ids
        return self.encoder(**tokens).pooler_output


class Collator:
    """Stacks features, or pads tokens with the tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        """One batch."""
        labels = torch.tensor([int(row["labels"]) for row in rows])
        if "features" in rows[0]:
            return {"features": torch.stack([row["features"] for row in rows]), "labels": labels}
        tokens = [{k: v for k, v in row.items() if k != "labels"} for row in rows]
        return {**self.tokenizer.pad(tokens, return_tensors="pt"), "labels": labels}


def tokenized(tokenizer: Any, texts: Sequence[str], labels: Sequence[int], length: int) -> Rows:
    """Token ids, cut to a length."""
    ids = tokenizer(list(texts), truncation=True, max_length=length)["input_ids"]
    return Rows(ids, "input_ids", labels)


def featurised(
    rows: Rows, model: FrozenForSequenceClassification, collate: Any, cache: str | None
) -> Rows:
    """The same records with the frozen encoder's features in place of their tokens.

    Args:
        rows: Tokenised records.
        model: Whose encoder is frozen.
        collate: From records to a batch.
        cache: Name of the checkpoint, under which features are kept on disk; None keeps none.
    """
    if cache is None:
        return Rows(_features(rows, model.eval(), collate), "features", rows.labels)
    digest = hashlib.sha256(repr((cache, rows.inputs)).encode()).hexdigest()[:24]
    path = CACHE.parent / "features" / f"{digest}.safetensors"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.part")
        save_file({"features": _features(rows, model.eval(), collate)}, str(partial))
        partial.replace(path)
    return Rows(load_file(str(path))["features"], "features", rows.labels)


def _features(rows: Rows, model: FrozenForSequenceClassification, collate: Any) -> Tensor:
    by_length = sorted(range(len(rows)), key=lambda i: len(rows.inputs[i]))
    features = torch.empty(len(rows), model.config.hidden_size)
    for start in range(0, len(rows), 64):
        at = by_length[start : start + 64]
        batch = collate([rows[i] for i in at])
        features[at] = model.pooled(batch["input_ids"], batch["attention_mask"])
    return features


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

    def lora() -> PreTrainedModel:
        return get_peft_model(full(), LoraConfig(task_type="SEQ_CLS", r=8, lora_alpha=16))

    if mode == "head":
        encoder = AutoModel.from_pretrained(checkpoint)
        return lambda: FrozenForSequenceClassification(encoder, num_labels)
    return {"lora": lora, "full": full}[mode]


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
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    AutoModel.from_config(config).save_pretrained(folder)
    return str(folder)
