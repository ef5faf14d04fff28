"""Image files as they come from their sources, in one layout and range."""

from __future__ import annotations

import gzip
import json

import images
import numpy as np
import pytest
import torch
from PIL import Image


def idx(array):
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
    return header + array.astype(np.uint8).tobytes()


def write_mnist(folder, pixels, labels, zipped):
    folder.mkdir()
    for name, array in (("images-idx3-ubyte", pixels), ("labels-idx1-ubyte", labels)):
        path = folder / f"train-{name}"
        path.write_bytes(idx(array))
        if zipped:
            path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
            path.unlink()


@pytest.mark.parametrize("zipped", [False, True])
def test_idx_files_become_channels_first_between_minus_one_and_one(tmp_path, zipped):
    pixels = np.zeros((3, 28, 28))
    pixels[1] = 255
    write_mnist(tmp_path / "mnist", pixels, np.array([4, 5, 6]), zipped)
    rows = images.load("mnist", "train", tmp_path)
    assert rows.pixel_values.shape == (3, 1, 28, 28)
    assert rows.pixel_values.amin((1, 2, 3)).tolist() == [-1, 1, -1]
    assert rows.labels.tolist() == [4, 5, 6]


def test_cifar_rows_are_images_of_1024_pixels(tmp_path):
    folder = tmp_path / "cifar10"
    folder.mkdir()
    pixels = np.zeros((2, 32, 32, 3), np.uint8)
    pixels[1, 0, :, 2] = 255  # the first line of the second image is blue
    Image.fromarray(pixels.reshape(2, 1024, 3)).save(folder / "test_batch.png")
    (folder / "test_lables.json").write_text(json.dumps([7, 8]))
    rows = images.load("cifar10", "test", tmp_path)
    assert rows.pixel_values.shape == (2, 3, 32, 32)
    assert torch.equal(rows.pixel_values[1, 2, 0], torch.ones(32))
    assert rows.pixel_values.sum() == -2 * 3 * 1024 + 2 * 32
    assert rows.labels.tolist() == [7, 8]


def test_pathmnist_is_read_from_medmnists_file(tmp_path):
    arrays = {"train_images": np.full((2, 28, 28, 3), 255, np.uint8), "train_labels": [[3], [8]]}
    np.savez(tmp_path / "pathmnist.npz", **arrays)
    rows = images.load("pathmnist", "train", tmp_path)
    assert rows.pixel_values.shape == (2, 3, 28, 28)
    assert rows.labels.tolist() == [3, 8]


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(SystemExit, match="train-images-idx3-ubyte"):
        images.load("mnist", "train", tmp_path)


def test_grey_images_become_colour_ones_without_copies():
    grey = images.noise_images(2, 1, seed=0)
    colour = grey.with_channels(3)
    assert colour.pixel_values.shape == (2, 3, 28, 28)
    assert torch.equal(colour.pixel_values[:, 0], colour.pixel_values[:, 2])


def test_shuffling_keeps_pairs_together():
    rows = images.noise_images(50, 1, seed=0)
    shuffled = rows.shuffled()
    at = {pixels.sum().item(): label.item() for pixels, label in map(dict.values, rows)}
    assert all(at[r["pixel_values"].sum().item()] == r["labels"].item() for r in shuffled)


def test_standardised_images_have_zero_mean_and_unit_deviation_each():
    rows = images.normalised(np.random.default_rng(0).integers(0, 256, (4, 28, 28)), np.arange(4))
    rows.pixel_values[3] = -1.0  # blank
    values = rows.standardised().pixel_values
    assert values.mean((1, 2, 3)).abs().max() < 1e-5
    torch.testing.assert_close(values[:3].std((1, 2, 3)), torch.ones(3))
    assert values[3].abs().max() == 0
