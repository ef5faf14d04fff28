"""CIFAR-100 with a ViT- or DeiT-class checkpoint: 5 epochs, batch 256, AdamW.

The paper fine-tunes end to end in its appendix and speaks of a frozen backbone with a head
elsewhere: --train full and --train head are both here. CIFAR-10 is the public proxy, as there.
--data cifar10 stands in under its own name. --model pretrained-here needs no Hub: a small ViT is
first trained without privacy on a public split, 20,000 of CIFAR-10's training images, which are
then no part of the private ones.

    python recipes/cifar100_vit.py --method synthetic --epsilon 1
    python recipes/cifar100_vit.py --data cifar10 --model pretrained-here --data-dir DIR
    python recipes/compare.py cifar100_vit --train head --epsilons 1 3
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

import images
import own_vit
import torch
import torch.nn.functional as F
from task import Task, Trials, main
from torch import Tensor
from transformers import AutoModelForImageClassification, PreTrainedModel

NUM_LABELS = {"cifar100": 100, "cifar10": 10}
NUM_VALIDATION, NUM_PUBLIC = 5_000, 20_000
RATE_SCALE = {"head": 3.0, "full": 0.3}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", choices=NUM_LABELS, default="cifar100")
    parser.add_argument("--train", choices=RATE_SCALE, default="full")
    parser.add_argument(
        "--model", default="facebook/deit-tiny-patch16-224", help="id or 'pretrained-here'"
    )


def load(options: argparse.Namespace) -> Task:
    rows = _split(options.data, "train", options).shuffled()
    is_own = options.smoke or options.model == "pretrained-here"
    public = rows.part(0, NUM_PUBLIC) if is_own else _proxy(options)
    private = rows.part(len(rows) // 4 if options.smoke else NUM_PUBLIC) if is_own else rows
    held_out = len(private) // 10 if options.smoke else NUM_VALIDATION
    build = (
        own_vit.builder(f"{options.data}_vit", public, NUM_LABELS[options.data], options.smoke)
        if is_own
        else _checkpoint(options)
    )
    size = build().config.image_size
    return Task(
        name=("smoke_" if options.smoke else "") + f"{options.data}_{options.train}",
        title=f"{options.data}, {options.model.split('/')[-1]}, {options.train}",
        train=private.part(0, len(private) - held_out),
        validation=private.part(len(private) - held_out),
        test=_split(options.data, "test", options),
        public=public.part(0, 10_000),
        build_model=lambda: _frozen(build(), options.train),
        optimizer="adamw",
        epochs=1 if options.smoke else 5,
        batch_size=64 if options.smoke else 256,
        micro_batch=64,
        probe="pink",
        collator=Resized(size),
        rate_scale=RATE_SCALE[options.train],
        trials=Trials(300, 1) if options.smoke else Trials(10_000, 60),
    )


class Resized:
    """Stacks images and enlarges them to the checkpoint's size, each by itself."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """One batch."""
        batch = images.stack([{k: torch.as_tensor(v) for k, v in row.items()} for row in rows])
        pixels = batch["pixel_values"]
        if pixels.shape[-1] != self.size:
            pixels = F.interpolate(pixels, self.size, mode="bilinear", antialias=True)
        return batch | {"pixel_values": pixels}


def _split(name: str, split: str, options: argparse.Namespace) -> images.Images:
    if options.smoke:
        return images.noise_images(800 if split == "train" else 200, 3, seed=len(split), size=32)
    return images.load(name, split, options.data_dir)


def _proxy(options: argparse.Namespace) -> images.Images:
    """The other CIFAR's images, none of which is private; labels as many as the head has."""
    other = next(name for name in NUM_LABELS if name != options.data)
    rows = _split(other, "train", options)
    return images.Images(rows.pixel_values, rows.labels % NUM_LABELS[options.data])


def _frozen(model: PreTrainedModel, mode: str) -> PreTrainedModel:
    """With a new head under the current seed; the backbone trains in full mode only."""
    torch.nn.init.trunc_normal_(model.classifier.weight, std=0.02)
    torch.nn.init.zeros_(model.classifier.bias)
    model.base_model.requires_grad_(mode == "full")
    return model


def _checkpoint(options: argparse.Namespace) -> Callable[[], PreTrainedModel]:
    return lambda: AutoModelForImageClassification.from_pretrained(
        options.model, num_labels=NUM_LABELS[options.data], ignore_mismatched_sizes=True
    )


if __name__ == "__main__":
    main(sys.modules[__name__])
