"""The numbers behind the paper's figures, each from real images in a few minutes on two cores.

Everything named ``unsafe`` is computed from the private images without noise: for study only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import images
import metrics
import small_models
import torch
from images import Images
from torch import Tensor, nn
from transformers import TrainerCallback

from hf_dpkfc import (
    CurvatureOptions,
    DPKFCConfig,
    DPKFCTrainer,
    PinkNoiseProbe,
    Preconditioner,
    PrivacyPlan,
    PublicDataProbe,
    estimate_factors,
    fit_preconditioner,
)
from hf_dpkfc.curvature.fit import Factors
from hf_dpkfc.curvature.labels import LabelSpace
from hf_dpkfc.diagnostics.alignment import LayerAlignment, align, unsafe_oracle_factors
from hf_dpkfc.diagnostics.lanczos import SpectralDensity, probe_density, unsafe_density
from hf_dpkfc.diagnostics.signal import unsafe_signals
from hf_dpkfc.diagnostics.spectra import layer_spectra, thinned

# Expand is what the paper's formula is, and it sees key projections.
OPTIONS = CurvatureOptions(approx="expand", rank=None, num_batches=4, batch_size=128)
ORACLE, SYNTHETIC = "unsafe oracle", "pink noise"
PROXIES = {"FashionMNIST": "fashion_mnist", "CIFAR-10": "cifar10"}
NUM_PUBLIC = 2_000
CURVE_POINTS = 60


@dataclass(frozen=True)
class Data:
    """Real images by name, in one shape; private are MNIST's.

    Attributes:
        folder: With mnist/, fashion_mnist/ and cifar10/; None for the Hub.
        scratch: Where trainings write.
    """

    folder: Path | None
    scratch: Path

    @cached_property
    def private(self) -> Images:
        """MNIST's training images: the private records."""
        return images.load("mnist", "train", self.folder).shuffled()

    @cached_property
    def test(self) -> Images:
        """Held-out images of the same kind."""
        return images.load("mnist", "test", self.folder).part(0, 2_000)

    @cached_property
    def proxies(self) -> dict[str, Images]:
        """Public images in the private ones' shape."""
        return {
            label: grey(images.load(name, "test", self.folder).part(0, NUM_PUBLIC))
            for label, name in PROXIES.items()
        }

    @cached_property
    def colour(self) -> Images:
        """CIFAR-10's training images: private in the study of signal against noise."""
        return images.load("cifar10", "train", self.folder).part(0, 10_000).shuffled()


def grey(rows: Images, size: int = 28) -> Images:
    """One channel, cut to the middle."""
    margin = (rows.pixel_values.shape[-1] - size) // 2
    pixels = rows.pixel_values.mean(1, keepdim=True)
    return Images(pixels[..., margin : margin + size, margin : margin + size], rows.labels)


def padded(rows: Images, size: int = 32) -> Images:
    """Three equal channels, with a border of background."""
    margin = (size - rows.pixel_values.shape[-1]) // 2
    pixels = torch.nn.functional.pad(rows.pixel_values, [margin] * 4, value=-1.0)
    return Images(pixels, rows.labels).with_channels(3)


def batches(rows: Images, count: int, size: int = 128) -> Iterator[dict[str, Tensor]]:
    for start in range(0, count, size):
        part = rows.part(start, min(start + size, count))
        yield {"pixel_values": part.pixel_values, "labels": part.labels}


def public_probe(model: nn.Module, rows: Images) -> PublicDataProbe:
    """A proxy's images with labels of the model's own space, drawn at random."""
    return PublicDataProbe(rows, images.stack, LabelSpace.of(model))


def factors_by_source(model: nn.Module, data: Data, seed: int = 0) -> dict[str, Factors]:
    """Factors from every source, all at the model's present weights."""
    found = {ORACLE: unsafe_oracle_factors(model, data.private, images.stack, OPTIONS, seed=seed)}
    probes = {name: public_probe(model, rows) for name, rows in data.proxies.items()}
    probes[SYNTHETIC] = PinkNoiseProbe.for_model(model)
    for name, probe in probes.items():
        found[name] = estimate_factors(model, probe, OPTIONS, seed=seed)
    return found


# ---- Spectra ----

SPECTRUM_LAYERS = {
    "mlp": "layers.2",
    "cnn": "conv2",
    "vit": "vit.encoder.layer.0.attention.attention.query",
}


def unsafe_spectrum(data: Data) -> dict:
    """Eigenvalues of A ⊗ G of one layer of each network at its initial weights, by source."""
    result = {}
    for name in SPECTRUM_LAYERS:
        model = small_models.build(name)
        layer = _layer(model, SPECTRUM_LAYERS[name])
        curves = {}
        for source, factors in factors_by_source(model, data).items():
            spectra, _ = layer_spectra(factors, OPTIONS.damping)
            mine = next(s for s in spectra if s.name == layer)
            curves[source] = thinned(mine.F, CURVE_POINTS)
        result[name] = {"layer": layer, "curves": curves}
    return result


def _layer(model: nn.Module, wanted: str) -> str:
    """The layer of that name, or the first query projection, which HF has renamed before."""
    names = [name for name, _ in model.named_modules()]
    if wanted in names:
        return wanted
    return next(n for n in names if n.endswith(("query", "q_proj")))


# ---- Tracking ----

TRACKED_STEPS = (1, 5, 10, 20, 40, 60)


class _Tracker(TrainerCallback):
    """Calls a function with the model after certain steps."""

    def __init__(self, measure: Callable[[int, nn.Module], None]) -> None:
        self.measure = measure

    def on_step_end(self, args, state, control, model=None, **kwargs) -> None:
        if state.global_step in TRACKED_STEPS:
            self.measure(state.global_step, model)


def train(
    model: nn.Module,
    data: Data,
    name: str,
    callbacks: list[TrainerCallback] | None = None,
    **options,
) -> DPKFCTrainer:
    """A short private training of a small network on MNIST images."""
    settings = {
        "per_device_train_batch_size": 256,
        "max_steps": TRACKED_STEPS[-1],
        "learning_rate": 0.1,
        "optim": "sgd",
        "optim_args": "momentum=0.9",
        "lr_scheduler_type": "constant",
        "target_epsilon": 1.0,
        "target_delta": 1e-5,
        "num_probe_batches": 4,
        "probe_refresh_steps": 20,
    }
    config = DPKFCConfig(
        output_dir=str(data.scratch / name),
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=10_000,
        per_device_eval_batch_size=500,
        **settings | options,
    )
    trainer = DPKFCTrainer(
        model=model,
        args=config,
        train_dataset=data.private.part(0, 10_000),
        eval_dataset=data.test,
        data_collator=images.stack,
        compute_metrics=metrics.accuracy,
        callbacks=callbacks,
    )
    trainer.train()
    return trainer


def unsafe_tracking(data: Data, network: str, **options) -> dict:
    """Alignment with the oracle over a private training, per layer and source."""
    rows: list[dict] = []

    def measure(step: int, model: nn.Module) -> None:
        found = factors_by_source(model, data, seed=step)
        for source in (*PROXIES, SYNTHETIC):
            layers, notes = align(found[ORACLE], found[source])
            rows.extend(_row(step, source, layer) for layer in layers)
            rows.extend({"step": step, "source": source, "note": note} for note in notes)

    trainer = train(
        small_models.build(network), data, f"tracking-{network}", [_Tracker(measure)], **options
    )
    return {
        "network": network,
        "epsilon": trainer.epsilon_spent(),
        "test_accuracy": trainer.evaluate()["eval_accuracy"],
        "rows": rows,
    }


def _row(step: int, source: str, layer: LayerAlignment) -> dict:
    row: dict = {"step": step, "source": source, "layer": layer.name}
    for side in "AGF":
        agreement = getattr(layer, side)
        row |= {f"{side}_cosine": agreement.cosine, f"{side}_error": agreement.relative_error}
    return row


# ---- Signal against noise ----

SNR_IMAGES = 2_048


def unsafe_snr(data: Data) -> dict:
    """SNR of each layer on CIFAR-10 at initial weights: without, public and synthetic geometry."""
    plan = PrivacyPlan.calibrated(
        1.0,
        clip_norm=1.0,
        expected_batch_size=256,
        dataset_size=50_000,
        steps=5 * math.ceil(50_000 / 256),
        delta=1e-5,
    )
    noise_std = plan.noise_multiplier * plan.clip_norm / plan.expected_batch_size
    result: dict = {"epsilon": plan.epsilon, "noise_std": noise_std, "networks": {}}
    for network in ("cnn", "vit"):
        model = small_models.build(network, image_size=32, num_channels=3)
        proxy = padded(images.load("fashion_mnist", "test", data.folder).part(0, NUM_PUBLIC))
        geometries = {
            "DP-SGD": Preconditioner.identity(),
            "DP-KFC, FashionMNIST": fit_preconditioner(model, public_probe(model, proxy), OPTIONS),
            "DP-KFC, pink noise": fit_preconditioner(
                model, PinkNoiseProbe.for_model(model), OPTIONS
            ),
        }
        result["networks"][network] = {
            name: {
                s.name: s.snr(noise_std)
                for s in unsafe_signals(
                    model, batches(data.colour, SNR_IMAGES), geometry, plan.clip_norm
                )
            }
            for name, geometry in geometries.items()
        }
    return result


# ---- The Hessian ----

SLQ_IMAGES = 128
SLQ_STEPS = 24
SLQ_TRAINING_STEPS = 40


def unsafe_slq(data: Data) -> dict:
    """Hessian eigenvalues by source, before and after a private training."""
    result = {}
    for network in ("mlp", "cnn", "vit"):
        model = small_models.build(network)
        before = _densities(model, data)
        trained = train(model, data, f"slq-{network}", max_steps=SLQ_TRAINING_STEPS).model
        result[network] = {"initial": before, "trained": _densities(trained, data)}
    return result


def _densities(model: nn.Module, data: Data) -> dict:
    """The mean loss over as many images of each source, at the same weights."""
    size = {"num_steps": SLQ_STEPS, "num_starts": 1}
    found = {ORACLE: unsafe_density(model, batches(data.private, SLQ_IMAGES), **size)}
    for name, rows in data.proxies.items():
        probe = public_probe(model, rows)
        found[name] = probe_density(model, probe, batch_size=SLQ_IMAGES, **size)
    synthetic = PinkNoiseProbe.for_model(model)
    found[SYNTHETIC] = probe_density(model, synthetic, batch_size=SLQ_IMAGES, **size)
    return {name: _curve(density) for name, density in found.items()}


def _curve(density: SpectralDensity) -> list[tuple[int, float]]:
    """Magnitudes in descending order."""
    ranks = torch.logspace(0, math.log10(density.dim), CURVE_POINTS).round().long().unique()
    magnitude = SpectralDensity(density.nodes.abs(), density.weights, density.dim)
    values = magnitude.sorted_eigenvalues(ranks)
    return [(int(r), float(v)) for r, v in zip(ranks, values, strict=True)]


# ---- The lr × C surface ----

LEARNING_RATES = (0.003, 0.01, 0.03, 0.1, 0.3)
CLIP_NORMS = (0.1, 0.5, 2.0, 10.0, 50.0)
ARMS: Mapping[str, Mapping[str, str]] = {
    "DP-SGD": {"preconditioner": "none"},
    "DP-KFC": {"preconditioner": "kfac"},
}


def surface_cells() -> Iterator[tuple[str, float, float]]:
    """Every (arm, learning rate, C), coarse corners first, so that a part already shows it all."""
    grid = [
        (i + j, arm, rate, norm)
        for i, rate in enumerate(LEARNING_RATES)
        for j, norm in enumerate(CLIP_NORMS)
        for arm in ARMS
    ]
    for _, arm, rate, norm in sorted(grid, key=lambda cell: cell[0] % 2):
        yield arm, rate, norm


def surface_cell(data: Data, arm: str, rate: float, norm: float, steps: int) -> dict:
    """Test accuracy of one short training at ε = 2, the paper's budget in this study.

    That ε is one cell's alone: all cells train on the same images, and their costs add up.
    """
    trainer = train(
        small_models.build("cnn"),
        data,
        f"surface/{arm}-{rate:g}-{norm:g}",
        learning_rate=rate,
        clip_norm=norm,
        target_epsilon=2.0,
        max_steps=steps,
        **ARMS[arm],
    )
    return {
        "arm": arm,
        "learning_rate": rate,
        "clip_norm": norm,
        "test_accuracy": trainer.evaluate()["eval_accuracy"],
        "epsilon": trainer.epsilon_spent(),
    }
