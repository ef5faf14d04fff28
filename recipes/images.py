"""Image data sets as normalised tensors: idx files or MedMNIST's npz in a folder, else the Hub.

Pixels are scaled to [-1, 1] by fixed constants (mean 0.5, deviation 0.5), which cost no privacy;
means and deviations computed from private images would.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

# Hub id, and the columns of image and label.
HUB = {
    "mnist": ("ylecun/mnist", "image", "label"),
    "fashion_mnist": ("zalando-datasets/fashion_mnist", "image", "label"),
    "cifar10": ("uoft-cs/cifar10", "img", "label"),
    "cifar100": ("uoft-cs/cifar100", "img", "fine_label"),
}


class Images(Dataset[dict[str, Tensor]]):
    """Rows of pixel_values [channel, height, width] and labels."""

    def __init__(self, pixel_values: Tensor, labels: Tensor) -> None:
        self.pixel_values, self.labels = pixel_values, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"pixel_values": self.pixel_values[index], "labels": self.labels[index]}

    def part(self, start: int, stop: int | None = None) -> Images:
        """A contiguous part."""
        return Images(self.pixel_values[start:stop], self.labels[start:stop])

    def shuffled(self, seed: int = 0) -> Images:
        """The same rows in a fixed random order."""
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        return Images(self.pixel_values[order], self.labels[order])

    def standardised(self) -> Images:
        """Each image by itself to zero mean and unit deviation: private, and as the probes are."""
        values = self.pixel_values
        means = values.mean((1, 2, 3), keepdim=True)
        deviations = values.std((1, 2, 3), keepdim=True).clamp(min=1e-3)  # a blank image stays
        return Images((values - means) / deviations, self.labels)

    def with_channels(self, channels: int) -> Images:
        """Grey images as colour ones, all channels equal."""
        count, own, height, width = self.pixel_values.shape
        if own == channels:
            return self
        return Images(self.pixel_values.expand(count, channels, height, width), self.labels)


def stack(rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A collator for :class:`Images`."""
    return {name: torch.stack([torch.as_tensor(row[name]) for row in rows]) for name in rows[0]}


def normalised(pixels: np.ndarray, labels: np.ndarray) -> Images:
    """Bytes [n, height, width(, channel)] as images."""
    values = torch.from_numpy(np.array(pixels)).float().div_(127.5).sub_(1.0)
    values = values.unsqueeze(1) if values.dim() == 3 else values.permute(0, 3, 1, 2).contiguous()
    return Images(values, torch.from_numpy(labels.astype(np.int64).reshape(-1)))


def load(name: str, split: str, data_dir: Path | None) -> Images:
    """The split ("train" or "test") of pathmnist or of one of :data:`HUB`."""
    if name == "pathmnist":
        return _medmnist(name, split, data_dir)
    if data_dir is not None and name == "cifar10":
        return _cifar10(data_dir / name, split)
    if data_dir is not None and name != "cifar100":
        prefix = {"train": "train", "test": "t10k"}[split]
        folder = data_dir / name
        pixels = _idx(folder / f"{prefix}-images-idx3-ubyte")
        return normalised(pixels, _idx(folder / f"{prefix}-labels-idx1-ubyte"))
    from datasets import load_dataset

    hub_id, image, label = HUB[name]
    rows = load_dataset(hub_id, split=split).with_format("numpy")
    return normalised(np.stack(list(rows[image])), np.asarray(rows[label]))


def noise_images(
    count: int, channels: int, seed: int, size: int = 28, num_labels: int = 10
) -> Images:
    """Separable classes of noise, for smoke runs."""
    generator = torch.Generator().manual_seed(seed)
    fixed = torch.Generator().manual_seed(0)
    centres = torch.randn(num_labels, channels, size, size, generator=fixed)
    labels = torch.randint(num_labels, (count,), generator=generator)
    noise = torch.randn(count, channels, size, size, generator=generator)
    return Images((centres[labels] + noise) / 2, labels)


def _idx(path: Path) -> np.ndarray:
    """An idx file of bytes, gzipped or not: magic number, sizes, then the data."""
    zipped = path.with_name(path.name + ".gz")
    if not path.exists() and not zipped.exists():
        raise SystemExit(
            f"{path}(.gz) doesn't exist: --data-dir takes the folder above {path.parent.name}/."
        )
    raw = path.read_bytes() if path.exists() else gzip.decompress(zipped.read_bytes())
    sizes = np.frombuffer(raw, ">i4", count=raw[3], offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(sizes)


def _cifar10(folder: Path, split: str) -> Images:
    """PNG files whose rows are images of 1024 RGB pixels; labels as JSON lists."""
    from PIL import Image

    names = [f"data_batch_{i}" for i in range(1, 6)] if split == "train" else ["test_batch"]
    Image.MAX_IMAGE_PIXELS = None  # ten thousand small images in one file aren't a bomb
    files = [np.asarray(Image.open(folder / f"{name}.png").convert("RGB")) for name in names]
    pixels = np.concatenate(files).reshape(-1, 32, 32, 3)
    return normalised(pixels, np.array(json.loads((folder / f"{split}_lables.json").read_text())))


def _medmnist(name: str, split: str, data_dir: Path | None) -> Images:
    path = None if data_dir is None else data_dir / f"{name}.npz"
    if path is None or not path.exists():
        raise SystemExit(
            f"{name}: put MedMNIST's {name}.npz (https://zenodo.org/records/10519652) into "
            "--data-dir; it isn't on the Hub as a plain data set."
        )
    with np.load(path) as arrays:
        return normalised(arrays[f"{split}_images"], arrays[f"{split}_labels"])
