"""MNIST with the paper's CNN: 5 epochs, batch 256, SGD with momentum 0.9, δ = 1/N.

Of the 60,000 training images 5,000 are held out for validation, so N = 55,000. FashionMNIST is the
public proxy, as in the paper. Every image is standardised by itself, which costs no privacy.

    python recipes/mnist_cnn.py --method synthetic --epsilon 1 --seed 0
    python recipes/mnist_cnn.py --data-dir DIR        # DIR/mnist and DIR/fashion_mnist: idx(.gz)
    python recipes/compare.py mnist_cnn --data-dir DIR --epsilons 1 3 8 --seeds 0 1 2
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import images
from paper_cnn import PaperCNNConfig, PaperCNNForImageClassification
from task import Task, Trials, main

NUM_VALIDATION = 5_000
NUM_LABELS = {"mnist": 10, "fashion_mnist": 10, "pathmnist": 9}


def add_options(parser: argparse.ArgumentParser) -> None:
    """None of its own."""


def load(options: argparse.Namespace) -> Task:
    return image_task("mnist", "fashion_mnist", "MNIST, the paper's CNN", options)


def image_task(private: str, proxy: str, title: str, options: argparse.Namespace) -> Task:
    """The paper's CNN on one image data set, with another as the public proxy."""
    channels = 3 if private == "pathmnist" else 1
    load_split = _smoke_split if options.smoke else _split
    rows = load_split(private, "train", channels, options.data_dir).shuffled()
    held_out = len(rows) // 10 if options.smoke else NUM_VALIDATION

    def build_model() -> PaperCNNForImageClassification:
        config = PaperCNNConfig(num_channels=channels, num_labels=NUM_LABELS[private])
        return PaperCNNForImageClassification(config)

    return Task(
        name=("smoke_" if options.smoke else "") + private,
        title=f"{title}, 5 epochs of {len(rows) - held_out:,} images, batch 256",
        train=rows.part(0, len(rows) - held_out),
        validation=rows.part(len(rows) - held_out),
        test=load_split(private, "test", channels, options.data_dir),
        public=load_split(proxy, "train", channels, options.data_dir).part(0, 10_000),
        build_model=build_model,
        optimizer="sgd",
        epochs=1 if options.smoke else 5,
        batch_size=256,
        micro_batch=128,
        probe="pink",
        collator=images.stack,
        trials=Trials(num_records=600, num_steps=1) if options.smoke else Trials(num_steps=250),
    )


def _split(name: str, split: str, channels: int, data_dir: Path | None) -> images.Images:
    return images.load(name, split, data_dir).standardised().with_channels(channels)


def _smoke_split(name: str, split: str, channels: int, data_dir: Path | None) -> images.Images:
    seed = 1 + len(name + split)
    return images.noise_images(1_000, channels, seed, num_labels=NUM_LABELS[name])


if __name__ == "__main__":
    main(sys.modules[__name__])
