"""A ready search space, and what a search costs: every trial trains on the same records."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hf_dpkfc.curvature.probes import PinkNoiseProbe, Probe, ZipfTokenProbe
from hf_dpkfc.curvature.sampled import CheckpointTokenProbe
from hf_dpkfc.errors import LedgerError
from hf_dpkfc.privacy.accounting import composed_epsilon
from hf_dpkfc.privacy.plan import PrivacyPlan


def search_space(trial: Any, *, exponent: str | None = "pink_alpha") -> dict[str, Any]:
    """Options of an Optuna trial: learning rate, C, damping, α and the number of probe batches.

    Ranges of learning rate, C, α and probe batches are those of the paper's study (appendix
    "Hyperparameter Sensitivity"), with lower learning rates for Adam. Damping is relative here
    (1 adds a factor's mean eigenvalue), so its range is around 1 and not the paper's.

    Args:
        trial: Optuna's.
        exponent: Which option α is: "pink_alpha" for images, "zipf_exponent" for text, None where
            the probe has none.
    """
    space = {
        "learning_rate": trial.suggest_float("learning_rate", 1e-4, 0.5, log=True),
        "clip_norm": trial.suggest_float("clip_norm", 0.1, 50.0, log=True),
        "damping": trial.suggest_float("damping", 1e-2, 10.0, log=True),
        "num_probe_batches": trial.suggest_int("num_probe_batches", 1, 100, log=True),
    }
    if exponent is not None:
        space[exponent] = trial.suggest_float(exponent, 0.0, 2.0)
    return space


def exponent_of(probe: Probe | None) -> str | None:
    """The option that α is for this probe."""
    if isinstance(probe, PinkNoiseProbe):
        return "pink_alpha"
    is_fixed = isinstance(probe, CheckpointTokenProbe)  # its sequences were said before training
    return "zipf_exponent" if isinstance(probe, ZipfTokenProbe) and not is_fixed else None


@dataclass(frozen=True)
class TuningCost:
    """What trials on the same records spent together.

    Attributes:
        runs: (noise multiplier, sampling rate, steps) of each run that was opened; one that failed
            or was pruned counts in full.
        delta: The largest of theirs.
        claims_privacy: False where factors saw private records.
    """

    runs: tuple[tuple[float, float, int], ...]
    delta: float
    claims_privacy: bool = True

    @classmethod
    def of(cls, plans: Sequence[PrivacyPlan], *, claims_privacy: bool = True) -> TuningCost:
        """The cost of these plans' runs."""
        runs = tuple((p.noise_multiplier, p.sampling_rate, p.steps) for p in plans)
        delta = max((plan.delta for plan in plans), default=0.0)
        return cls(runs, delta, claims_privacy)

    @classmethod
    def nothing(cls) -> TuningCost:
        """Of no trial."""
        return cls((), 0.0)

    @property
    def num_trials(self) -> int:
        """How many runs were opened."""
        return len(self.runs)

    @cached_property
    def epsilon(self) -> float:
        """Their composition, by RDP; infinite if one of them has no guarantee."""
        if not self.runs:
            return 0.0
        if not self.claims_privacy or any(sigma == 0 for sigma, _, _ in self.runs):
            return math.inf
        return composed_epsilon(self.runs, self.delta)

    def __add__(self, other: TuningCost) -> TuningCost:
        """The cost of both."""
        return TuningCost(
            self.runs + other.runs,
            max(self.delta, other.delta),
            self.claims_privacy and other.claims_privacy,
        )

    def save(self, path: Path) -> None:
        """Write it beside the trials' folders, for the report."""
        fields = {
            "num_trials": self.num_trials,
            "epsilon": self.epsilon if math.isfinite(self.epsilon) else "infinite",
            "delta": self.delta,
            "statement": str(self),
            "runs": self.runs,
            "claims_privacy": self.claims_privacy,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".part")
        partial.write_text(json.dumps(fields, indent=1, ensure_ascii=False) + "\n")
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> TuningCost:
        """What earlier searches in this folder spent; nothing if there were none.

        Raises:
            LedgerError: If the file can't be read: their cost would be lost.
        """
        if not path.exists():
            return cls.nothing()
        try:
            fields = json.loads(path.read_text())
            runs = tuple((float(s), float(q), int(t)) for s, q, t in fields["runs"])
            return cls(runs, float(fields["delta"]), bool(fields["claims_privacy"]))
        except (ValueError, KeyError, TypeError) as error:
            raise LedgerError(
                f"{path} can't be read.",
                why=f"it holds what earlier searches on these records have cost ({error!r}).",
                way_out="restore it, or move it away and add its cost to the new one's yourself.",
            ) from error

    def __str__(self) -> str:
        return (
            f"Tuning isn't covered by any single trial's ε: {self.num_trials} trials on the same "
            f"records spend ε = {self.epsilon:.4g} together at δ = {self.delta:.3g} (RDP "
            "composition). State that, or tune on public data."
        )
