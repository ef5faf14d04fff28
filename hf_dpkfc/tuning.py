"""A ready search space, and what a search costs: every trial trains on the same records."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_dpkfc.curvature.probes import PinkNoiseProbe, Probe, ZipfTokenProbe
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
    return "zipf_exponent" if isinstance(probe, ZipfTokenProbe) else None


@dataclass(frozen=True)
class TuningCost:
    """What the trials of a search spent together.

    Attributes:
        num_trials: Runs that were opened; one that failed or was pruned counts in full.
        epsilon: Their composition, by RDP; infinite if one of them has no guarantee.
        delta: The largest of theirs.
    """

    num_trials: int
    epsilon: float
    delta: float

    @classmethod
    def of(cls, plans: Sequence[PrivacyPlan], *, claims_privacy: bool = True) -> TuningCost:
        """The composed cost of runs on the same records.

        Args:
            plans: One for each run.
            claims_privacy: False where factors saw private records: the cost is then infinite.
        """
        delta = max((plan.delta for plan in plans), default=0.0)
        if not plans:
            return cls(0, 0.0, delta)
        if not claims_privacy or any(plan.noise_multiplier == 0 for plan in plans):
            return cls(len(plans), math.inf, delta)
        runs = [(p.noise_multiplier, p.sampling_rate, p.steps) for p in plans]
        return cls(len(plans), composed_epsilon(runs, delta), delta)

    def save(self, path: Path) -> None:
        """Write it beside the trials' folders, for the report."""
        fields = {
            "num_trials": self.num_trials,
            "epsilon": self.epsilon if math.isfinite(self.epsilon) else "infinite",
            "delta": self.delta,
            "statement": str(self),
        }
        path.write_text(json.dumps(fields, indent=1, ensure_ascii=False) + "\n")

    def __str__(self) -> str:
        return (
            f"Tuning isn't covered by any single trial's ε: {self.num_trials} trials on the same "
            f"records spend ε = {self.epsilon:.4g} together at δ = {self.delta:.3g} (RDP "
            "composition). State that, or tune on public data."
        )
