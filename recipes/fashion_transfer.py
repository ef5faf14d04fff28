"""Transfer from an MNIST proxy: FashionMNIST ← MNIST (aligned) and PathMNIST ← MNIST (disjoint).

The paper's CNN and settings, as in mnist_cnn.py. PathMNIST's images have three channels; MNIST's
single one is repeated.

    python recipes/fashion_transfer.py --method synthetic --epsilon 1 --seed 0
    python recipes/fashion_transfer.py --target path --data-dir DIR     # DIR/pathmnist.npz
    python recipes/compare.py fashion_transfer --data-dir DIR --epsilons 1 3 8 --seeds 0 1 2
"""

from __future__ import annotations

import argparse
import sys

from mnist_cnn import image_task
from task import Task, main

TARGETS = {
    "fashion": ("fashion_mnist", "FashionMNIST ← MNIST, the paper's CNN"),
    "path": ("pathmnist", "PathMNIST ← MNIST, the paper's CNN"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", choices=TARGETS, default="fashion")


def load(options: argparse.Namespace) -> Task:
    private, title = TARGETS[options.target]
    return image_task(private, "mnist", title, options)


if __name__ == "__main__":
    main(sys.modules[__name__])
