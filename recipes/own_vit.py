"""A small ViT of one's own, pre-trained without privacy on public images: no Hub needed."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import images
from offline import CACHE
from transformers import (
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)


def builder(
    name: str, public: images.Images, num_labels: int, smoke: bool
) -> Callable[[], PreTrainedModel]:
    """A function that loads the model; it is trained once and kept under its name."""
    folder = (Path(tempfile.mkdtemp()) if smoke else CACHE.parent / "pretrained") / name
    if not folder.exists():
        _pretrain(folder, public, num_labels, epochs=0.1 if smoke else 15)
    return lambda: ViTForImageClassification.from_pretrained(folder)


def _pretrain(folder: Path, public: images.Images, num_labels: int, epochs: float) -> None:
    """Without privacy, on public images alone."""
    config = ViTConfig(
        image_size=32,
        patch_size=4,
        hidden_size=128,
        num_hidden_layers=6,
        num_attention_heads=4,
        intermediate_size=256,
        num_labels=num_labels,
    )
    arguments = TrainingArguments(
        output_dir=str(folder.with_suffix(".training")),
        per_device_train_batch_size=128,
        num_train_epochs=epochs,
        learning_rate=1e-3,
        warmup_steps=100,
        weight_decay=0.05,
        save_strategy="no",
        report_to="none",
    )
    model = ViTForImageClassification(config)
    trainer = Trainer(model, arguments, train_dataset=public, data_collator=images.stack)
    with contextlib.redirect_stdout(sys.stderr):  # standard output is for the result
        trainer.train()
    model.save_pretrained(folder)
