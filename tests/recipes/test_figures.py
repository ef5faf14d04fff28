from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest
import torch

RECIPES = Path(__file__).parents[2] / "recipes"

pytestmark = pytest.mark.recipe


@pytest.fixture
def figures(monkeypatch, tmp_path):
    """The recipe with noise for images and as little work as possible."""
    monkeypatch.syspath_prepend(str(RECIPES))
    import figure_data
    import figures
    import images

    def noise(name, split, folder):
        channels, size = {"cifar10": (3, 32)}.get(name, (1, 28))
        return images.noise_images(300, channels, seed=len(name + split), size=size)

    monkeypatch.setattr(images, "load", noise)
    small = figure_data.CurvatureOptions(approx="expand", rank=None, num_batches=1, batch_size=16)
    monkeypatch.setattr(figure_data, "OPTIONS", small)
    monkeypatch.setattr(figure_data, "TRACKED_STEPS", (1, 2))
    monkeypatch.setattr(figure_data, "SNR_IMAGES", 32)
    monkeypatch.setattr(figure_data, "SLQ_IMAGES", 8)
    monkeypatch.setattr(figure_data, "SLQ_STEPS", 3)
    monkeypatch.setattr(figure_data, "SLQ_TRAINING_STEPS", 2)
    monkeypatch.setattr(figures, "RESULTS", tmp_path / "results")
    monkeypatch.chdir(tmp_path)
    return figures


def run(monkeypatch, figures, *arguments):
    monkeypatch.setattr(sys, "argv", ["figures.py", *arguments])
    figures.main()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["snr", "spectrum", "tracking_cnn", "tracking_vit", "slq"])
def test_a_figure_leaves_its_data_and_both_pictures(figures, monkeypatch, tmp_path, name):
    run(monkeypatch, figures, name)
    for suffix in ("json", "png", "svg"):
        assert (tmp_path / f"results/{name}.{suffix}").stat().st_size > 500


@pytest.mark.slow
def test_an_interrupted_surface_goes_on_where_it_was(figures, monkeypatch, tmp_path):
    run(monkeypatch, figures, "surface", "--steps", "1", "--cells", "1")
    run(monkeypatch, figures, "surface", "--steps", "1", "--cells", "1")
    cells = json.loads((tmp_path / "results/surface.json").read_text())["result"]["cells"]
    assert len({(c["arm"], c["learning_rate"], c["clip_norm"]) for c in cells}) == 2


def test_every_figure_of_private_records_is_titled_unsafe(figures):
    committed = [p for p in (RECIPES / "results/figures").glob("*.json") if p.stem != "surface"]
    titles = {
        path.stem: figures.FIGURES[path.stem][1](
            json.loads(path.read_text())["result"]
        ).get_suptitle()
        for path in committed
    }
    assert titles
    assert all(title.startswith("unsafe") for title in titles.values()), titles


def test_sources_are_compared_on_the_same_weights(figures, tmp_path):
    import figure_data
    import small_models

    model = small_models.build("mlp")
    before = [p.clone() for p in model.parameters()]
    found = figure_data.factors_by_source(model, figure_data.Data(None, tmp_path))
    assert list(found) == ["unsafe oracle", "FashionMNIST", "CIFAR-10", "pink noise"]
    assert all(torch.equal(b, p) for b, p in zip(before, model.parameters(), strict=True))
    # Nothing but the input differs in the first layer's A: its last column is the bias's ones.
    corners = {float(f.pairs["layers.0"].A.covariance()[-1, -1]) for f in found.values()}
    assert corners == {1.0}


def test_the_surface_begins_with_a_coarse_grid_of_both_arms(figures):
    import figure_data

    cells = list(figure_data.surface_cells())
    assert len(set(cells)) == len(cells) == 50
    half = cells[: len(cells) // 2]
    assert {arm for arm, _, _ in half} == {"DP-SGD", "DP-KFC"}
    assert {rate for _, rate, _ in half} == set(figure_data.LEARNING_RATES)


def test_an_unknown_figure_is_refused(figures, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run(monkeypatch, figures, "fig7")
    assert "no figure fig7" in capsys.readouterr().err


def test_results_name_the_command_that_made_them(figures, tmp_path):
    figures.save("surface", {"x": 1 / 3}, argparse.Namespace(steps=7))
    content = json.loads((tmp_path / "results/surface.json").read_text())
    assert content["command"] == "python recipes/figures.py surface --steps 7"
    assert content["result"] == {"x": 0.33333}


def test_the_readme_counts_the_surfaces_cells():
    cells = json.loads((RECIPES / "results/figures/surface.json").read_text())["result"]["cells"]
    by_arm = {
        arm: {
            (c["learning_rate"], c["clip_norm"]): c["test_accuracy"]
            for c in cells
            if c["arm"] == arm
        }
        for arm in ("DP-SGD", "DP-KFC")
    }
    ahead = sum(by_arm["DP-KFC"][at] > accuracy for at, accuracy in by_arm["DP-SGD"].items())
    good = {arm: sum(a >= 0.85 for a in found.values()) for arm, found in by_arm.items()}
    readme = " ".join((RECIPES.parent / "README.md").read_text().split())
    assert f"ahead in {ahead} of {len(cells) // 2} cells" in readme
    assert f"{good['DP-KFC']} of its cells reach 85 % against DP-SGD's {good['DP-SGD']}" in readme
