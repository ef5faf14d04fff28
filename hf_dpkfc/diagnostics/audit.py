"""Audits: attack our own releases with canaries, and hold what leaks against the claim.

The attacker knows everything but the key: weights, preconditioner, every other record, and the
un-noised contribution of each canary. Its scores are therefore private quantities; audits run on
made-up records only, never on a user's.

- :func:`audit_step`: one real release, many times, with the canary and without it. Its bound on μ
  is close to the truth, so half the noise is seen.
- :func:`audit_training`: one whole training with many canaries, each in or out by a fair coin. It
  is looser, but covers sampling, refreshes and the sum over steps.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_dpkfc.curvature.fit import CurvatureOptions
from hf_dpkfc.curvature.preconditioner import Preconditioner
from hf_dpkfc.diagnostics.bounds import Guesses, best_threshold, errors, gaussian_bound
from hf_dpkfc.engine import Geometry, PrivateRun, Query
from hf_dpkfc.errors import ConfigurationError
from hf_dpkfc.layers.routes import inspect_model
from hf_dpkfc.mechanism.clipping import Clipper
from hf_dpkfc.mechanism.randomness import SecretKey
from hf_dpkfc.privacy.plan import Adjacency, PrivacyPlan

CONFIDENCE = 0.9999

# At ε = 1 (σ ≈ 4, the hardest of the usual ones) half the noise is seen with 4,000 trials.
STEP_TRIALS = 8000

# Share of the trials that choose the threshold; the bound comes from the others.
HELD_OUT = 0.25

# Enough for one trial in each part; a bound from so few is near zero.
MIN_TRIALS = 8

# One run says little per canary: with 512 of them, perfect guesses refute ε ≈ 4 at δ = 1e-5.
NUM_CANARIES = 512
NUM_CLASSES = 3

# In clip norms. So large that a canary is clipped at any small weights: it contributes C, the most
# there is.
CANARY_SCALE = 100.0

# What a card must know of an audit: the code is the model's, the network isn't.
_STAGE = "this code, on a small softmax regression under K-FAC,"

NEVER = 2**62


@dataclass(frozen=True)
class Audit:
    """A lower bound on what leaks, beside the claim.

    Attributes:
        method: What was attacked, and in which quantity.
        confidence: The bound is above the truth with probability 1 − confidence at most.
        bound: From the attack.
        claim: From the plan.
        num_trials: Releases in each world, or canaries.
        unsafe_scores: Of the attacker, without the canary and with it.
        threshold: Above which the attacker says "in".
    """

    method: str
    confidence: float
    bound: float
    claim: float
    num_trials: int
    unsafe_scores: tuple[np.ndarray, np.ndarray]
    threshold: float

    @property
    def holds(self) -> bool:
        """Whether the claim survived."""
        return self.bound <= self.claim

    def to_dict(self) -> dict[str, Any]:
        """What a privacy statement and its card quote."""
        return {
            "method": self.method,
            "confidence": self.confidence,
            "bound": self.bound,
            "claim": self.claim,
            "num_trials": self.num_trials,
        }

    def __str__(self) -> str:
        verdict = "the claim holds" if self.holds else "THE CLAIM IS REFUTED"
        return (
            f"{self.method}\n"
            f"  lower bound {self.bound:.4g} against the claim of {self.claim:.4g}, confidence "
            f"{self.confidence:.6g}, {self.num_trials} trials: {verdict}"
        )

    def draw(self, path: str | Path) -> None:
        """Both distributions of the attacker's scores, as a PNG."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        bins = np.histogram_bin_edges(np.concatenate(self.unsafe_scores), bins=60).tolist()
        for scores, label in zip(self.unsafe_scores, ("canary out", "canary in"), strict=True):
            axes.hist(scores, bins=bins, alpha=0.6, density=True, label=label)
        axes.axvline(self.threshold, color="black", linewidth=1, label="threshold")
        axes.set_xlabel("attacker's score (how much of the canary is there, in clip norms)")
        axes.set_ylabel("density")
        axes.set_title(f"lower bound {self.bound:.3g}, claim {self.claim:.3g}")
        axes.legend()
        figure.savefig(path, dpi=120)


@dataclass(frozen=True)
class Stage:
    """Where an audit takes place.

    Attributes:
        query: The model and its loss; ``dataset`` holds the bystanders, known to the attacker.
        canaries: Records whose presence is to be found out.
        geometry: In which space gradients are clipped.
    """

    query: Query
    canaries: Sequence[Any]
    geometry: Geometry

    def run(self, plan: PrivacyPlan, included: Sequence[Any], *, secure: bool) -> PrivateRun:
        """The real thing with a fresh key; no ledger, since made-up records cost nothing."""
        records = [*self.query.dataset, *included]
        return PrivateRun(
            plan=plan,
            key=SecretKey.generate(),
            ledger=None,
            query=replace(self.query, dataset=records),
            geometry=self.geometry,
            secure=secure,
        )

    def unsafe_directions(self, preconditioner: Preconditioner, clip_norm: float) -> Tensor:
        """Each canary's un-noised contribution at the present weights, [canary, coordinate]."""
        query = self.query
        clipper = Clipper(
            query.model, query.table, preconditioner, query.per_example_loss, clip_norm
        )
        sums = (clipper.sum_of([(query.collate([canary]), 1)]) for canary in self.canaries)
        return torch.stack([_flat(total.values) for total in sums])


def audit_step(
    noise_multiplier: float,
    *,
    clip_norm: float = 1.0,
    num_trials: int = STEP_TRIALS,
    confidence: float = CONFIDENCE,
    stage: Stage | None = None,
    secure: bool = False,
) -> Audit:
    """Lower bound on μ of one real release at rate 1, where the claim is 1/σ exactly.

    Args:
        noise_multiplier: σ of the release.
        clip_norm: C.
        num_trials: Releases in each of the two worlds.
        confidence: Of the bound.
        stage: Model, bystanders and one canary; by default a tiny one.
        secure: Audit the cryptographic generator.
    """
    _require(num_trials, confidence, noise_multiplier)
    audited = _STAGE if stage is None else "the given model"
    stage = stage or tiny_stage(1, clip_norm=clip_norm)
    everyone = len(stage.query.dataset) + 1
    plan = PrivacyPlan(
        noise_multiplier, clip_norm, everyone, everyone, 1, 1e-5, adjacency=Adjacency.ADD_REMOVE
    )
    stage = replace(stage, geometry=replace(stage.geometry, refresh_steps=NEVER))
    maps = stage.geometry.fit(0, stage.query)
    direction = F.normalize(stage.unsafe_directions(maps, clip_norm)[0], dim=0)
    worlds = [stage.run(plan, included, secure=secure) for included in ([], stage.canaries[:1])]
    with _one_thread():
        without, with_it = (
            np.fromiter(_projections(run, direction, num_trials), np.float64) for run in worlds
        )
    held_out = int(HELD_OUT * num_trials)
    threshold = best_threshold(without[:held_out], with_it[:held_out], confidence)
    wrong = errors(without[held_out:], with_it[held_out:], threshold)
    return Audit(
        method=f"white-box audit of one step of {audited} at rate 1: μ of its Gaussian trade-off "
        "function",
        confidence=confidence,
        bound=gaussian_bound(*wrong, num_trials - held_out, confidence),
        claim=1 / noise_multiplier,
        num_trials=num_trials,
        unsafe_scores=(without, with_it),
        threshold=threshold,
    )


def audit_training(
    plan: PrivacyPlan,
    *,
    confidence: float = CONFIDENCE,
    learning_rate: float = 1e-3,
    stage: Stage | None = None,
    secure: bool = False,
) -> Audit:
    """Lower bound on the accounted ε at the plan's δ, from one whole training.

    Every canary is in or out by a fair coin. After the last step the attacker, who saw all
    releases, calls the quarter with the highest scores in and the quarter with the lowest out.

    Args:
        plan: Sampling, clip norm, noise and steps of the training.
        confidence: Of the bound.
        learning_rate: Of plain SGD on the releases.
        stage: Model, bystanders and canaries; by default a tiny one.
        secure: Audit the cryptographic generator.
    """
    _require(MIN_TRIALS, confidence, plan.noise_multiplier)
    audited = _STAGE if stage is None else "the given model"
    stage = stage or tiny_stage(NUM_CANARIES, clip_norm=plan.clip_norm)
    is_in = np.array([secrets.randbits(1) for _ in stage.canaries], dtype=bool)
    included = [canary for canary, yes in zip(stage.canaries, is_in, strict=True) if yes]
    run = stage.run(plan, included, secure=secure)
    with _one_thread():
        scores = sum(_scored_steps(stage, run, learning_rate), np.zeros(len(is_in)))
    order, quarter = np.argsort(scores), max(1, len(is_in) // 4)
    correct = int(is_in[order[-quarter:]].sum() + (~is_in[order[:quarter]]).sum())
    guesses = Guesses(len(is_in), 2 * quarter, correct)
    return Audit(
        method=f"one-run audit of {plan.steps} steps of {audited} at rate "
        f"{plan.sampling_rate:.3g}: ε at δ = {plan.delta:.3g}, as accounted for the least noise "
        "that is refuted (f-DP)",
        confidence=confidence,
        bound=guesses.epsilon_bound(plan, confidence),
        claim=plan.epsilon,
        num_trials=len(is_in),
        unsafe_scores=(scores[~is_in], scores[is_in]),
        threshold=float(np.median(scores)),
    )


def _projections(run: PrivateRun, direction: Tensor, num_trials: int) -> Iterator[float]:
    """The attacker's score of each release: its component along the canary, in clip norms."""
    scale = run.plan.expected_batch_size / run.plan.clip_norm
    for step in range(num_trials):
        noisy_mean = run.release(step)
        assert noisy_mean is not None
        yield scale * float(_flat(noisy_mean) @ direction)


def _scored_steps(stage: Stage, run: PrivateRun, learning_rate: float) -> Iterator[np.ndarray]:
    """Train, and score every canary against each release."""
    parameters = dict(run.query.model.named_parameters())
    scale = run.plan.expected_batch_size / run.plan.clip_norm
    for step in range(run.plan.steps):
        noisy_mean = run.release(step)
        assert noisy_mean is not None
        assert run.preconditioner is not None
        directions = stage.unsafe_directions(run.preconditioner, run.plan.clip_norm)
        yield _presence(directions / run.plan.clip_norm, scale * _flat(noisy_mean))
        with torch.no_grad():
            for name, gradient in noisy_mean.items():
                parameters[name].sub_(learning_rate * gradient)


def _presence(directions: Tensor, release: Tensor) -> np.ndarray:
    """How much of each canary is in a release: regression, since contributions overlap."""
    ridge = 0.1 * torch.eye(len(directions), dtype=torch.float64)
    gram = (directions @ directions.mT).double()
    return torch.linalg.solve(gram + ridge, (directions @ release).double()).numpy()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Thousands of tiny products: threads would mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _flat(values: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([values[name].flatten() for name in sorted(values)])


def _require(num_trials: int, confidence: float, noise_multiplier: float) -> None:
    ranges = {
        f"num_trials={num_trials}": num_trials >= MIN_TRIALS,
        f"confidence={confidence}": 0 < confidence < 1,
        f"noise_multiplier={noise_multiplier}": 0 < noise_multiplier < math.inf,
    }
    for what, holds in ranges.items():
        if not holds:
            raise ConfigurationError(
                f"{what} in an audit.",
                why="a bound needs trials for its threshold and for itself, a probability below 1, "
                "and a finite claim to be held against.",
                way_out=f"choose num_trials ≥ {MIN_TRIALS} (thousands for a tight bound), "
                "0 < confidence < 1 and a positive noise multiplier.",
            )


# ---- The default stage ----


@dataclass(frozen=True)
class _GaussianProbe:
    """Vectors without any record in them."""

    width: int
    is_data_free: ClassVar[bool] = True
    labels: ClassVar[None] = None

    def batches(
        self, num_batches: int, batch_size: int, generator: torch.Generator
    ) -> Iterator[dict[str, Tensor]]:
        for _ in range(num_batches):
            x = torch.randn(batch_size, self.width, generator=generator)
            labels = torch.randint(NUM_CLASSES, (batch_size,), generator=generator)
            yield {"x": x, "labels": labels}


def tiny_stage(num_canaries: int, num_bystanders: int = 7, *, clip_norm: float = 1.0) -> Stage:
    """A softmax regression whose canaries have orthogonal gradients, under K-FAC."""
    width = max(8, num_canaries)
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(width, NUM_CLASSES)
    for parameter in model.parameters():  # zero: no canary is known already, each has a gradient
        nn.init.zeros_(parameter)
    points = torch.randn(num_bystanders, width, generator=generator)
    bystanders = [(x, i % NUM_CLASSES) for i, x in enumerate(points)]
    spikes = CANARY_SCALE * clip_norm * torch.eye(width)[:num_canaries]
    query = Query(
        model=model,
        table=inspect_model(model),
        per_example_loss=_cross_entropies,
        loss_name="softmax regression",
        dataset=bystanders,
        collate=_stacked,
        max_micro_batch=64,
    )
    options = CurvatureOptions(rank=None, num_batches=8, batch_size=64)
    geometry = Geometry(options, _GaussianProbe(width), refresh_steps=5, seed=0)
    return Stage(query, [(x, i % NUM_CLASSES) for i, x in enumerate(spikes)], geometry)


def _cross_entropies(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    return F.cross_entropy(model(inputs["x"]), inputs["labels"], reduction="none")


def _stacked(records: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
    vectors, labels = zip(*records, strict=True)
    return {"x": torch.stack(vectors), "labels": torch.tensor(labels)}
