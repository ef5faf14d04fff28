"""The arms of every comparison: a method is a set of DPKFCConfig options, with a grid to tune on.

Every arm gets one trial for each point of its grid, and nothing else is tuned. The grids of one
task differ by optimizer family only, because SGD's step is proportional to the gradient and Adam's
isn't; all arms of a task have as many points.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple


class Setting(NamedTuple):
    """What is tuned."""

    learning_rate: float
    clip_norm: float

    def scaled(self, rate_scale: float) -> Setting:
        """With another learning rate, in three digits so that it prints as it compares."""
        return self._replace(learning_rate=float(f"{self.learning_rate * rate_scale:.3g}"))


def _sgd_grid(steps: list[float], clip_norms: list[float]) -> tuple[Setting, ...]:
    """Points along SGD's ridge: where everything is clipped, only lr·C matters."""
    return tuple(Setting(step / clip, clip) for clip, step in product(clip_norms, steps))


def _adam_grid(rates: list[float], clip_norms: list[float]) -> tuple[Setting, ...]:
    """Adam's step doesn't scale with the gradient, so lr and C are independent."""
    return tuple(Setting(rate, clip) for clip, rate in product(clip_norms, rates))


# By optimizer family. lr·C for SGD with momentum 0.9, lr for the others.
# AdamBC's floor is absolute, so C decides how far it stands above the noise's own (σC/B)².
SIX_POINTS: Mapping[str, tuple[Setting, ...]] = {
    "sgd": _sgd_grid([0.05, 0.15, 0.5], [0.25, 2.0]),
    "adamw": _adam_grid([3e-4, 1e-3, 3e-3], [0.1, 1.0]),
    "adambc": _adam_grid([1e-3, 3e-3, 1e-2], [0.03, 0.1]),
}
# For runs that take seconds: one rate more below, since every arm of a head on complaints chose the
# lowest of the six points.
EIGHT_POINTS: Mapping[str, tuple[Setting, ...]] = {
    "sgd": _sgd_grid([0.015, 0.05, 0.15, 0.5], [0.25, 2.0]),
    "adamw": _adam_grid([1e-4, 3e-4, 1e-3, 3e-3], [0.1, 1.0]),
    "adambc": _adam_grid([3e-4, 1e-3, 3e-3, 1e-2], [0.03, 0.1]),
}
# For trials as long as a full run that takes minutes. Adam's C is the library's
# default: most gradients of a transformer are longer, and where all are, its step doesn't depend on
# C. AdamBC's is the lower one of its two above.
THREE_POINTS: Mapping[str, tuple[Setting, ...]] = {
    "sgd": _sgd_grid([0.05, 0.15, 0.5], [1.0]),
    "adamw": _adam_grid([3e-4, 1e-3, 3e-3], [1.0]),
    "adambc": _adam_grid([1e-3, 3e-3, 1e-2], [0.03]),
}
GRIDS = (SIX_POINTS, EIGHT_POINTS, THREE_POINTS)


@dataclass(frozen=True)
class Method:
    """One arm.

    Attributes:
        title: Its row in the table; ``{base}`` is SGD or Adam, ``{probe}`` pink or Zipf.
        options: DPKFCConfig options that make it.
        needs_public: Whether the probes are public records.
    """

    title: str
    options: Mapping[str, Any]
    needs_public: bool = False

    def family(self, optimizer: str) -> str:
        """Which grid it is tuned on, in a task that trains with this optimizer."""
        return "adambc" if self.options.get("dp_optimizer") == "adambc" else optimizer


NO_GEOMETRY = {"preconditioner": "none"}

METHODS: Mapping[str, Method] = {
    "none": Method("DP-{base}", NO_GEOMETRY),
    "disk": Method("DiSK", NO_GEOMETRY | {"dp_optimizer": "disk"}),
    "adambc": Method("DP-AdamBC", NO_GEOMETRY | {"dp_optimizer": "adambc"}),
    "adadps-public": Method(
        "AdaDPS (public)", {"preconditioner": "diagonal", "probe": "public"}, needs_public=True
    ),
    "adadps-synthetic": Method("AdaDPS ({probe})", {"preconditioner": "diagonal", "probe": "auto"}),
    "public": Method(
        "Public DP-KFC", {"preconditioner": "kfac", "probe": "public"}, needs_public=True
    ),
    "synthetic": Method("Synthetic DP-KFC", {"preconditioner": "kfac", "probe": "auto"}),
    "synthetic-inputs": Method(
        "Synthetic DP-KFC, inputs only",
        {"preconditioner": "kfac", "probe": "auto", "kfac_sides": "inputs"},
    ),
    "synthetic-adambc": Method(
        "Synthetic DP-KFC + DP-AdamBC",
        {"preconditioner": "kfac", "probe": "auto", "dp_optimizer": "adambc"},
    ),
    "words": Method("Synthetic DP-KFC (words)", {"preconditioner": "kfac", "probe": "words"}),
    "oracle": Method(
        "Oracle DP-KFC (ε not claimed)", {"preconditioner": "kfac", "probe": "oracle"}
    ),
}
# What is compared if nothing is said.
PAPER_METHODS = tuple(name for name in METHODS if name not in ("words", "synthetic-inputs"))
