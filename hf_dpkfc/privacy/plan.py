"""The frozen plan: sampling, clip norm, noise and number of steps, bound together with their ε."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

from hf_dpkfc.errors import ConfigurationError
from hf_dpkfc.privacy.accounting import ACCOUNTANTS, calibrate, epsilon

DEFAULT_UNIT = "one row of the training set"


class Adjacency(StrEnum):
    """Which pairs of data sets are neighbours. Replace-one is never claimed."""

    ADD_REMOVE = "add/remove one unit"
    ZERO_OUT = "zero-out: one unit replaced by a null one that contributes nothing"


def steps_in(epochs: float, dataset_size: int, batch_size: int) -> int:
    """As HF counts them: batches in an epoch, rounded up, times epochs, rounded up again.

    0 where size or batch aren't positive, which a plan then refuses by name.
    """
    if min(dataset_size, batch_size) < 1:
        return 0
    steps = epochs * math.ceil(dataset_size / batch_size)
    if not math.isfinite(steps):
        raise ConfigurationError(
            f"epochs={epochs}.", why="a training ends.", way_out="give a finite number."
        )
    return math.ceil(steps)


def default_delta(dataset_size: int) -> float:
    """A tenth of 1/N."""
    return 1 / (10 * max(1, dataset_size))


@dataclass(frozen=True)
class PrivacyPlan:
    """Everything that ε depends on. Nobody else stores these numbers.

    Attributes:
        noise_multiplier: σ; the noise has standard deviation σ·clip_norm.
        clip_norm: C, in the preconditioned space.
        expected_batch_size: B, public; noisy sums are divided by it.
        dataset_size: N, public; the sampling rate is B/N.
        steps: T, the number of releases allowed.
        delta: δ, at most 1/N.
        accountant: "rdp" or "prv".
        adjacency: Which neighbours the statement is about.
        privacy_unit: What one unit is, in words.
        target_epsilon: The ε asked for, if σ was calibrated.
    """

    noise_multiplier: float
    clip_norm: float
    expected_batch_size: int
    dataset_size: int
    steps: int
    delta: float
    accountant: str = "rdp"
    adjacency: Adjacency = Adjacency.ZERO_OUT
    privacy_unit: str = DEFAULT_UNIT
    target_epsilon: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "adjacency", Adjacency(self.adjacency))
        checks = {
            "noise_multiplier": 0 <= self.noise_multiplier < math.inf,
            "clip_norm": 0 < self.clip_norm < math.inf,
            "expected_batch_size": self.expected_batch_size >= 1,
            "dataset_size": self.dataset_size >= 1,
            "steps": self.steps >= 1,
            "delta": 0 < self.delta < 1,
            "accountant": self.accountant in ACCOUNTANTS,
            "target_epsilon": self.target_epsilon is None or 0 < self.target_epsilon < math.inf,
        }
        for name, holds in checks.items():
            if not holds:
                raise ConfigurationError(
                    f"{name}={getattr(self, name)!r}.",
                    why="no guarantee can be stated with it.",
                    way_out=_LEGAL[name],
                )
        if self.expected_batch_size > self.dataset_size:
            raise ConfigurationError(
                f"The expected batch of {self.expected_batch_size} is larger than the data set of "
                f"{self.dataset_size}.",
                why="the sampling rate is their quotient, a probability.",
                way_out="lower per_device_train_batch_size × gradient_accumulation_steps × "
                "processes.",
            )
        # 1/N itself is legal, also where it was rounded to float32 on its way here.
        if self.delta * self.dataset_size > 1 + 1e-6:
            raise ConfigurationError(
                f"delta={self.delta!r} is above 1/N for N = {self.dataset_size} units.",
                why="publishing every unit whole with probability δ would keep the promise, and "
                "on average that is more than one of them.",
                way_out=f"choose target_delta ≤ 1/{self.dataset_size}; 1/(10 N) is the default.",
            )

    @classmethod
    def calibrated(cls, target_epsilon: float, **fields: Any) -> PrivacyPlan:
        """The plan with the least noise that keeps ε at or below the target."""
        unchecked = cls(noise_multiplier=1.0, target_epsilon=target_epsilon, **fields)
        sigma = calibrate(
            target_epsilon,
            unchecked.sampling_rate,
            unchecked.steps,
            unchecked.delta,
            unchecked.accountant,
        )
        return dataclasses.replace(unchecked, noise_multiplier=sigma)

    @property
    def sampling_rate(self) -> float:
        """Q = B/N."""
        return self.expected_batch_size / self.dataset_size

    @property
    def steps_per_epoch(self) -> int:
        """⌈N/B⌉."""
        return steps_in(1, self.dataset_size, self.expected_batch_size)

    @cached_property
    def epsilon(self) -> float:
        """ε of the whole plan: what may be claimed, whatever happens in between."""
        return self.epsilon_at(self.steps)

    def epsilon_at(self, step: int, accountant: str | None = None) -> float:
        """ε after that many releases, by this plan's accountant or another one's opinion."""
        return epsilon(
            self.noise_multiplier,
            self.sampling_rate,
            step,
            self.delta,
            accountant or self.accountant,
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields, as JSON has them."""
        return dataclasses.asdict(self) | {"adjacency": self.adjacency.value}

    def to_json(self) -> str:
        """One canonical line."""
        return json.dumps(self.to_dict(), sort_keys=True, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> PrivacyPlan:
        """The plan in :meth:`to_json`'s form."""
        try:
            return cls(**json.loads(text))
        except (TypeError, json.JSONDecodeError) as error:
            raise ConfigurationError(
                f"Not a privacy plan: {text[:80]!r}.",
                why=str(error),
                way_out="give the JSON that PrivacyPlan.to_json wrote.",
            ) from error

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the canonical form."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def __str__(self) -> str:
        rows = {
            "ε": f"{self.epsilon:.4g} at δ = {self.delta:.3g} ({self.accountant.upper()})",
            "noise multiplier σ": f"{self.noise_multiplier:.4g}",
            "clip norm C": f"{self.clip_norm:g} (in the preconditioned space)",
            "sampling": f"Poisson, q = {self.expected_batch_size}/{self.dataset_size} "
            f"= {self.sampling_rate:.4g}",
            "steps": f"{self.steps} ({self.steps_per_epoch} per epoch)",
            "adjacency": self.adjacency.value,
            "unit of privacy": self.privacy_unit,
        }
        width = max(map(len, rows))
        return "\n".join(f"{name.ljust(width)}  {text}" for name, text in rows.items())


_LEGAL = {
    "noise_multiplier": "choose a finite noise_multiplier ≥ 0 (0 is for debugging only).",
    "clip_norm": "choose a finite clip_norm > 0, for instance 1.0.",
    "expected_batch_size": "choose a batch of at least one example.",
    "dataset_size": "give a public_dataset_size ≥ 1.",
    "steps": "train for at least one step.",
    "delta": "choose 0 < target_delta < 1, at most 1/N.",
    "accountant": f"choose one of {', '.join(ACCOUNTANTS)}.",
    "target_epsilon": "choose a finite target_epsilon > 0, for instance 1.0 to 8.0.",
}
